"""A trace of some steps, for https://ui.perfetto.dev, whenever a user asks for one."""

from collections.abc import Iterator

from torch.profiler import profile, schedule, tensorboard_trace_handler

from zerotrain.checkpoint.run_folder import PROFILE_NOW, take_request

STEPS = 3


def trace_on_request(output_dir: str) -> Iterator[None]:
    """An iterator to advance after each step of this rank. Once OUTPUT_DIR/profile_now is touched,
    it traces three steps into OUTPUT_DIR/profile.
    """
    while True:
        if take_request(output_dir, PROFILE_NOW):
            with profile(
                # torch warms up in the step before: its first one would look slow
                schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
                on_trace_ready=tensorboard_trace_handler(f"{output_dir}/profile", use_gzip=True),
            ) as running:
                for _ in range(1 + STEPS):
                    yield
                    running.step()  # at the last one it writes the trace
        yield
