"""A model of transformers as an evaluation's subject. Masks give its windows, and other
RoPE gives its extensions.
"""

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from posbench import machine
from posbench.errors import Undefined
from posbench.evaluation.models import (
    Bools,
    Variant,
    Varied,
    differ,
    parse_choice,
    refuse_not_causal,
    tail_length,
)
from posbench.evaluation.protocols import Integers
from posbench.huggingface.load import TESTED, position_of
from posbench.randomness import generator
from posbench.rope import extension as rope
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
        last, size = tail_length(scored), int(self.config.vocab_size)
        # windows whose logits are held at once
        at_once = max(1, _MOST_LOGITS // (last * size))
        for start in range(0, len(ids), at_once):
            windows = machine.to_device(
                torch.from_numpy(ids[start : start + at_once, :-1]), self.model.device
            )
            mask = torch.from_numpy(scored[start : start + at_once, -last:]).to(
                windows.device
            )
            logits = self.read(windows, last)
            yield logits.flatten(0, 1) if mask.all() else logits[mask]

    @torch.no_grad()
    def read(self, inputs: Tensor, last: int) -> Tensor:
        """Return the model's own logits (B, last, V) of the last tokens of inputs (B,
        T), in fp32.
        """
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(type(self.model).forward).parameters:
            options["logits_to_keep"] = last
        if self.offset:
            options["position_ids"] = (
                self.offset + torch.arange(inputs.shape[1], device=inputs.device)
            )[None]
        _narrow_masks()
        token = _window.set((self.window, self.sinks))
        try:
            logits = forward(self.model, inputs, self.first_token, **options)
        finally:
            _window.reset(token)
        return logits[:, -last:].float()

    def shifted(self, offset: int) -> "HuggingFaceModel":
        if "position_ids" not in inspect.signature(type(self.model).forward).parameters:
            raise Undefined(
                f"transformers gives {self.model.config.model_type} no positions: there"
                " are none to shift"
            )
        return dataclasses.replace(self, offset=offset)

    def varied(self, variant: Variant, length: int) -> Varied:
        kind, position = self.model.config.model_type, position_of(self.model.config)
        if position == "learned" and length > (
            rows := self.config.max_position_embeddings
        ):
            raise Undefined(
                f"{kind} has a table of {rows} positions: longer inputs are undefined"
            )
        if kind not in TESTED and position != "rope" and length > self.train_length:
            raise Undefined(
                f"{kind} is untested and has no RoPE: it may not read more than"
                f" {self.train_length} tokens"
            )
        if variant.window is not None and not self._narrows:
            raise Undefined(
                f"attention masks do not restrict all layers of {kind}: it has no"
                " windows"
            )
        model, facts = self.model, {"sinks": variant.sinks} if variant.sinks else None
        if variant.extension is not None:
            method, options = parse_choice(variant.extension)
            with library_errors(
                f"transformers cannot extend this model by '{variant.extension}'",
                Undefined,
            ):
                extension = rope.extension(
                    self.config, method, length, self.train_length, options
                )
                model, facts = (
                    rope.extend_model(model, extension, length),
                    extension.facts,
                )
        return Varied(
            dataclasses.replace(
                self, model=model, window=variant.window, sinks=variant.sinks
            ),
            facts,
        )

    def refuse_not_causal(self) -> None:
        """Raise UserError unless logits are finite, and later tokens change no earlier
        logits.
        """
        with library_errors(f"{self.name}: transformers cannot run it"):
            refuse_not_causal(
                self, int(self.config.vocab_size), self.precision, self.name
            )

    @functools.cached_property
    def _narrows(self) -> bool:  # a window does not hide what a recurrent state keeps
        size, vocabulary = (1, min(64, self.train_length)), int(self.config.vocab_size)
        ids = torch.randint(
            vocabulary, size, generator=generator(0, "check", vocabulary)
        ).to(self.model.device)
        wide, narrow = (
            model.read(ids, 1) for model in (self, dataclasses.replace(self, window=4))
        )
        return not getattr(self.model, "_is_stateful", False) and differ(
            wide, narrow, self.precision
        )


def forward(
    model: Any, ids: Tensor, first_token: int | None = None, **options: Any
) -> Tensor:
    """Return the library's logits of ids (B, T), whatever was read before;
    `first_token` replaces each first id.
    """
    if first_token is not None:
        ids = torch.cat((torch.full_like(ids[:, :1], first_token), ids[:, 1:]), dim=1)
    prepare(model, ids.shape[1])
    logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return logits


def prepare(model: Any, length: int) -> None:
    """Prepare a model for an input of this length, as if it had read none before."""
    restore(model)
    if model.config.model_type == "mpt":  # the length that its bias is built for
        model.config.max_seq_len = length


@functools.cache  # once, or masks would be narrowed twice
def _narrow_masks() -> None:
    """Make the library narrow its (T x T) masks where it builds them, so that a layer's
    own window is kept.
    """
    masks = transformers().AttentionMaskInterface
    for name in ("sdpa", "eager"):
        masks.register(name, functools.partial(_mask, masks()[name]))


def _mask(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the library's mask, in which a query sees only its window (itself
    included) and the first `sinks` keys.
    """
    window, sinks = _window.get()
    if window is None:
        return original(*args, **options)
    from transformers.masking_utils import and_masks, causal_mask_function

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key < window) | (key < sinks)

    visible = and_masks(options.pop("mask_function", causal_mask_function), near)
    return original(
        *args, **{**options, "mask_function": visible, "allow_is_causal_skip": False}
    )
