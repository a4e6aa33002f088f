"""A model of transformers as an evaluation's subject. Masks give its windows, and other
RoPE gives its extensions.
"""

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posbench import machine
from posbench.config.overrides import parse_choice
from posbench.errors import Undefined, UserError
from posbench.evaluation.protocols import Integers
from posbench.evaluation.subjects import (
    NOT_FINITE,
    Bools,
    Facts,
    Variant,
    logits_differ,
    tail_length,
    why_not_causal,
)
from posbench.huggingface.load import position_of
from posbench.randomness import generator
from posbench.rope.extension import extend_model, extension
from posbench.rope.imports import library_errors, transformers
from posbench.rope.reading import restore

_MOST_LOGITS = 2**27  # held at once, unless a single window has more
_window: contextvars.ContextVar[tuple[int | None, int]] = contextvars.ContextVar(
    "window", default=(None, 0)
)


@dataclasses.dataclass(frozen=True, eq=False)
class HuggingFaceModel:
    """A model that was trained elsewhere. Extensions and windows give copies that share
    its weights.
    """

    model: Any  # the library's model
    name: str
    train_length: int
    precision: str  # fp32 or bf16
    first_token: int | None = None  # replaces the first token of every window
    window: int | None = None
    sinks: int = 0
    offset: int = 0  # the first token's position

    @property
    def config(self) -> Any:
        """The library's configuration; in a model of several parts, that of its text
        part.
        """
        return self.model.config.get_text_config()

    @torch.no_grad()
    def logits(self, ids: Integers, scored: Bools, first: int) -> Iterator[Tensor]:
        last = tail_length(scored)
        at_once = max(1, _MOST_LOGITS // (last * self._vocabulary))  # windows
        for start in range(0, len(ids), at_once):
            batch = slice(start, start + at_once)
            windows = torch.from_numpy(ids[batch, :-1])
            logits = self.read(machine.to_device(windows, self.model.device), last)
            # A mask would need their number from the device.
            rows = torch.from_numpy(np.flatnonzero(scored[batch, -last:]))
            yield logits.flatten(0, 1)[machine.to_device(rows, logits.device)]

    @torch.no_grad()
    def read(self, inputs: Tensor, last: int) -> Tensor:
        """Return the model's own logits (B, last, V) of the last tokens of inputs (B,
        T), in fp32, whatever it has read before.
        """
        length = inputs.shape[1]
        if self.first_token is not None:
            inputs = inputs.clone()
            inputs[:, 0] = self.first_token
        options: dict[str, Any] = {}
        if "logits_to_keep" in self._options:
            options["logits_to_keep"] = last
        if self.offset:
            positions = self.offset + torch.arange(length, device=inputs.device)
            options["position_ids"] = positions[None]

        restore(self.model)
        if self.model.config.model_type == "mpt":  # the length that its bias is for
            self.model.config.max_seq_len = length
        _narrow_masks()
        token = _window.set((self.window, self.sinks))
        try:
            logits: Tensor = self.model(inputs, use_cache=False, **options).logits
        finally:
            _window.reset(token)
        return logits[:, -last:].float()

    def shifted(self, offset: int) -> "HuggingFaceModel":
        if "position_ids" not in self._options:
            raise Undefined(
                f"transformers gives {self._kind} no positions: there are none to shift"
            )
        return dataclasses.replace(self, offset=offset)

    def in_variant(
        self, variant: Variant, length: int
    ) -> tuple["HuggingFaceModel", Facts]:
        self._refuse_length(length)
        if variant.window is not None and not self._narrows:
            raise Undefined(
                f"attention masks do not restrict all layers of {self._kind}: it has no"
                " windows"
            )
        model = self.model
        facts = None
        if variant.sinks:
            facts = {"sinks": variant.sinks}
        if variant.extension is not None:
            model, facts = self._extended(variant.extension, length)
        changed = dataclasses.replace(
            self, model=model, window=variant.window, sinks=variant.sinks
        )
        return changed, facts

    def _refuse_length(self, length: int) -> None:
        position = position_of(self.model.config)
        if position == "learned":
            rows = self.config.max_position_embeddings
            if length > rows:
                raise Undefined(
                    f"{self._kind} has a table of {rows} positions: longer inputs are"
                    " undefined"
                )
        # an untested kind without RoPE
        if position == "other" and length > self.train_length:
            raise Undefined(
                f"{self._kind} is untested and has no RoPE: it may not read more than"
                f" {self.train_length} tokens"
            )

    def _extended(self, text: str, length: int) -> tuple[Any, dict[str, Any]]:
        """Return the library's model with an extension such as yarn:factor=4, and facts
        for result rows.
        """
        method, options = parse_choice(text)
        problem = f"transformers cannot extend this model by '{text}'"
        with library_errors(problem, Undefined):
            stretch = extension(self.config, method, length, self.train_length, options)
            return extend_model(self.model, stretch, length), stretch.facts

    def refuse_not_causal(self) -> None:
        """Raise UserError unless logits are finite, and later tokens change no earlier
        logits.
        """
        with library_errors(f"{self.name}: transformers cannot run it"):
            why = why_not_causal(self, self._vocabulary, self.precision)
        if why == NOT_FINITE:
            raise UserError(f"{self.name}: {why} in {self.precision}")
        if why:
            raise UserError(f"{self.name} is no causal model: {why}")

    @property
    def _kind(self) -> str:
        return str(self.model.config.model_type)

    @property
    def _vocabulary(self) -> int:
        return int(self.config.vocab_size)

    @property
    def _options(self) -> Mapping[str, Any]:
        """What the model's `forward` takes, by name."""
        return inspect.signature(type(self.model).forward).parameters

    @functools.cached_property
    def _narrows(self) -> bool:
        """Whether a window hides what lies before it: not what a recurrent state
        keeps.
        """
        if getattr(self.model, "_is_stateful", False):
            return False
        rng = generator(0, "check", self._vocabulary)
        size = (1, min(64, self.train_length))
        ids = torch.randint(self._vocabulary, size, generator=rng)
        ids = ids.to(self.model.device)
        wide = self.read(ids, 1)
        narrow = dataclasses.replace(self, window=4).read(ids, 1)
        return logits_differ(wide, narrow, self.precision)


@functools.cache  # once, or masks would be narrowed twice
def _narrow_masks() -> None:
    """Make the library narrow its (T x T) masks where it builds them, so that a layer's
    own window is kept: a query sees only its window (itself included) and the first
    `sinks` keys.
    """
    masks = transformers().AttentionMaskInterface

    def mask(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        window, sinks = _window.get()
        if window is None:
            return original(*args, **options)
        from transformers.masking_utils import and_masks, causal_mask_function

        def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query - key < window) | (key < sinks)

        visible = and_masks(options.pop("mask_function", causal_mask_function), near)
        options |= {"mask_function": visible, "allow_is_causal_skip": False}
        return original(*args, **options)

    for name in ("sdpa", "eager"):
        masks.register(name, functools.partial(mask, masks()[name]))
