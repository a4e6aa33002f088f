"""Probes of a model of a kind that no test has verified: where are its numbers those of a causal language model?

Each probe compares the model's own logits on random tokens, read as evaluations read them. If it fails, the rows
concerned are undefined, with the reason:

    head         our logits are those of the model's own forward pass        all rows
    causality    later tokens change no earlier logits                       all rows
    batch        other windows in its batch change no logits                 all rows
    history      longer inputs before it change no logits                    all rows
    length       it runs at the requested lengths; positions of a table end  longer rows
    windows      a window of all tokens changes nothing, a narrow one hides  rows of windows and sinks
    extensions   its rotary modules turn as RoPE is defined, and are used    rows of extensions

Logits are equal if the root mean square of their differences is below a share of their standard deviation: 1e-3 in
fp32, 0.15 in bf16 and fp16. There rounding grows from layer to layer, and a router may choose another expert if the
shape of a batch changes. Logits of other tokens differ by 1.4 standard deviations, those of one position of 64 by 0.18.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posbench import machine
from posbench.errors import Undefined, UserError
from posbench.huggingface import rope
from posbench.huggingface.package import line
from posbench.huggingface.subject import HuggingFaceModel, Limits, beyond_table, position_of
from posbench.randomness import generator

_SHARE = {"fp32": 1e-3, "bf16": 0.15, "fp16": 0.15}
_NARROW = 4  # keys; more than the reach of a short convolution
_SHORT = 64  # tokens


def limits(subject: HuggingFaceModel, lengths: list[int]) -> Limits:
    """Probe a model at the lengths that are asked for, in tokens.

    Raises:
        UserError: the library cannot run it at all.
        RunFailed: memory ran out.
    """
    return _Probes(dataclasses.replace(subject, first_token=None), lengths).limits()


class _Probes:
    def __init__(self, subject: HuggingFaceModel, lengths: list[int]) -> None:
        self.subject, self.kind = subject, subject.checkpoint.kind
        config = subject.config
        self.layers = int(getattr(config, "num_hidden_layers", None) or 1)
        self.lengths = sorted(lengths)
        self.short = min(subject.train_length - 1, max(_SHORT, (_NARROW - 1) * self.layers + 16))
        ends = [getattr(config, f"{end}_token_id", None) for end in ("bos", "eos", "pad")]
        special = {token for end in ends for token in (end if isinstance(end, list) else [end])}
        plain = [token for token in range(min(config.vocab_size, 2**16)) if token not in special] or [0]
        stream = generator(0, "probe", config.vocab_size)
        drawn = torch.randint(len(plain), (2, max(self.short, *self.lengths)), generator=stream)
        self.ids = torch.tensor(plain)[drawn].to(subject.device)

    def limits(self) -> Limits:
        try:
            with _Tables(self.short) as tables:
                plain = self.logits(self.ids[:1, : self.short])
            found = Limits(everywhere=self._everywhere(plain))
        except Undefined as error:
            return Limits(everywhere=f"{self.kind}: {error}")
        except Exception as error:
            _refuse_no_memory(error)
            folder = self.subject.checkpoint.folder
            raise UserError(f"{folder}: transformers cannot run it: {line(error)}") from None
        if found.everywhere is None:
            found = self._lengths(found, tables.end)
        if found.everywhere is None:
            found = dataclasses.replace(found, windows=self._windows(plain), extensions=self._extensions(plain))
        return found

    def logits(self, ids: Tensor, last: int | None = None, subject: HuggingFaceModel | None = None) -> Tensor:
        """Of the last tokens of ids (B, T): (B, last, V), as evaluations compute them."""
        subject = subject or self.subject
        hidden = subject.hidden(ids, ids.shape[1] if last is None else last)
        return torch.stack([subject.head(states) for states in hidden])

    def differ(self, one: Tensor, other: Tensor) -> bool:
        """Whether logits differ by more than rounding; not finite ones do."""
        return not bool((one - other).square().mean().sqrt() <= _SHARE[self.subject.precision] * one.std())

    # -- each returns the reason why it fails, or None -----------------------------------------------------------------

    def _everywhere(self, plain: Tensor) -> str | None:
        ids, half = self.ids[:1, : self.short], self.short // 2
        if not plain.isfinite().all():
            return f"{self.kind} gives logits that are not finite"
        rope.restore(self.subject.model)
        with torch.no_grad():
            own = self.subject.model(input_ids=ids, use_cache=False).logits.float()
        if own.shape != plain.shape or self.differ(own, plain):
            return f"{self.kind} makes its logits of more than the hidden states that its head reads"
        later = torch.cat((ids[:, :half], self.ids[1:, half : self.short]), dim=1)
        if self.differ(plain[:, :half], self.logits(later)[:, :half]):
            return f"{self.kind} is not causal: later tokens change its earlier logits"
        if self.differ(plain, self.logits(self.ids[:, : self.short])[:1]):
            return f"other windows in its batch change the logits of {self.kind}"
        return None

    def _lengths(self, found: Limits, end: int | None) -> Limits:
        """Run the longest input, and a shorter one before and after it."""
        if end is not None and end < max(self.short, *self.lengths):
            found = beyond_table(found, self.kind, end)
        possible = [length for length in self.lengths if end is None or length <= end]
        middle = min(self.subject.train_length + 8, max([self.short, *possible]))
        try:
            before = self.logits(self.ids[:1, :middle], 8)
        except Exception as error:
            _refuse_no_memory(error)
            middle, before = self.short, self.logits(self.ids[:1, : self.short], 8)
        while possible and possible[-1] > self.short:
            try:
                self.logits(self.ids[:1, : possible[-1]], 1)
                break
            except Exception as error:
                _refuse_no_memory(error)
                told = f"transformers cannot run {self.kind} at {possible.pop()} tokens: {line(error)}"
                found = dataclasses.replace(found, beyond=told, longest=max([middle, *possible]))
        if self.differ(before, self.logits(self.ids[:1, :middle], 8)):
            return dataclasses.replace(found, everywhere=f"longer inputs before change the logits of {self.kind}")
        return found

    def _windows(self, plain: Tensor) -> str | None:
        """With a narrow window, tokens beyond the reach of all layers must not change the last logits."""
        if getattr(self.subject.model, "_is_stateful", False):  # its state may fade below what the test below can see
            return f"transformers does not narrow all of {self.kind} by masks: no windows"
        reach = (_NARROW - 1) * self.layers
        if self.short <= reach + 1:
            return f"{self.kind} has too many layers for its training length to tell whether a window hides anything"
        ids = self.ids[:1, : self.short]
        other = torch.cat((self.ids[1:, : self.short - reach - 1], ids[:, self.short - reach - 1 :]), dim=1)

        def seen(window: int, ids: Tensor) -> Tensor:
            return self.logits(ids, subject=dataclasses.replace(self.subject, window=window))

        try:
            all_seen, narrow, changed = seen(self.short, ids), seen(_NARROW, ids), seen(_NARROW, other)
        except Exception as error:
            _refuse_no_memory(error)
            return f"transformers cannot run {self.kind} with a window: {line(error)}"
        if self.differ(plain, all_seen):
            return f"a window of all tokens changes the logits of {self.kind}"
        if not self.differ(plain, narrow) or self.differ(narrow[:, -1], changed[:, -1]):
            return f"transformers does not narrow all of {self.kind} by masks: no windows"
        return None

    def _extensions(self, plain: Tensor) -> str | None:
        """An interpolation by 2 stands for all: it changes every frequency at every length."""
        model, length = self.subject.model, self.subject.train_length
        if position_of(self.subject.checkpoint, model.config) != "rope" or not list(rope.modules(model)):
            return f"{self.kind} has no rotary modules: transformers extends only these"
        try:
            turns = rope.turns_of(model.config, length)
            if turns and not rope.agrees(model, turns, self.short):
                return f"the rotary modules of {self.kind} turn otherwise than RoPE of its configuration"
            extension = rope.extended(model.config, "pi", 2 * length, length, {"factor": 2.0})
            extended = dataclasses.replace(self.subject, extension=extension, length=length)
            changed = self.logits(self.ids[:1, : self.short], subject=extended)
        except Undefined as error:
            return str(error)
        except Exception as error:
            _refuse_no_memory(error)
            return f"transformers cannot extend {self.kind}: {line(error)}"
        return None if self.differ(plain, changed) else f"other frequencies change no logits of {self.kind}"


def _refuse_no_memory(error: Exception) -> None:
    """Raise the error again if memory ran out, which tells nothing of the model."""
    if machine.is_out_of_memory(error):
        raise error


class _Tables(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds tables of positions: tables whose rows 0, 1, 2 ... are looked up for an input of `length` tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.end: int | None = None  # longest input; None: no table was found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for rows, index in _looked_up(function.overloadpacket, args):
            first = _first_row(index, self.length)
            if first is not None and rows > self.length + first:
                self.end = min(rows - first, self.end or rows)
        return function(*args, **(kwargs or {}))


def _looked_up(operation: Any, args: Any) -> Iterator[tuple[int, Tensor]]:
    """The number of rows of a table, and the rows looked up, of operations that do this."""
    aten: Any = torch.ops.aten
    if operation is aten.embedding:
        yield len(args[0]), args[1]
    elif operation is aten.index_select:
        yield args[0].shape[args[1]], args[2]
    elif operation is aten.gather:
        yield args[0].shape[args[1]], args[2].movedim(args[1], -1)
    elif operation is aten.index:
        for dimension, index in enumerate(args[1]):
            if index is not None and index.dtype != torch.bool:
                yield args[0].shape[dimension], index


def _first_row(index: Tensor, length: int) -> int | None:
    """The first row, if a lookup is of `length` rows one after the other; else None."""
    if index.numel() < length:
        return None
    row = index.reshape(-1)[:length].cpu()
    return int(row[0]) if bool((row == row[0] + torch.arange(length)).all()) else None
