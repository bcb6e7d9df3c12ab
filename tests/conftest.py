"""Shared by the tests: small models, rows, and functions that start real training processes."""

import dataclasses
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parent.parent
SAMPLE = REPO / "data" / "sample"
sys.path.insert(0, str(REPO))
pytest.register_assert_rewrite("namespaces")
os.environ["STARTED_BY"] = str(os.getpid())
gc.disable()  # during collection, whose imports stay; collecting garbage took 4 of its 15 s


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


MAKE_HOSTS = {
    "test_launch",
    "test_node_local",
    "test_orchestrators",
    "test_preflight",
    "test_scaling",
    "test_slurm",
}
"""Tests that create hosts never run two at a time: network namespaces and daemons have global
names."""


LONGEST_FIRST = (
    "test_readme",
    *sorted(MAKE_HOSTS),
    "test_training",
    "test_commands",
    "test_preemption",
    "test_checkpoints",
    "test_benchmarks",
    "test_recipes",
    "test_lora",
    "test_export",
    "test_copier",
    "test_verify",
    "test_fuzz",
)


def pytest_collection_modifyitems(items):
    """Mark tests that use forked ranks as launch tests; the others say so themselves.

    The files that take longest come first, so that no worker is left with one at the end.
    """
    rank = {stem: i for i, stem in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    for item in items:
        if "forks" in item.fixturenames:
            item.add_marker("launch")
        if vars(item.module).keys() & {"namespaces", "slurm_cluster", "Cluster"}:
            assert item.path.stem in MAKE_HOSTS, f"{item.path.name} creates hosts: see MAKE_HOSTS"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a worker whole files, for their fixtures, and one worker all files that create hosts.

    The marker xdist_group would do, but pytest-xdist 3.8 does not see it under pytest 9.2.
    """
    from xdist.scheduler import LoadFileScheduling

    class HostsOnOneWorker(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "hosts" if Path(file).stem in MAKE_HOSTS else file

    return HostsOnOneWorker(config, log)


@dataclasses.dataclass
class Finished:
    """The exit code and the output of a process that has ended."""

    code: int
    output: str

    @property
    def errors(self) -> list[str]:
        """The one-line messages about user mistakes."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


# COLUMNS and LINES are exported by readline, and what draws on a terminal prefers them to its size
UNWANTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COLUMNS", "LINES")


def repository_files() -> list[str]:
    """The repository's files, including those not committed yet; in a checkout without git, those
    that are not made by commands.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    )
    names = listed.stdout.splitlines()
    if listed.returncode != 0:
        made = {".venv", "runs", "wandb", "__pycache__", ".cache", ".pytest_cache", ".ruff_cache"}
        files = [path.relative_to(REPO) for path in REPO.rglob("*")]
        names = [str(f) for f in files if not made & set(f.parts) and "egg-info" not in str(f)]
    return [n for n in names if (REPO / n).is_file() or (REPO / n).is_symlink()]


def copy_repository(folder: Path) -> None:
    """Copy the repository's files into a folder."""
    for name in repository_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, folder / name, follow_symlinks=False)


def environment() -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if k not in UNWANTED}
    return {
        **keep,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # packages may be on it too, on a machine without a network
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
    }


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def launch_command(script_and_args, ranks, launcher="deepspeed"):
    """Command line that runs a script on `ranks` processes, or with plain python on one."""
    bin_folder = Path(sys.executable).parent
    args = [str(a) for a in script_and_args]
    if launcher == "deepspeed":
        return [str(bin_folder / "deepspeed"), "--num_gpus", str(ranks),
                "--master_port", free_port(), *args]  # fmt: skip
    if launcher == "torchrun":
        return [str(bin_folder / "torchrun"), "--nproc_per_node", str(ranks),
                "--master_port", free_port(), *args]  # fmt: skip
    return [sys.executable, *args]


