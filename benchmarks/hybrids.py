"""Measure packed beside bucketed micro-batches of a hybrid model, on one CPU core without kernels.

    python -m benchmarks.hybrids [LENGTHS.npy] [--examples 40] [--tries 3]

A small Qwen3.5 with random weights, three of four layers linear attention, computes the losses and
gradients of one step of examples, as train.py plans it. Seconds are of the CPU. A busy machine adds
to them, too, since programs share caches. So the two kinds take turns after each micro-batch, and
the median of all tries counts.
"""

import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, logging

from zerotrain.data.loader import MicroBatch
from zerotrain.data.plan import Budget, plan_step
from zerotrain.launch.hostfile import between
from zerotrain.model.mixers import keep_apart, make_layout
from zerotrain.model.packing import PACKED_EXAMPLES, Examples
from zerotrain.training.loss import SupervisedLoss

OPTIONS = {
    "examples": (40, "examples of the step (40)"),
    "micro_batch_tokens": (8192, "tokens of a micro-batch; longer examples are cut (8192)"),
    "hidden": (256, "hidden size (256)"),
    "tries": (3, "steps of each kind (3)"),
}
MODEL = {
    "vocab_size": 1000, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "layer_types": None,
}  # fmt: skip


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="?", type=Path, help="integer .npy file (log-normal)")
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=between(1, 1 << 20), default=default, help=text)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # It warns that there are no kernels.
    rng = np.random.default_rng(0)
    try:
        lengths = np.load(args.lengths) if args.lengths else rng.lognormal(4.97, 1.12, 50_000)
        lengths = rng.permutation(lengths)[: args.examples]
        lengths = np.clip(lengths, 2, args.micro_batch_tokens).astype(np.int64)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    size = args.hidden
    config = Qwen3_5TextConfig(
        **MODEL, hidden_size=size, intermediate_size=3 * size, head_dim=size // 4,
        linear_key_head_dim=size // 4, linear_value_head_dim=size // 4,
    )  # fmt: skip
    kinds = ("bucketed", "packed")
    models, batches = [], []
    for kind in kinds:
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(config))
        batches.append(micro_batches(lengths, kind == "packed", args.micro_batch_tokens))
    models[1].set_attn_implementation(PACKED_EXAMPLES)
    keep_apart(models[1])
    print("batching  tokens with padding  in mixers")
    for kind, own in zip(kinds, batches, strict=True):
        tokens = sum(batch.input_ids.numel() for batch in own)
        print(f"{kind:8}  {tokens:19,}  {sum(map(tokens_in_mixers, own)):9,}")
    print("batching  CPU seconds  loss", flush=True)
    for model, own in zip(models, batches, strict=True):
        compute_loss(model, own[-1])  # The first pass allocates memory.
    tries = np.zeros((args.tries, 2))
    for seconds in tries:
        losses = np.zeros(2)
        for turn in zip_longest(*batches):
            for i, batch in enumerate(turn):
                if batch is not None:
                    start = time.process_time()
                    losses[i] += compute_loss(models[i], batch)
                    seconds[i] += time.process_time() - start
        for kind, spent, loss in zip(kinds, seconds, losses, strict=True):
            print(f"{kind:8}  {spent:11.2f}  {loss:.3f}", flush=True)
    bucketed, packed = np.median(tries, axis=0)
    print(f"packed is {bucketed / packed:.2f} times as fast")


def micro_batches(lengths: np.ndarray, packed: bool, tokens: int) -> list[MicroBatch]:
    """Return the micro-batches of a step on one rank, with random tokens."""
    plan = plan_step(np.arange(len(lengths)), lengths, lengths, Budget(1, tokens, packed=packed))
    batches = []
    for [chosen] in plan.micro_batches:
        rows = [np.random.default_rng(i).integers(1000, size=lengths[i]) for i in chosen]
        if packed:
            ids = np.concatenate(rows)[None]
            positions = np.concatenate([np.arange(len(row)) for row in rows])[None]
            batches.append(MicroBatch.of(ids, positions > 0, position_ids=positions))
        else:
            real = np.arange(lengths[chosen].max()) < lengths[chosen, None]
            ids = np.zeros(real.shape, np.int64)
            ids[real] = np.concatenate(rows)
            is_target = real & (np.arange(real.shape[1]) > 0)
            batches.append(MicroBatch.of(ids, is_target, real.astype(np.int64)))
    return batches


def tokens_in_mixers(batch: MicroBatch) -> int:
    """Return the tokens that a mixer computes for a micro-batch, including padding."""
    if batch.ends is None:
        return batch.input_ids.numel()
    layout = make_layout(Examples(batch.lengths, batch.ends, None), ())
    return sum(call.numel() for call in layout.calls)


def compute_loss(model: torch.nn.Module, batch: MicroBatch) -> float:
    """Compute the loss and gradients of a micro-batch, and return the loss."""
    loss = SupervisedLoss(model)(model, batch).cross_entropy
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main()
