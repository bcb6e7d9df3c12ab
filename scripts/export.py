"""Write a checkpoint as a Hugging Face folder: safetensors, config and tokenizer.

    python scripts/export.py CHECKPOINT OUT [--dtype float32] [--max_shard_size 5GB]
    python scripts/export.py CHECKPOINT OUT --adapter

CHECKPOINT is a folder like runs/demo/checkpoints/step_00000300, or a run folder, whose newest
complete checkpoint is taken. `AutoModelForCausalLM.from_pretrained(OUT)` loads the result. Weights
are held in memory one file at a time, so smaller files need less memory. If weights were frozen,
the base model is loaded too, where the run read it from or from --base, and adapters are merged
into it; --adapter writes them alone, for `peft.PeftModel.from_pretrained`.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import UserError, exit_on_error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max_shard_size", default="5GB", help="of a weight file: 5GB, 500MB")
    parser.add_argument("--base", help="the base model's folder, if it has moved")
    parser.add_argument("--adapter", action="store_true", help="only the adapters of model.lora")
    args = parser.parse_args()
    if not args.checkpoint.is_dir():
        raise UserError(f"no such folder: {args.checkpoint}")

    from checkpoint.export import export_adapter, export_checkpoint
    from checkpoint.find import find_checkpoint
    from checkpoint.run_folder import checkpoints_folder
    from config.schema import CheckpointConfig
    from tracking.console import quieten_libraries

    quieten_libraries(is_first=True)

    checkpoint = args.checkpoint
    if checkpoints_folder(checkpoint).is_dir():
        newest, skipped = find_checkpoint(CheckpointConfig(), checkpoints_folder(checkpoint))
        print("".join(f"{line}\n" for line in skipped), end="")
        if newest is None:
            raise UserError(f"{checkpoint} has no checkpoints yet")
        checkpoint = newest
    if args.adapter:
        export_adapter(checkpoint, args.out, args.dtype)
    else:
        export_checkpoint(checkpoint, args.out, args.dtype, args.max_shard_size, args.base)
    print(f"{checkpoint} -> {args.out}")


if __name__ == "__main__":
    exit_on_error(main)