def run(command, timeout=500, cwd=REPO) -> Finished:
    """Run a command to its end; at the time-out it is killed with everything it has started."""
    process = subprocess.Popen(
        [str(c) for c in command], cwd=cwd, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {timeout} s: {command}\n{output[-4000:]}")
    return Finished(process.returncode, output)


def start(
    config_file, *flags, ranks, launcher="deepspeed", stdout=subprocess.DEVNULL, **variables
) -> subprocess.Popen:
    """Start train.py with a launcher in a new session, and leave it running."""
    command = launch_command(["train.py", "--config", config_file, *flags], ranks, launcher)
    return subprocess.Popen(
        command, cwd=REPO, env={**environment(), **variables}, stdout=stdout,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


class Forked:
    """The ranks of one run, started by the fork server."""

    def __init__(self, server, log: Path, pids: list[int]) -> None:
        self.server, self.log, self.pids = server, log, pids

    def wait(self) -> Finished:
        """The first non-zero exit code in rank order, and the output of all ranks."""
        codes = self.server.ask({"wait": self.pids})["codes"]
        code = next((code for code in codes if code), 0)
        return Finished(code, self.log.read_text())

    def until(self, happened, seconds=500) -> None:
        """Poll `happened()` every 2 ms."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)


class ForkServer:
    """Runs train.py on forked ranks; see fork_server.py."""

    def __init__(self, folder: Path, repo: Path = REPO) -> None:
        self.folder, self.runs = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, str(repo / "tests" / "harness" / "fork_server.py")], cwd=repo,
            env={**environment(), "PYTHONPATH": str(repo)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(200)

    def ask(self, request: dict) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self, config, *flags, ranks=1, module="train", disks=None, at=None, log=None, **variables
    ) -> Forked:
        """`disks`: folder -> number of ranks; each folder is a node's own disk, mounted at `at`.
        `log`: a terminal's name, instead of a file.
        """
        nodes = {}
        if disks:
            ranks, nodes["disks"] = sum(disks.values()), {str(k): n for k, n in disks.items()}
            nodes["at"] = str(at)
        return self._start(module, ["--config", config, *flags], ranks, log, variables, **nodes)

    def script(self, path, *args, **variables) -> Finished:
        """Run a script like `python PATH ARGS`, but with its imports already done."""
        return self._start(path, args, 1, None, variables).wait()

    def _start(self, module, argv, ranks, log, variables, **nodes) -> Forked:
        self.runs += 1
        log = Path(log) if log else self.folder / f"log_{self.runs}"
        request = {
            "argv": list(map(str, argv)), "ranks": ranks, "log": str(log), "port": free_port(),
            "environment": variables, "module": str(module), **nodes,
        }  # fmt: skip
        log.touch()
        return Forked(self, log, self.ask(request)["pids"])

    def train(self, config, *flags, ranks=1, **options) -> Finished:
        return self.start(config, *flags, ranks=ranks, **options).wait()


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


@pytest.fixture
def left_running(forks):
    """A function that returns the processes that the test has started and that are still running.
    They are identified by their initial environment, whatever their name and parent are now.
    """

    def started() -> set[psutil.Process]:
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("STARTED_BY") == os.environ["STARTED_BY"]:
                    found.add(process)
        return found

    def running() -> list[str]:
        found = []
        for process in started() - before:
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
        return found

    before = started()  # includes the fork server
    yield running
    for process in started() - before:  # of a test that has failed
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until(happened, process, seconds=500):
    """Poll `happened()` while `process` runs."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, f"ended early, with code {process.returncode}"
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.01)


def read_metrics(run_folder, kind="train"):
    from zerotrain.tracking import metrics

    return metrics.read_metrics(run_folder, kind)


def logged(run_folder, kind="train"):
    """read_metrics of a run that may not have begun to write."""
    return read_metrics(run_folder, kind) if (Path(run_folder) / "metrics.jsonl").exists() else []


def determined(run_folder):
    """Of each step the metrics that a resumed and an uninterrupted run must share bit for bit."""
    names = ("step", "epoch", "loss", "lr", "grad_norm", "tokens", "micro_steps")
    return [{name: step[name] for name in names} for step in read_metrics(run_folder)]


def stop_after_one_step(run_folder):
    run_folder.mkdir()
    (run_folder / "stop").touch()


def assert_same(run_folder, plain):
    """Each step's loss and gradient norm, and the evaluations, are those of a plain loop."""
    import numpy as np

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
    """Those of an exported model are those of a plain loop, by the distance of each tensor."""
    from safetensors.torch import load_file

    exported = load_file(folder / "model.safetensors")
    assert set(exported) == set(plain.weights)
    for name, weight in plain.weights.items():
        distance = (exported[name] - weight.detach()).norm() / weight.detach().norm()
        assert distance < 1e-5, f"{name}: {distance:.1e}"


def is_saving(checkpoints, since):
    """Whether there is a draft newer than `since`; one of an earlier run may still exist."""
    with suppress(FileNotFoundError):
        return any(draft.stat().st_ctime > since for draft in checkpoints.glob("step_*.tmp"))


def strategy(tmp_path, name, **optimizer) -> Path:
    """A copy of a file in ds_configs/ with torch's AdamW, which needs no compiler."""
    ds_config = json.loads((REPO / "ds_configs" / f"{name}.json").read_text())
    ds_config["optimizer"]["params"] |= {"torch_adam": True, **optimizer}
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(ds_config))
    return file


