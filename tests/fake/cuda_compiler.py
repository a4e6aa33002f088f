"""What torch's compiler and Triton ask of a CUDA device, answered for one that is not there.

With the guard preloaded and these answers, what a run compiles becomes binaries of that device, and how much shared
memory each takes is known; `posbench` is imported afterwards. Of torch's own internals this
replaces what its version here, in constraints.txt, has.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

# Bytes that a block of threads may have: CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_MEMORY = {(7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (9, 0): 232448, (12, 0): 101376}


class Driver:
    """Triton's, as far as compiling asks."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def stand_in(capability: tuple[int, int]) -> None:
    """A device of that compute capability seems to be there, for which torch compiles in this process, each time."""
    properties = SimpleNamespace(
        name="none", major=capability[0], minor=capability[1], multi_processor_count=132, total_memory=2**37,
        warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block=49152, shared_memory_per_block_optin=SHARED_MEMORY[capability], L2_cache_size=2**25,
    )  # fmt: skip
    random_state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: capability,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "get_rng_state": lambda *_: random_state,
        "set_rng_state": lambda *_: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    triton.runtime.driver.set_active(Driver(capability))
    # The compiler keeps some of these functions when it is loaded: only now.
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None
    joint_graph.lazy_init = lambda *_, **__: None  # its patterns are traced with tensors of the device
    config.joint_graph_constant_folding = False  # so are constants
    config.compile_threads = 1
    config.force_disable_caches = True
    config.use_static_triton_launcher = False


def binaries(launch: Callable[..., None]) -> list[tuple[str, int]]:
    """Names of kernels as they are compiled from now on, and their bytes of shared memory; `launch` launches them."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    made: list[tuple[str, int]] = []

    def keep(self: CachingAutotuner) -> None:
        made.append((self.fn.__name__, min(one.kernel.metadata.shared for one in self.compile_results)))
        self.launchers = [lambda *_, **__: None]

    CachingAutotuner._make_launchers = keep
    CachingAutotuner._dynamic_scale_rblock = lambda self: None
    CachingAutotuner.run = launch
    memory(lambda *given, dtype: torch.empty_strided(*given, dtype=dtype, device="cuda"))
    return made


def memory(empty: Callable[..., torch.Tensor]) -> None:
    """How graphs make their tensors, and views of them: by Python, that fake ones may come in and go out."""
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: empty(size, stride, dtype=dtype)
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: torch.as_strided(
        tensor, size, stride, tensor.storage_offset() + offset
    )
