"""Read by every Python that has this folder in PYTHONPATH, before anything else: `torch.cuda` is simulated there."""

import ctypes
import importlib.util
import os
from pathlib import Path

_library = os.environ.get("SIMULATED_GPU")  # tests/simulated_gpu/build.py makes it
_torch = importlib.util.find_spec("torch")
if _library and _torch is not None and _torch.origin is not None:
    _parts = Path(_torch.origin).parent / "lib"
    ctypes.CDLL(str(_parts / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    for _name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(_parts / _name))
    # torch looks for CUDA once, while it is imported. It would warn that its own collectives are replaced.
    _stderr, _nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(_nowhere, 2)
    try:
        ctypes.CDLL(_library)
    finally:
        os.dup2(_stderr, 2)
        os.close(_stderr)
        os.close(_nowhere)

    from tests.simulated_gpu import cuda, groups

    cuda.install(_library)
    groups.install()
