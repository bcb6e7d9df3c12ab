"""Write a checkpoint as a Hugging Face folder: safetensors, config, tokenizer and a model card.

    python -m scripts.export CHECKPOINT OUT [--dtype float32] [--verify]
    python -m scripts.export CHECKPOINT OUT --adapter
    hf upload OWNER/NAME OUT --private        # afterwards, to publish it

CHECKPOINT is a folder like runs/demo/checkpoints/step_00000300, or a run folder. From a run folder
the newest complete checkpoint is exported, or with --best its best one.
`AutoModelForCausalLM.from_pretrained(OUT)` loads the result. If the model has vision, its original
class does. The model is held in memory.

If weights were frozen, the base model is loaded from --base or from where the run read it. Adapters
are merged into it. --adapter writes only the adapters, for `peft.PeftModel.from_pretrained`.

--verify also loads the result in another process, with transformers alone. It compares evaluation
loss, prompts and end tokens with the run's. OUT is written only if they agree; otherwise the exit
code is 1.

No code that comes with a model is run, whatever the run folder says.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from zerotrain.runtime.errors import EXIT_FAILURE, UserError, describe, exit_on_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerotrain.checkpoint.state import TrainerState
    from zerotrain.config.schema import Config

MAX_CONFIG_BYTES = 256 * 1024  # enough for thousands of sources, and parsed within seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint or run folder")
    parser.add_argument("out", type=Path, help="new folder for the model")
    parser.add_argument("--best", action="store_true", help="checkpoint with the lowest eval_loss")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="precision (the run's)"
    )
    parser.add_argument("--base", help="folder or hub id of the base model, if it has moved")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--adapter", action="store_true", help="only the adapters of model.lora")
    only.add_argument("--verify", action="store_true", help="compare the result with the run")
    args = parser.parse_args()

    # These imports are slow, so mistakes in the arguments are reported first.
    from zerotrain.checkpoint.state import read_state
    from zerotrain.tools.export import export_checkpoint
    from zerotrain.tools.model_card import model_card
    from zerotrain.tools.saved import choose_checkpoint
    from zerotrain.tools.verify import VerificationFailed
    from zerotrain.tracking.console import quieten_libraries

    quieten_libraries(is_first=True)
    checkpoint = choose_checkpoint(args.checkpoint, args.best)
    config = read_run_config(checkpoint, is_needed=args.verify)
    state = read_state(checkpoint)
    verify = verification(state, config) if args.verify else None

    def finish(draft: Path) -> None:
        if config is not None:
            card = model_card(config, state, args.adapter)
            (draft / "README.md").write_text(card, encoding="utf-8")
        if verify is not None:
            verify(draft)

    try:
        export_checkpoint(checkpoint, args.out, args.dtype, args.base, args.adapter, finish)
    except VerificationFailed as failure:
        print(f"error: {failure}; {args.out} is not written", file=sys.stderr)
        sys.exit(EXIT_FAILURE)
    print(f"{checkpoint} -> {args.out}")


def read_run_config(checkpoint: Path, is_needed: bool) -> "Config | None":
    """Return the config of the run of a checkpoint, from its run folder. If it cannot be read and
    is not needed, print why and return None.
    """
    from zerotrain.checkpoint.manifest import stat_inside
    from zerotrain.checkpoint.run_folder import RESOLVED_CONFIG, RESOLVED_DS_CONFIG
    from zerotrain.config.parse import parse_command_line, read_yaml
    from zerotrain.runtime.files import read_text

    folder = checkpoint.absolute().parent.parent
    try:
        stat_inside(folder, RESOLVED_CONFIG, MAX_CONFIG_BYTES)
        ds_config = str(folder / RESOLVED_DS_CONFIG)  # The config may name the file's old location.
        values, _ = read_yaml(read_text(str(folder / RESOLVED_CONFIG)), RESOLVED_CONFIG)
        if isinstance(values, dict) and "base" in values:
            raise ValueError(f"{RESOLVED_CONFIG} has the key base, which runs do not write")
        argv = ["--config", str(folder / RESOLVED_CONFIG), "--ds_config", ds_config]
        return parse_command_line(argv, prog="export.py").config
    except (OSError, ValueError, UserError) as error:
        if is_needed:
            where = f"{checkpoint}: --verify needs the run folder around it"
            raise UserError(f"{where}: {describe(error)}") from error
        print(f"no model card: {error}")
        return None


def verification(state: "TrainerState", config: "Config") -> "Callable[[Path], None]":
    """Return a function that compares an exported folder with the run, and prints the results.

    Raises:
        UserError: the run's data cannot be read, or have changed.
    """
    from zerotrain.runtime.progress import show_rows
    from zerotrain.tools.open_plans import open_plans
    from zerotrain.tools.verify import verify_export

    cache = Path(config.data.cache_dir)
    try:
        is_own = cache.is_dir() and cache.stat().st_uid == os.getuid()
        with TemporaryDirectory() as other:  # A stranger's config could name any folder.
            data = replace(config.data, cache_dir=str(cache if is_own else other))
            config, tokenizer, plan, eval_plans = open_plans(
                replace(config, data=data), state.run.world_size
            )
    except (UserError, OSError) as error:
        raise UserError(f"--verify: the run's data are needed: {error}") from error
    if not state.run.plan.content.startswith(plan.data.meta.content):
        raise UserError(
            "--verify: the training data, or the options of tokenization, have changed since the "
            "checkpoint; restore them, or export without --verify"
        )
    return lambda draft: show_rows(verify_export(draft, config, tokenizer, state, plan, eval_plans))


if __name__ == "__main__":
    exit_on_error(main)
