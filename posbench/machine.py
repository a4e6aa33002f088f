"""Devices, precision, threads and memory of a run."""

import contextlib
import ctypes
import functools
import logging
import os
import platform
import random
import re
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.errors import OUT_OF_MEMORY, RunFailed, UserError

CLEARLY_FASTER = 1.3  # so many times, one CPU thread is said to be
logger = logging.getLogger(__name__)
SHARED_BY = "POSBENCH_RUNS_ON_A_GPU"  # environment variable: how many share it
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def resolve(name: str) -> torch.device:
    """Return the device of a name; `auto` is CUDA, else MPS, else the CPU. Raises
    UserError if the machine lacks it.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    here = [kind for kind, is_available in available.items() if is_available]
    if name == "auto":
        return torch.device(here[0])
    if name.partition(":")[0] not in here:
        raise UserError(
            f"runtime.device is '{name}', which this machine does not have (here: auto,"
            f" {', '.join(here)}): choose device=auto or device={here[0]}"
        )
    return torch.device(name)


def current(device: torch.device) -> torch.device:
    """Return a device. A CUDA device becomes the current one, on which Triton and NCCL
    work, without cuDNN's TF32, and its segments of memory may grow.
    """
    if device.type == "cuda":
        # Torch reads this when CUDA begins. With it fewer segments of memory lie around
        # in pieces that are too small.
        has_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        is_nvidia = torch.version.hip is None
        is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
        if is_nvidia and not has_begun and not is_set:
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        # "cuda" alone is the current one already; set_device refuses it
        if device.index is not None:
            torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
    return device


def be_deterministic(device: torch.device, deterministic: bool) -> None:
    """Use deterministic CUDA kernels wherever torch has them. Call it before the first
    product: cuBLAS looks then.
    """
    if device.type == "cuda":
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # nothing reads it
        torch.use_deterministic_algorithms(deterministic, warn_only=True)


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: the named one, or for `auto` bf16 if the
    device does it well, else fp32.
    """
    if name != "auto":
        return DTYPES[name]
    if bf16_is_fast(device):
        return torch.bfloat16
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        logger.info("precision=auto is fp32 here: %s has no bf16", gpu)
    return torch.float32


def bf16_is_fast(device: torch.device) -> bool:
    """Return whether the hardware has bf16 matrix instructions. Its flags say so, so
    the answer never varies.
    """
    if device.type == "cuda":
        is_ampere_or_newer = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.version.hip is not None or is_ampere_or_newer
    bf16_flags = {"avx512_bf16", "amx_bf16", "arm_bf16", "arm_sve_bf16"}
    return device.type == "cpu" and not bf16_flags.isdisjoint(cpu_flags())


