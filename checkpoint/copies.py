"""Copies of the training state in CPU memory, for asynchronous saves."""

import copy
import threading
from typing import Any

import torch


class TensorCopies:
    """Copies of a state in CPU memory, which is reused, and pinned if there is a GPU.

    Only the optimizer's update changes the state, so the copies are made during the next forward
    and backward passes, and the update waits until they are `made`. Copying before them would block
    the loop for more than a tenth of the time of a blocking save, and for half of it the first
    time, when the memory is allocated.
    """

    def __init__(self) -> None:
        self.made = threading.Event()
        self.made.set()
        # not is_available: a run on the CPU of a machine with GPUs leaves them alone
        self._stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        self._buffers: list[torch.Tensor] = []
        self._originals: list[torch.Tensor] = []
        self._seen: dict[tuple, torch.Tensor] = {}

    def plan(self, state: Any) -> Any:
        """`state` with a buffer in the place of every tensor, which `make` fills. Tensors that
        share memory share a buffer.
        """
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        planned = self._plan(state)
        del self._buffers[len(self._originals) :]
        self._seen = {}
        self.made.clear()
        return planned

    def make(self) -> None:
        """Fill the buffers of the last `plan`, if there was one. Any thread may call it."""
        try:
            if self._stream:  # a new thread is on GPU 0, where it would take memory for a context
                torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                for original, buffer in zip(self._originals, self._buffers, strict=False):
                    buffer.copy_(original, non_blocking=True)
            if self._stream:
                self._stream.synchronize()
        finally:
            self._originals = []
            self.made.set()

    def _plan(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if key not in self._seen:
                self._seen[key] = self._buffer_for(value)
                self._originals.append(value.detach())
            return self._seen[key]
        if isinstance(value, dict):
            planned = {name: self._plan(item) for name, item in value.items()}
            return planned if type(value) is dict else type(value)(planned)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._plan(item) for item in value)
        return copy.deepcopy(value)  # e.g. a loss scaler, which changes with every step

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next buffer: that of the last save if it has the same shape and dtype."""
        at = len(self._originals)
        fits = at < len(self._buffers) and (
            self._buffers[at].shape == tensor.shape and self._buffers[at].dtype == tensor.dtype
        )
        if not fits:
            del self._buffers[at:]
            pinned = self._stream is not None
            self._buffers.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned))
        return self._buffers[at]


def tensor_bytes(value: Any) -> int:
    """The size of all tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0
