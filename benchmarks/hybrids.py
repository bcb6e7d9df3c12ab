"""Measure packed beside bucketed micro-batches of a hybrid model, on one CPU core without kernels.

    python -m benchmarks.hybrids [LENGTHS.npy] [--examples 40] [--tries 3]

A small Qwen3.5 with random weights, three of four layers linear attention, computes the losses and
gradients of one step of examples, as train.py plans it. Both kinds take turns. Seconds are of the
CPU, so other programs on the machine hardly change them; the median of all tries counts.
"""

import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, logging

from zerotrain.data.loader import MicroBatch
from zerotrain.data.plan import Budget, plan_step
from zerotrain.launch.hostfile import between
from zerotrain.model.mixers import keep_apart
from zerotrain.model.packing import PACKED_EXAMPLES
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
    seconds: dict[str, list[float]] = {"bucketed": [], "packed": []}
    print("batching  CPU seconds   tokens with padding  loss")
    for _ in range(args.tries):
        for kind, found in seconds.items():
            batches = micro_batches(lengths, kind == "packed", args.micro_batch_tokens)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            if kind == "packed":
                model.set_attn_implementation(PACKED_EXAMPLES)
                keep_apart(model)
            step_losses(model, batches[-1:])  # The first pass allocates memory.
            start = time.process_time()
            total = step_losses(model, batches)
            found.append(time.process_time() - start)
            tokens = sum(batch.input_ids.numel() for batch in batches)
            print(f"{kind:8}  {found[-1]:11.2f}  {tokens:20,}  {total:.3f}", flush=True)
    bucketed, packed = map(median, seconds.values())
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


def step_losses(model: torch.nn.Module, batches: list[MicroBatch]) -> float:
    """Compute the losses and gradients of micro-batches, and return the sum of the losses."""
    compute, total = SupervisedLoss(model), 0.0
    for batch in batches:
        loss = compute(model, batch).cross_entropy
        loss.backward()
        total += loss.item()
    return total


if __name__ == "__main__":
    main()
