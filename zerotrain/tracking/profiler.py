"""Profiles of some steps of rank 0 by torch.profiler."""

from torch.profiler import ProfilerActivity, profile

from zerotrain.checkpoint.run_folder import profile_folder
from zerotrain.runtime.errors import describe
from zerotrain.runtime.process_group import Ranks

PROFILED_STEPS = 3
TABLE_ROWS = 40


class StepProfiler:
    """Profiles three steps: from profile.start of the config on, and whenever it is requested.

    Args:
        start: first step to profile, from 1; 0: none.
    """

    def __init__(self, start: int, output_dir: str, ranks: Ranks) -> None:
        self._start, self._output_dir, self._is_first = start, output_dir, ranks.is_first
        self._on_cuda, self._is_requested = ranks.device.type == "cuda", False
        self._first = 0  # of the steps that are being profiled
        self._profile: profile | None = None

    def request(self) -> None:
        """Profile the next steps."""
        self._is_requested = True

    def step_begins(self, step: int) -> None:
        """Called before each step, which is the `step`-th one, from 1."""
        if self._profile is not None or not (self._is_requested or step == self._start):
            return
        self._is_requested = False
        if not self._is_first:
            return
        activities = [ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(ProfilerActivity.CUDA)
        self._first, self._profile = step, profile(activities=activities)
        print(f"profiling steps {step:,} to {step + PROFILED_STEPS - 1:,}", flush=True)
        self._profile.start()

    def step_ended(self, step: int) -> None:
        """Called after each step."""
        if self._profile is not None and step >= self._first + PROFILED_STEPS - 1:
            self.close()

    def close(self) -> None:
        """Write the profile that is being made, if any: the trace, for ui.perfetto.dev, and the
        operations that took most time, as text. A full disk does not end training.
        """
        finished, self._profile = self._profile, None
        if finished is None:
            return
        finished.stop()
        folder = profile_folder(self._output_dir, self._first)
        order = "self_cuda_time_total" if self._on_cuda else "self_cpu_time_total"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(folder / "trace.json.gz"))
            table = finished.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
            (folder / "operations.txt").write_text(table + "\n")
        except (OSError, RuntimeError) as error:
            print(f"WARNING: cannot write the profile to {folder}: {describe(error)}", flush=True)
            return
        print(f"profile: {folder}", flush=True)
