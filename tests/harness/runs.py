"""The files that a run writes, and the plain loop that it must equal."""

from contextlib import suppress
from pathlib import Path

import numpy as np
from harness.inputs import read_config

from zerotrain.checkpoint.run_folder import list_complete
from zerotrain.tools.records import read_metrics


def logged(run_folder, kind="train"):
    """The records of a run, none if it has not begun to write."""
    return read_metrics(run_folder, kind) if (Path(run_folder) / "metrics.jsonl").exists() else []


def curve(run_folder, *more):
    """The results of each step. Other layouts may differ by rounding."""
    names = ("step", "loss", "grad_norm", "lr", *more)
    return [[step[name] for name in names] for step in read_metrics(run_folder)]


def determined(run_folder):
    """The metrics of each step that a resumed run must have bit for bit."""
    return curve(run_folder, "epoch", "tokens", "micro_steps")


def assert_each_step_once(run_folder):
    steps = [step["step"] for step in read_metrics(run_folder)]
    assert steps == list(range(1, len(steps) + 1))


def is_saving(checkpoints, since):
    """Whether a save has begun after `since`. Drafts of earlier runs may still exist."""
    with suppress(FileNotFoundError):
        return any(draft.stat().st_ctime > since for draft in checkpoints.glob(".step_*.tmp"))


def checkpoints(run_folder):
    """The complete checkpoints of a run, the oldest first."""
    return list_complete(run_folder / "checkpoints")


def dropout_seeds(checkpoint):
    """The seed of each rank's random numbers, in rank order."""
    import torch

    generator, seeds = torch.Generator(), []
    for shard in sorted((checkpoint / "shards").iterdir()):
        generator.set_state(torch.load(shard, weights_only=True)["rng"]["torch"])
        seeds.append(generator.initial_seed())
    return seeds


def export(run_folder, out):
    """Export the run's last checkpoint, and return the folder."""
    from zerotrain.tools.export import export_checkpoint

    export_checkpoint(checkpoints(run_folder)[-1], out)
    return out


def stop_after_one_step(run_folder):
    run_folder.mkdir()
    (run_folder / "stop").touch()


def plainly(config_file, tokenizer, *prepare):
    """Train a config in the plain loop, on one thread: more would wait for each other."""
    import torch

    from zerotrain.tools.plain_loop import train_plainly

    torch.set_num_threads(1)
    return train_plainly(read_config(config_file), tokenizer, *prepare)


def assert_same(run_folder, plain):
    """Losses, gradient norms and evaluations must agree with a plain loop within 1e-5."""
    steps = read_metrics(run_folder)
    assert [step["step"] for step in steps] == list(range(1, len(plain.losses) + 1))
    evals = [evaluation["eval_loss"] for evaluation in read_metrics(run_folder, "eval")]
    for found, expected in (
        ([step["loss"] for step in steps], plain.losses),
        ([step["grad_norm"] for step in steps], plain.grad_norms),
        (evals, plain.eval_losses[-len(evals) :]),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def assert_same_weights(folder, plain):
    """Each tensor of an exported model must agree with a plain loop, by its norm within 1e-5."""
    from safetensors.torch import load_file

    exported = load_file(folder / "model.safetensors")
    assert set(exported) == set(plain.weights)
    for name, weight in plain.weights.items():
        distance = (exported[name] - weight.detach()).norm() / weight.detach().norm()
        assert distance < 1e-5, f"{name}: {distance:.1e}"
