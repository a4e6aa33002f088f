"""The stub of a device as a library that is loaded before torch is used.

    python guard.py guard.so cuda|mps

writes it.
"""

import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = pathlib.Path(__file__).parent
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="a stub of the device is compiled"),
    pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="stands in for a device"),
]


def build(library: pathlib.Path, device: str) -> pathlib.Path:
    """That of CUDA or MPS, for LD_PRELOAD."""
    libraries, *_ = library_paths()
    given = ["-DFAKE_CUDA"] if device == "cuda" else []
    found = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *(f"-I{path}" for path in include_paths())]
    source = [str(HERE / "guard.cpp"), "-o", str(library)]
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", *given, *source, *found, "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return library


if __name__ == "__main__":
    build(pathlib.Path(sys.argv[1]), sys.argv[2])
