"""A trace of some steps, for https://ui.perfetto.dev, whenever a user asks for one."""

from torch.profiler import profile, schedule, tensorboard_trace_handler

from zerotrain.checkpoint.run_folder import PROFILE_NOW, take_request

STEPS = 3


class Profiler:
    """Traces three steps of this rank into OUTPUT_DIR/profile, once OUTPUT_DIR/profile_now is
    touched. The step before them is torch's warm-up.
    """

    def __init__(self, output_dir: str) -> None:
        self._output_dir = output_dir
        self._running: profile | None = None

    def step(self) -> None:
        """Called after each step."""
        if self._running is not None:
            self._running.step()  # at the last one it writes the trace
            if self._running.step_num > STEPS:
                self._running.stop()
                self._running = None
        elif take_request(self._output_dir, PROFILE_NOW):
            self._running = profile(
                schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
                on_trace_ready=tensorboard_trace_handler(
                    f"{self._output_dir}/profile", use_gzip=True
                ),
            )
            self._running.start()
