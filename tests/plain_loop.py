"""A plain torch loop to hold the trainer against: one process, one row at a time, whole logits.

Shares with the trainer the rows' tokens and which rows a step has, and nothing else.
"""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from zerotrain.config.parse import parse_command_line
from zerotrain.data.epoch_order import EpochOrder
from zerotrain.data.tokenize import open_cache, tokenize_sources


def train_plainly(config_file, tokenizer, prepare=lambda model: model):
    """(losses, gradient norms, learning rates, eval losses before and after, weights).

    `prepare` is called with the model; what it returns is trained.
    """
    torch.set_num_threads(1)  # as the ranks; more wait for each other on a busy machine
    config = parse_command_line(["--config", str(config_file)]).config
    train, data = config.train, config.data
    rows = read_rows("train_sources", tokenizer, data)
    held_out = read_rows("eval_sources", tokenizer, data)
    model = prepare(AutoModelForCausalLM.from_pretrained(config.model.name_or_path))
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    others = [p for p in trained if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": train.weight_decay},
         {"params": others, "weight_decay": 0.0}],
        betas=train.adam_betas, eps=1e-8,
    )  # fmt: skip
    lengths = np.array([ids.shape[1] for ids, _ in rows])
    order = EpochOrder(lengths, train.seed, train.global_batch_size)
    per_epoch = order.steps_per_epoch
    steps = train.epochs * per_epoch
    warmup = -(-train.warmup_examples // train.global_batch_size)
    losses, norms, rates = [], [], []
    before = mean_loss(model, held_out).item()
    for k in range(steps):
        epoch, step = divmod(k, per_epoch)
        chosen = order.examples(epoch, step)
        optimizer.zero_grad()
        loss = mean_loss(model, [rows[i] for i in chosen])
        loss.backward()
        # in fp64: torch's own fp32 norm is off by 1e-3 on CPU for some million elements
        norm = torch.stack([p.grad.double().norm() for p in trained]).norm()
        for p in trained:
            p.grad *= min(1.0, train.gradient_clipping / (norm.item() + 1e-6))
        # linear: up from 1/warmup to 1, then down to 1/(steps + 1 - warmup) at the last step
        factor = min((k + 1) / warmup, (steps - k) / (steps + 1 - warmup))
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate * factor
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
        rates.append(train.learning_rate * factor)
    after = mean_loss(model, held_out).item()
    return losses, norms, rates, (before, after), dict(model.named_parameters())


def read_rows(key, tokenizer, data):
    cache = open_cache(tokenize_sources(data.sources(key), tokenizer, data))
    return [
        (torch.tensor(row["input_ids"])[None], torch.tensor(row["loss_mask"])[None])
        for row in cache.rows
    ]


def mean_loss(model, rows):
    """Cross entropy per supervised token over all rows, in float64 sums."""
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for ids, mask in rows:
        logits = model(input_ids=ids).logits[0, :-1]
        targets, wanted = ids[0, 1:], mask[0, 1:]
        total = total + F.cross_entropy(logits[wanted], targets[wanted], reduction="sum")
        count += int(wanted.sum())
    return total / count
