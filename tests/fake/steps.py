"""A training step and a scoring of every scheme on fake tensors of a device that is not there, and what they ask of it.

    LD_PRELOAD=guard.so python steps.py cuda|mps [encoding ...]

prints a line of JSON for each encoding. Fake tensors have no values and know their device, so all that is counted
here is what a real device would be told: how many kernels are launched, where the host waits for a value, which copies
block, and where fp64, which MPS does not have, would be made.
"""

import collections
import dataclasses
import json
import sys
import traceback
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posbench import encodings, machine, processes
from posbench.bench import speed
from posbench.data.batches import Batch, TrainingBatches, own_rows
from posbench.errors import UserError
from posbench.evaluation import trained
from posbench.kernels import flex
from posbench.model.gpt import build
from posbench.training import step

KIND, *NAMES = sys.argv[1:]
DEVICE = torch.device(KIND, 0)
VALUES = {"_local_scalar_dense", "item", "is_nonzero"}
READS = {*VALUES, "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
# What launches nothing: views, and memory without content.
FREE = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "as_strided", "slice", "select", "unbind", "split",
    "detach", "alias", "unsqueeze", "squeeze", "view_as_real", "view_as_complex", "empty", "empty_like",
    "empty_strided", "new_empty", "_reshape_alias", "unfold", "split_with_sizes", "diagonal", "new_empty_strided",
}  # fmt: skip


class Asked(TorchDispatchMode):
    """What is asked of the device while it is on, but by graphs, which are compiled as without it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.bytes = 0  # of what kernels read and write, once each
        self.found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        given = tensors((args, kwargs))
        if name in READS and on_device(given):
            self.found["reads"][where()] += 1
        if name in VALUES:
            kind = bool if given[0].dtype == torch.bool or name == "is_nonzero" else int
            return float(1) if given[0].dtype.is_floating_point else kind(1)
        made = func(*args, **kwargs)
        out = tensors(made)
        self._count(name, given, out, args, kwargs)
        return made

    def _count(self, name: str, given: list[Tensor], out: list[Tensor], args: Any, kwargs: Any) -> None:
        if on_device(out) and name not in FREE:
            self.launches += 1
            self.bytes += sum(one.nbytes for one in [*given, *out])
        for one in out:
            if one.device.type == KIND and one.dtype in (torch.float64, torch.complex128):
                self.found["fp64"][f"{name} {where()}"] += 1
        if name in ("_to_copy", "to", "copy_") and given and out:
            source = given[-1] if name == "copy_" else given[0]
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if source.device.type == KIND and out[0].device.type == "cpu":
                self.found["reads"][where()] += 1
            elif source.device.type == "cpu" and out[0].device.type == KIND and waits:
                self.found["blocking"][f"{where()} {tuple(source.shape)}"] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "launches": self.launches,
            "bytes": self.bytes,
            **{name: dict(self.found[name]) for name in ("reads", "blocking", "fp64")},
        }


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def on_device(some: Iterable[Tensor]) -> bool:
    return any(one.device.type == KIND for one in some)


def where() -> str:
    """The line of posbench, or else of torch, that asked."""
    stack = traceback.extract_stack()
    for mark in ("/posbench/", "/optim/", "clip_grad"):
        for frame in reversed(stack):
            if mark in frame.filename and "/tests/" not in frame.filename:
                return f"{frame.filename.rpartition('/posbench/')[2].rpartition('site-packages/')[2]}:{frame.lineno}"
    return "?"


class Fused(torch.autograd.Function):
    """In place of the fused kernels, which a build without the device does not have."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return v[..., : q.shape[2], :].clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


def without_the_device() -> None:
    """What torch refuses where the device is not, replaced by what does nothing."""
    torch.cuda.is_bf16_supported = lambda *_, **__: True  # type: ignore[assignment]
    torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, **_: Fused.apply(q, k, v)
    torch.cuda.Event = lambda: SimpleNamespace(record=lambda: None)  # type: ignore[misc, assignment]
    Tensor.pin_memory = lambda self: self  # type: ignore[method-assign]
    FakeTensor.numpy = lambda self: np.zeros(tuple(self.shape))  # type: ignore[method-assign]
    flex.checked = lambda *_: None  # there is nothing to compile for
    machine.device_memory = lambda _: 24 * 2**30
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    for module in (step, trained):
        module.generator = lambda *_, **__: torch.Generator()  # type: ignore[attr-defined]


def moved(model: nn.Module) -> nn.Module:
    """The model with parameters and buffers that are on the device and have no values."""
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
                    own[name] = nn.Parameter(fake, tensor.requires_grad) if own is module._parameters else fake
        for name, value in vars(module).items():
            if isinstance(value, Tensor):  # of the host
                setattr(module, name, torch.empty(value.shape, dtype=value.dtype))
    return model


def asked(name: str, shape: str = "demo", *overrides: str) -> dict[str, Any]:
    """What the second of two steps, and a scoring at four times the training length, ask of the device."""
    sizes = speed.find_shape(shape)
    config = speed.configuration(name, sizes, 1, ["runtime.device=cpu", *overrides])
    text = speed.random_text(sizes.vocab_size, config)
    dtype = torch.bfloat16 if KIND == "cuda" else torch.float32
    model = build(config, sizes.vocab_size)
    batch = TrainingBatches(text.ids, sizes.train_length, sizes.batch_size, seed=0).batch(0)
    half = batch.rows(own_rows(len(batch.ids), 1, 0, 2))
    told: dict[str, Any] = {"encoding": name}
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved(model)
        learner = step.learner_for(model, config, DEVICE, dtype)
        with Asked():
            step.begin_update(learner, batch, 0, 1e-3)
        with Asked() as log:
            step.begin_update(learner, batch, 1, 1e-3)
        told["step"] = log.as_dict()
        if KIND == "cuda" and name == "none":
            told["step of two processes"] = in_two_processes(learner, half)
        subject = trained.TrainedGPT(model.eval(), name, sizes.train_length, DEVICE, dtype)
        length = min(4 * sizes.train_length, model.encoding.max_length or 4 * sizes.train_length)
        ids = np.zeros((2, length + 1), dtype=np.int64)
        with Asked() as log:
            subject.nll(ids, length, 0)
        told["score"] = log.as_dict()
    return told


def in_two_processes(learner: step.Learner, batch: Batch) -> dict[str, Any]:
    """What an update asks of the device in one of two processes, and how many sums were begun before its message."""
    early = 0

    def sum_up(*_: Any, async_op: bool = False) -> SimpleNamespace:
        nonlocal early
        early += async_op
        return SimpleNamespace(wait=lambda: None)

    dist.all_reduce = sum_up
    learner = dataclasses.replace(learner, world=processes.Joined(dist.HashStore(), 0, 2, 0, 1))
    processes._BUCKET_BYTES["cuda"] = 2**18
    with Asked() as log:
        step.begin_update(learner, batch, 2, 1e-3)
    return {**log.as_dict(), "early": early}


def main() -> None:
    torch.autograd.set_multithreading_enabled(False)  # fake tensors of two devices are not for several threads
    without_the_device()
    for name in NAMES or encodings.names():
        try:
            print(json.dumps(asked(name)), flush=True)
        except UserError as error:
            print(json.dumps({"encoding": name, "left out": str(error)}), flush=True)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"encoding": name, "fails": str(error)[:200]}), flush=True)


if __name__ == "__main__":
    main()
