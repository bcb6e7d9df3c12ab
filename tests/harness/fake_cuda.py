"""CUDA tensors without values on a machine without a GPU, in a process that imports this module
before torch, with the library that `build` has made as FAKE_CUDA.
"""

import ctypes
import importlib.util
import os
import subprocess
from pathlib import Path

TORCH = Path(importlib.util.find_spec("torch").origin).parent
SOURCE = Path(__file__).with_suffix(".cpp")


def build(library):
    """Compile fake_cuda.cpp with g++, in a quarter of a minute."""
    folders = [
        f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include", f"-L{TORCH}/lib"
    ]  # fmt: skip
    flags = ["-O0", "-std=c++20", "-shared", "-fPIC", "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", SOURCE, "-o", library, *folders, *flags], check=True)


if "FAKE_CUDA" in os.environ:
    for file in (TORCH / "lib/libc10.so", TORCH / "lib/libtorch_cpu.so", os.environ["FAKE_CUDA"]):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