# Peaks of dense bf16 products in 1e12 FLOP per second, by the start of a GPU's name
# (NVIDIA's data sheets).
_PEAKS = {
    "NVIDIA B200": 2250,
    "NVIDIA H200 NVL": 836,
    "NVIDIA H200": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA A100": 312,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a CUDA device's peak of dense products in bf16, in FLOP per second; None
    if it is not known, or for another dtype.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    for start, peak in _PEAKS.items():
        if name.startswith(start):
            return peak * 1e12
    return None


def has_amx() -> bool:
    """Return whether the CPU has instructions for whole tiles of bf16 numbers, which
    torch's fused attention uses.
    """
    return "amx_bf16" in cpu_flags()


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that this CPU has, by torch's names for them."""
    # torch before 2.12 cannot tell
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return frozenset(flag for flag, is_present in capabilities.items() if is_present)


def autocast(
    device: torch.device, dtype: torch.dtype
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which matrix products run in a dtype; it does nothing for
    fp32.
    """
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. The copy to CUDA is asynchronous: the host may
    change the tensor meanwhile, unless its memory is pinned.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device and dtype on the host, which waits for the device
    once.
    """
    if not tensors:
        return []
    joined = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    sizes = [tensor.numel() for tensor in tensors]
    parts = torch.split(joined, sizes)
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(processes: int) -> int:
    """Return the CPU threads of each process: an equal share of the cores, at most
    `OMP_NUM_THREADS` if that is set.
    """
    share = max(1, cores() // processes)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal() and int(limit) > 0:
        share = min(share, int(limit))
    return share


_first_threads = functools.cache(torch.get_num_threads)  # before any is set


def set_threads(threads: int | None) -> int:
    """Use this many CPU threads (None: torch's choice), flush subnormal numbers to 0,
    and return the number of threads.

    Softmax under a bias that falls with distance makes subnormals, on which a CPU is
    many times slower. Call this before the first parallel region: worker threads
    inherit the setting when they start.
    """
    torch.set_flush_denormal(True)
    first = _first_threads()
    if threads is None and torch.get_num_threads() != first:
        threads = first  # an earlier run in this process had a number of its own
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def tell_slow_threads(n_rows: int, width: int) -> None:
    """Warn if one CPU thread is clearly faster than all together, which wait for each
    other where other work needs the cores.

    What is timed is a feed-forward of ones, `n_rows` tokens of a model's `width`, by
    turns for half a second: what the model computes stays the same.
    """
    n_threads = torch.get_num_threads()
    if n_threads == 1:
        return
    x = torch.ones(n_rows, width)
    weight = torch.ones(width, 4 * width)
    seconds = {1: 0.0, n_threads: 0.0}
    while sum(seconds.values()) < 0.5:
        for threads in seconds:
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            F.gelu(x @ weight) @ weight.T
            seconds[threads] += time.perf_counter() - begin
    torch.set_num_threads(n_threads)

    gain = seconds[n_threads] / seconds[1]
    if gain > CLEARLY_FASTER:
        logger.warning(
            "a feed-forward takes %.2g times as long with %d threads as with one:"
            " runtime.threads=1 is faster here",
            gain,
            n_threads,
        )


@contextlib.contextmanager
def fresh_state() -> Iterator[None]:
    """Give a run in a caller's process torch's state of a fresh one; the caller's comes
    back afterwards, with its random streams.
    """
    threads = torch.get_num_threads()
    # whether this thread takes numbers below the normal ones for 0
    smallest = torch.full((1,), 2.0**-149, dtype=torch.float32, device="cpu")
    flushed = bool((smallest * 1.0).item() == 0)
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    tf32 = torch.backends.cudnn.allow_tf32
    keeps_copies = torch.is_autocast_cache_enabled()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for device in ("cpu", "cuda", "mps"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            # inside the caller's autocast, also one that is disabled, copies of weights
            # outlive their updates
            level = torch.autocast_increment_nesting()
            torch.autocast_decrement_nesting()
            torch.set_autocast_cache_enabled(level == 1)
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            torch.set_default_dtype(torch.float32)
            torch.set_float32_matmul_precision("highest")
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_autocast_cache_enabled(keeps_copies)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.set_flush_denormal(flushed)
        torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors for the next ones. Otherwise a step
    has 100,000 page faults.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


def device_memory(device: torch.device) -> int:
    """Return the total memory of a CUDA or MPS device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return torch.mps.recommended_max_memory()


def free_memory(device: torch.device) -> int:
    """Return this run's share of the memory of a CUDA or MPS device that nothing uses,
    in bytes.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // int(os.environ.get(SHARED_BY, 1))
    return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. The CPU's allocator, cuBLAS, cuDNN and MPS have no
    exception class for that.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    messages = "can't allocate memory|_STATUS_ALLOC_FAILED|MPS backend out of memory"
    return re.search(messages, str(error)) is not None


@contextlib.contextmanager
def out_of_memory_as_failure(hint: str) -> Iterator[None]:
    """Raise RunFailed with the reason `oom` for out-of-memory errors of torch and
    Python; `hint` says what may fit.
    """
    try:
        yield
    # torch's error on a GPU is a RuntimeError
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        line = (str(error).splitlines() or ["no room"])[0]
        raise RunFailed(
            f"{OUT_OF_MEMORY}: {line}; {hint} may fit", reason="oom"
        ) from error


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak of memory on CUDA since the last reset, in bytes; None elsewhere,
    where only the whole process has one, which nothing resets.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device)
