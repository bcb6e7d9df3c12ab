"""Write a checkpoint as a Hugging Face folder: safetensors, config, tokenizer and a model card.

    python scripts/export.py CHECKPOINT OUT [--dtype float32] [--max_shard_size 5GB] [--verify]
    python scripts/export.py CHECKPOINT OUT --adapter
    python scripts/export.py CHECKPOINT OUT --verify --push OWNER/NAME [--public] [--license ID]

CHECKPOINT is a folder like runs/demo/checkpoints/step_00000300, or a run folder, whose newest
complete checkpoint is taken, or with --best that of the best evaluation.
`AutoModelForCausalLM.from_pretrained(OUT)` loads the result. Weights are held in memory one file at
a time, so smaller files need less memory. If weights were frozen, the base model is loaded too,
where the run read it from or from --base, and adapters are merged into it; --adapter writes them
alone, for `peft.PeftModel.from_pretrained`.

--verify also loads the result as a stranger would, with transformers alone in another process, and
compares evaluation loss, prompts and end tokens with the run's: OUT is written only if they agree.
It holds the whole model in memory, on the GPUs if there are any. Exit code: 1 if they differ.

--push uploads OUT, once it is complete, to a repository on the hub, private unless --public is set,
in one commit that replaces the weights there. Log in with `hf auth login`, or set HF_TOKEN.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import EXIT_FAILURE, UserError, exit_on_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from checkpoint.verify import Finding
    from config.schema import Config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--best", action="store_true", help="of a run: the best by eval.metric")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max_shard_size", default="5GB", help="of a weight file: 5GB, 500MB")
    parser.add_argument("--base", help="the base model's folder, if it has moved")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--adapter", action="store_true", help="only the adapters of model.lora")
    only.add_argument("--verify", action="store_true", help="compare the result with the run")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the result to the hub")
    parser.add_argument("--public", action="store_true", help="may be, or become, public there")
    parser.add_argument("--license", help="for the model card: the hub's id, such as apache-2.0")
    args = parser.parse_args()
    if not args.checkpoint.is_dir():
        raise UserError(f"no such folder: {args.checkpoint}")
    if args.public and not args.push:
        raise UserError("--public: add --push OWNER/NAME")

    from checkpoint.export import export_adapter, export_checkpoint
    from checkpoint.find import best_checkpoint, find_checkpoint
    from checkpoint.push import check_push, push
    from checkpoint.run_folder import checkpoints_folder
    from checkpoint.verify import VerificationFailed
    from config.schema import CheckpointConfig
    from tracking.console import quieten_libraries

    quieten_libraries(is_first=True)

    checkpoint = args.checkpoint
    if checkpoints_folder(checkpoint).is_dir():
        newest, skipped = find_checkpoint(CheckpointConfig(), checkpoints_folder(checkpoint))
        print("".join(f"{line}\n" for line in skipped), end="")
        if newest is None:
            raise UserError(f"{checkpoint} has no checkpoints yet")
        checkpoint = best_checkpoint(newest) if args.best else newest
    elif args.best:
        raise UserError(f"--best: {checkpoint} is not the folder of a run with checkpoints")
    needed_by = "--push" if args.push else "--verify" if args.verify else None
    config = read_run_config(checkpoint, needed_by)
    if args.push:
        check_push(args.push, args.public)
    verify = verification(checkpoint, config) if args.verify else None

    def finish(draft: Path) -> None:
        if config is not None:
            write_card(draft, checkpoint, config, args.license, args.adapter)
        if verify is not None:
            report(verify(draft))

    size = args.max_shard_size
    try:
        if args.adapter:
            export_adapter(checkpoint, args.out, args.dtype, finish)
        else:
            export_checkpoint(checkpoint, args.out, args.dtype, size, args.base, finish)
    except VerificationFailed as failure:
        print(f"error: {failure}; {args.out} is not written", file=sys.stderr)
        sys.exit(EXIT_FAILURE)
    announce(checkpoint, args.out, config)
    if args.push:
        run = checkpoint.absolute().parent.parent.name
        print(push(args.out, args.push, args.public, f"{checkpoint.name} of {run}"))


def announce(checkpoint: Path, out: Path, config: "Config | None") -> None:
    """Say what was written, in W&B too if the run does so."""
    print(f"{checkpoint} -> {out}")
    tracking = config and config.tracking
    if not tracking or tracking.wandb == "disabled" or not tracking.wandb_artifacts:
        return
    from checkpoint.state import read_state
    from tracking.wandb import log_model

    folder = checkpoint.absolute().parent.parent
    log_model(config, folder, out, read_state(checkpoint).progress)


def read_run_config(checkpoint: Path, needed_by: str | None) -> "Config | None":
    """The config of the run that a checkpoint belongs to, from its run folder; if it cannot be read
    and no flag needs it, None, with a line that says so.

    Raises:
        UserError: it is needed and cannot be read.
    """
    from checkpoint.run_folder import RESOLVED_CONFIG
    from config.parse import parse_command_line

    file = checkpoint.absolute().parent.parent / RESOLVED_CONFIG
    try:
        if not file.is_file():
            raise UserError(f"the checkpoint's run has no {file}")
        return parse_command_line(["--config", str(file)], prog="export.py", validate=False).config
    except UserError as error:
        if needed_by:
            raise UserError(f"{needed_by}: {error}") from error
        print(f"no model card: {error}")
        return None


def write_card(
    folder: Path, checkpoint: Path, config: "Config", license: str | None, is_adapter: bool
) -> None:
    """Write the model card into an exported folder, and the picture in it."""
    from checkpoint.manifest import read_manifest
    from checkpoint.model_card import About, model_card, read_evaluations
    from checkpoint.shards import Shards
    from checkpoint.state import read_state
    from tracking.curve import draw_curve

    state, manifest = read_state(checkpoint), read_manifest(checkpoint)
    run_folder = checkpoint.absolute().parent.parent
    evaluations = read_evaluations(run_folder, state.progress.step)
    about = About(
        evaluations=evaluations,
        optimizer=Shards(checkpoint).layout(0)["optimizer"],
        curve=draw_curve(run_folder, state.progress.step, evaluations, folder),
        license=license,
        is_adapter=is_adapter,
    )
    text = model_card(config, state, manifest, about)
    (folder / "README.md").write_text(text, encoding="utf-8")


def verification(checkpoint: Path, config: "Config") -> "Callable[[Path], list[Finding]]":
    """A function that compares an exported folder with the run.

    Raises:
        UserError: the checkpoint or the run's data cannot be read, or the data have changed.
    """
    from checkpoint.find import checkpoint_problem
    from checkpoint.state import read_state
    from checkpoint.verify import check_same_data, verify_export
    from tracking.startup import open_plans

    if problem := checkpoint_problem(checkpoint):
        raise UserError(f"{checkpoint} is not a usable checkpoint: {problem}")
    state = read_state(checkpoint)
    try:
        config, tokenizer, plan, eval_plans = open_plans(config, state.run.world_size)
    except UserError as error:
        raise UserError(f"--verify: the run's data are needed: {error}") from error
    check_same_data(state, plan)
    return lambda folder: verify_export(folder, config, tokenizer, state, plan, eval_plans)


def report(findings: "list[Finding]") -> None:
    """Print what was checked.

    Raises:
        VerificationFailed: something differs.
    """
    from checkpoint.verify import VerificationFailed
    from runtime.table import show_rows

    show_rows({f.name: ("DIFFERS: " if f.differs else "") + f.text for f in findings})
    for finding in findings:
        if finding.differs:
            raise VerificationFailed(f"{finding.name}: {finding.text}")


if __name__ == "__main__":
    exit_on_error(main)
