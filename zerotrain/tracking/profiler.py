"""Traces of training steps on request, for https://ui.perfetto.dev."""

from collections.abc import Iterator

from torch.profiler import profile, schedule, tensorboard_trace_handler

from zerotrain.checkpoint.run_folder import PROFILE_NOW, take_request

TRACED_STEPS = 3


def trace_on_request(output_dir: str) -> Iterator[None]:
    """Return an iterator to advance after each step of this rank.

    When OUTPUT_DIR/profile_now exists, it traces the next TRACED_STEPS steps into
    OUTPUT_DIR/profile.
    """
    while True:
        if take_request(output_dir, PROFILE_NOW):
            with profile(
                # The profiler warms up for a step, which would otherwise look slow in the trace.
                schedule=schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1),
                on_trace_ready=tensorboard_trace_handler(f"{output_dir}/profile", use_gzip=True),
            ) as running:
                for _ in range(1 + TRACED_STEPS):
                    yield
                    running.step()  # After the last step this writes the trace.
        yield
