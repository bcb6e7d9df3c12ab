"""A trace of some steps, for https://ui.perfetto.dev."""

from torch.profiler import profile, schedule, tensorboard_trace_handler

from zerotrain.checkpoint.state import Progress
from zerotrain.config.schema import Config
from zerotrain.runtime.process_group import Ranks

PROFILED_STEPS = 3


def open_profiler(config: Config, start: Progress, ranks: Ranks) -> profile | None:
    """A profiler of three steps of rank 0 from profile.start on, the one before them being its
    warm-up; None if there is nothing to profile. The loop calls step() after each step.
    """
    wait_steps = config.profile.start - start.step - 2
    if not ranks.is_first or wait_steps < 0:
        return None
    return profile(
        schedule=schedule(wait=wait_steps, warmup=1, active=PROFILED_STEPS, repeat=1),
        on_trace_ready=tensorboard_trace_handler(f"{config.output_dir}/profile", use_gzip=True),
    )
