"""The first steps of a run, for tools that only measure or compare them."""


def short_run(steps: int) -> list[str]:
    """Flags of train.py that end a run after some steps, without evaluation, W&B, and checkpoints
    before the last step.
    """
    flags = {
        "train.steps": steps,
        "train.epochs": "null",
        "data.eval_sources": "[]",
        "data.eval_fraction": 0,
        "eval.every_steps": 0,
        "eval.generate": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.every_minutes": 0,
        "checkpoint.resume": "auto",
        "checkpoint.weights_only": "false",
        "tracking.wandb": "disabled",
        "distributed.world_size": "null",
    }
    return [f"--{name}={value}" for name, value in flags.items()]