def write_rows(path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def sample_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SAMPLE / "model")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, sample_tokenizer) -> Path:
    """A folder with a tokenizer and a 2-layer Llama: weights, tied embeddings, no dropout."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_model"), sample_tokenizer, dropout=0.0)


@pytest.fixture(scope="session")
def tiny_model_with_dropout(tmp_path_factory, sample_tokenizer) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("dropout"), sample_tokenizer, dropout=0.2)


def save_tiny_llama(
    folder, tokenizer, dropout, intermediate_size=64, layers=2, vocabulary=320, hidden_size=32
) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden_size, num_hidden_layers=layers,
        intermediate_size=intermediate_size, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True, attention_dropout=dropout, initializer_range=0.1,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def copy_with_code(model, folder, ran) -> Path:
    """A copy of a model whose config.json names code of its own, which creates the file `ran`."""
    shutil.copytree(model, folder)
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: ...\n")
    architecture = json.loads((folder / "config.json").read_text())
    architecture |= {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(architecture))
    return folder


@pytest.fixture(scope="session")
def chat_rows() -> list[dict]:
    """70 rows of the sample data: prompts masked, 30 to 220 tokens each."""
    lines = (SAMPLE / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:4000:57]][:70]


def write_tiny_config(tmp_path, chat_rows, model, name="config.yaml", **changes) -> Path:
    """A run config for the tiny model; `a__b=value` sets the key a.b, None removes it."""
    import yaml

    config = {
        "output_dir": str(tmp_path / "run"),
        "ds_config": "ds_configs/zero2.json",
        "model": {"name_or_path": str(model)},
        "data": {
            "train_sources": [str(write_rows(tmp_path / "train.jsonl", chat_rows))],
            "eval_sources": [str(write_rows(tmp_path / "eval.jsonl", chat_rows[:9]))],
            "max_length": 256,
            "micro_batch_tokens": 1024,
            "cache_dir": str(tmp_path / "cache"),
        },
        "train": {
            "global_batch_size": 12,
            "epochs": 2,
            "learning_rate": 3e-3,
            "lr_schedule": "linear",
            "warmup_examples": 24,
            "weight_decay": 0.1,
            "gradient_clipping": 0.5,
            "seed": 7,
        },
        "tracking": {"wandb": "disabled"},
    }
    for dotted, value in changes.items():
        *parents, leaf = dotted.split("__")
        block = config
        for parent in parents:
            block = block.setdefault(parent, {})
        if value is None:
            block.pop(leaf, None)
        else:
            block[leaf] = value
    path = tmp_path / name
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def plainly(config_file, tokenizer, *prepare):
    """train_plainly of a config file, on one thread like the ranks; more wait for each other."""
    import torch

    from zerotrain.config.parse import parse_command_line
    from zerotrain.tools.plain_loop import train_plainly

    torch.set_num_threads(1)
    config = parse_command_line(["--config", str(config_file)]).config
    return train_plainly(config, tokenizer, *prepare)


@pytest.fixture
def tiny_config(tmp_path, tiny_model, chat_rows):
    """write_tiny_config for this test."""

    def write(name="config.yaml", model=tiny_model, **changes) -> Path:
        return write_tiny_config(tmp_path, chat_rows, model, name, **changes)

    return write
