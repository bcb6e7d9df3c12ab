"""Profiles of some steps by torch.profiler, and what held a GPU's memory when it ran out."""

import torch
from torch.profiler import ProfilerActivity, profile

from checkpoint.run_folder import profile_folder
from config.schema import ProfileConfig
from runtime.errors import describe

TABLE_ROWS = 40
HISTORY_STEPS = 3  # in which the origin of every allocation is recorded, and memory mostly runs out
HISTORY_ENTRIES = 100_000


class StepProfiler:
    """Profiles the steps that config.profile names, and others on request, on some ranks."""

    def __init__(self, config: ProfileConfig, output_dir: str, rank: int, on_cuda: bool) -> None:
        self._config, self._output_dir, self._rank = config, output_dir, rank
        self._on_cuda, self._is_requested = on_cuda, False
        self._first, self._last = 0, -1  # the steps of the profile that is being made
        self._profile: profile | None = None
        self._history_steps = 0
        if on_cuda:
            torch.cuda.memory._record_memory_history(
                context="all", stacks="python", max_entries=HISTORY_ENTRIES
            )
            self._history_steps = HISTORY_STEPS

    def request(self) -> None:
        """Profile the next steps."""
        self._is_requested = True

    def step_begins(self, step: int) -> None:
        """Called before each step, which is the `step`-th one, from 1."""
        if step <= self._last or not (self._is_requested or step == self._config.start):
            return
        self._is_requested = False
        self._first, self._last = step, step + self._config.steps - 1
        if self._rank in self._config.ranks:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._on_cuda else []
            self._profile = profile(activities=activities)
            self._profile.start()

    def step_ended(self, step: int) -> str | None:
        """Called after each step, by all ranks.

        Returns:
            Where the profile is that ended with this step, in one line; None if none did.
        """
        if self._history_steps:
            self._history_steps -= 1
            if not self._history_steps:
                torch.cuda.memory._record_memory_history(enabled=None)
        if step != self._last:
            return None
        self.close()
        ranks = ", ".join(map(str, self._config.ranks))
        where = profile_folder(self._output_dir, self._first)
        return f"profile of steps {self._first} to {step} of rank {ranks}: {where}"

    def close(self) -> None:
        """Write the profile that is being made, if any: the trace, for ui.perfetto.dev, and the
        operations that took most time, as text. A disk without room does not end training.
        """
        made, self._profile = self._profile, None
        if made is None:
            return
        made.stop()
        folder = profile_folder(self._output_dir, self._first)
        order = "self_cuda_time_total" if self._on_cuda else "self_cpu_time_total"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made.export_chrome_trace(str(folder / f"rank_{self._rank}.json.gz"))
            table = made.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
            (folder / f"rank_{self._rank}.txt").write_text(table + "\n")
        except (OSError, RuntimeError) as error:
            print(f"WARNING: cannot write the profile to {folder}: {describe(error)}", flush=True)

    def ran_out_of_memory(self) -> None:
        """Write what holds this GPU's memory, for pytorch.org/memory_viz, and a summary."""
        if not self._on_cuda:
            return
        folder = profile_folder(self._output_dir, None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(folder / f"rank_{self._rank}.pickle"))
            summary = torch.cuda.memory_summary()
            (folder / f"rank_{self._rank}.txt").write_text(summary + "\n")
        except (OSError, RuntimeError) as error:
            print(f"WARNING: cannot write to {folder}: {describe(error)}", flush=True)
            return
        print(f"rank {self._rank} is out of memory: what held it is in {folder}", flush=True)
