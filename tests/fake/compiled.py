"""What a training step and a scoring compile, made binaries of a CUDA device that is not there.

    LD_PRELOAD=guard.so python compiled.py CAPABILITY WIDTH [encoding ...] [key=value ...]

prints a line of JSON for each encoding: the kernels that it is the first to ask for, with their bytes of shared memory,
how many a step launches and the bytes that these read and write, each tensor once, and every warning. The model has one
layer of four heads of WIDTH channels and is compiled between its kernels, too, unless keys say otherwise.
"""

import json
import logging
import sys
from typing import Any

import cuda_compiler

MAJOR, _, MINOR = sys.argv[1].partition(".")
WIDTH = int(sys.argv[2])
NAMES, KEYS = ([one for one in sys.argv[3:] if ("=" in one) == is_key] for is_key in (False, True))
cuda_compiler.stand_in((int(MAJOR), int(MINOR)))
sys.argv[1:] = ["cuda"]

import steps  # noqa: E402
import torch  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402

from posbench import encodings  # noqa: E402
from posbench.errors import UserError  # noqa: E402
from posbench.kernels import flex  # noqa: E402

SMALL = {"model.n_layers": 1, "model.n_heads": 4, "model.d_model": 4 * WIDTH, "runtime.compile": "true"}
OVERRIDES = [*(f"{key}={value}" for key, value in SMALL.items() if all(key not in typed for typed in KEYS)), *KEYS]


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def launch(*given: Any, **__: Any) -> None:
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, steps.Asked):
            mode.launches += 1
            mode.bytes += sum(one.nbytes for one in steps.tensors(given))


def main() -> None:
    made = cuda_compiler.binaries(launch)
    torch.autograd.set_multithreading_enabled(False)
    steps.without_the_device()
    flex.checked = lambda device, kind, *_: flex.ladder(kind)[0]
    told = Told()
    logging.getLogger("posbench").addHandler(told)
    for name in NAMES or encodings.names():
        made.clear()
        told.lines.clear()
        row: dict[str, Any] = {"encoding": name}
        try:
            step = steps.asked(name, "124m", *OVERRIDES)["step"]
            row |= {"launches": step["launches"], "bytes": step["bytes"]}
        except UserError as error:
            row["left out"] = str(error)
        print(json.dumps({**row, "kernels": made, "warned": told.lines}), flush=True)


if __name__ == "__main__":
    main()
