"""Balance and held-out loss of a small mixture under three router losses, on one CPU core.

    python -m benchmarks.router_loss [STEPS]

A small Qwen3-MoE with random weights trains on data/sample. The router loss takes the numbers of
tokens per expert from the micro-batch (as transformers does), from the whole step, or from the step
before (as train.py does). Load is the largest number of tokens of an expert divided by the mean, on
held-out rows, as a mean over layers.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

SAMPLE = Path("data/sample")
KINDS = ("no router loss", "micro-batch", "whole step", "step before")
ROWS, MICRO_BATCH, EXPERTS, TOP_K, COEFFICIENT, SEEDS = 32, 8, 16, 2, 0.01, 2


def read(name: str) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE / "model")
    rows = [json.loads(line)["messages"] for line in (SAMPLE / name).read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    return [torch.tensor(tokenizer(text).input_ids) for text in texts]


def forward(model: Qwen3MoeForCausalLM, rows: list[torch.Tensor]) -> tuple:
    """Return the sum of cross entropies, and of each layer the probabilities of real tokens."""
    ids = pad_sequence(rows, batch_first=True)
    real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    out = model(input_ids=ids, attention_mask=real, output_router_logits=True)
    each = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    probabilities = [p.softmax(-1)[real.flatten() > 0] for p in out.router_logits]
    return (each * real[:, 1:].flatten()).sum(), torch.stack(probabilities)


def counts_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens per expert, [layers, experts]."""
    return F.one_hot(probabilities.topk(TOP_K).indices, EXPERTS).sum((1, 2)).float()


def train(kind: str, seed: int, steps: int) -> tuple[float, float]:
    """Return held-out loss and load after training."""
    rows, held_out = read("train.jsonl"), read("eval.jsonl")
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=384, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, moe_intermediate_size=64, num_experts=EXPERTS,
            num_experts_per_tok=TOP_K, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    before = torch.ones(EXPERTS)
    for _ in range(steps):
        chosen = [rows[i] for i in torch.randint(len(rows), (ROWS,))]
        batches = [chosen[i : i + MICRO_BATCH] for i in range(0, ROWS, MICRO_BATCH)]
        tokens = sum(map(len, chosen))
        now = torch.zeros(EXPERTS)
        if kind == "whole step":
            with torch.no_grad():
                now = sum(counts_of(forward(model, batch)[1]).sum(0) for batch in batches)
        following = torch.zeros(EXPERTS)
        for batch in batches:
            loss, probabilities = forward(model, batch)
            own = counts_of(probabilities).sum(0)
            following += own
            counts = dict(zip(KINDS, (torch.zeros(EXPERTS), own, now, before), strict=True))[kind]
            shares = TOP_K * counts / counts.sum().clamp(min=1)
            router_loss = EXPERTS * (shares * probabilities.mean(0).sum(0)).sum()
            ((loss + COEFFICIENT * router_loss) / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = following
    with torch.no_grad():
        loss, probabilities = forward(model, held_out)
    counts = counts_of(probabilities)
    load = (counts.amax(1) / counts.mean(1)).mean()
    return loss.item() / sum(len(row) - 1 for row in held_out), load.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed in range(SEEDS):
        for kind in KINDS:
            loss, load = train(kind, seed, int((sys.argv[1:] or [100])[0]))
            print(f"seed {seed}, {kind}: held-out loss {loss:.4f}, load {load:.2f}", flush=True)
