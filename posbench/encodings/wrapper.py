"""Wrappers: encodings around other encodings.

Hooks on the whole model (positions, input) are the wrapper's own and call those of the
inner encodings. Hooks in a layer are those of the encoding that `at` returns: the inner
one, perhaps with some hooks replaced (`Altered`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from posbench import encodings
from posbench.encodings.base import Encoding, Layer, Shape, Stretch, narrower
from posbench.errors import OptionError, UserError

NO_OPTIONS: dict[str, Any] = {}


class Altered(Encoding):
    """An inner encoding of one layer, with other hooks or a narrower window."""

    def __init__(
        self,
        inner: Encoding,
        window: int | None,
        replaced: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__(inner.shape)
        self.inner, self.name = inner, inner.name
        # the encoding before any change
        self.core: Encoding = core_of(inner)
        self.window = narrower(window, inner.window)
        hooks = {hook: getattr(inner, hook) for hook in inner.hooks - {"logit_scale"}}
        vars(self).update(hooks | dict(replaced))
        self.overridden = inner.hooks | replaced.keys()

    @property
    def logit_scale(self) -> float:
        return self.inner.logit_scale


class Wrapper(Encoding):
    """Base of the encodings around others. A subclass calls `wrap`, or `adopt`, at the
    end of its constructor.
    """

    adds: tuple[str, ...] = ()  # its hooks in addition to those of the inner encodings

    def wrap(
        self, inner: str, options: Mapping[str, Any], shape: Shape | None = None
    ) -> None:
        """Build the inner encoding, for another shape if one is given, and adopt it."""
        key = "encoding.inner_options"
        self.adopt([build_inner(inner, shape or self.shape, options, key)])

    def adopt(self, inners: Sequence[Encoding]) -> None:
        """Take on the parameters and the limits of these encodings."""
        self.inners = nn.ModuleList(inners)
        self.max_length = None
        for inner in inners:
            self.max_length = narrower(self.max_length, inner.max_length)
            self.history = self.history | inner.history
        self.length_dependent = any(inner.length_dependent for inner in inners)
        self.whole_positions = any(inner.whole_positions for inner in inners)

    def around(self, inners: Sequence[Encoding]) -> Self:
        copied = self.sharing()
        copied.adopt(inners)
        return copied

    @property
    def inner_encodings(self) -> list[Encoding]:
        return cast(list[Encoding], list(self.inners))

    @property
    def hooks(self) -> frozenset[str]:
        of_inners = (inner.hooks for inner in self.inner_encodings)
        return frozenset(self.adds).union(*of_inners)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)
        return self.altered(inner), inner_layer

    def within(self, layer: Layer, which: int = 0) -> tuple[Encoding, Layer]:
        """Return what `at` of an inner encoding returns for a layer."""
        return self.inner_encodings[which].at(layer.replace(tables=layer.tables[which]))

    def altered(self, inner: Encoding, **replaced: Callable[..., Any]) -> Encoding:
        """Return the inner encoding of a layer with these hooks in place of its own,
        under the wrapper's window.
        """
        if not replaced and self.window is None:
            return inner
        return Altered(inner, self.window, replaced)

    def reached(self, inner: Encoding, stretch: Stretch) -> Stretch:
        """Return the lengths that an extension of the inner encoding uses."""
        return stretch

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.inner_encodings[0].positions(ids, generator)

    def make_tables(self, positions: Tensor) -> list[Any]:
        return [inner.make_tables(positions) for inner in self.inner_encodings]

    def token_dim(self) -> int:
        return min(inner.token_dim() for inner in self.inner_encodings)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        # The encoding that concatenates comes first: the others add to the width that
        # it makes.
        for inner in sorted(self.inner_encodings, key=lambda inner: inner.token_dim()):
            x = inner.embed(x, positions, ids)
        return x


def build_inner(
    name: str, shape: Shape, options: Mapping[str, Any], key: str
) -> Encoding:
    """Build an encoding for a wrapper; an error names the full key of its options, such
    as encoding.inner_options.
    """
    try:
        return encodings.build(name, shape, options)
    except OptionError as error:
        raise error.under(key) from None


def build_entry(entry: Mapping[str, Any], shape: Shape, key: str) -> Encoding:
    options = dict(entry)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"{key} is {entry}: expected a name, such as {{name: rope}}")
    return build_inner(name, shape, options, key)


def core_of(encoding: Encoding) -> Encoding:
    """Return an encoding as it was before a wrapper altered it."""
    if isinstance(encoding, Altered):
        return encoding.core
    return encoding


def refuse_attend(wrapper: Wrapper, inner: str) -> None:
    """Raise UserError for an encoding inside that has no softmax to be changed."""
    if "attend" in wrapper.inner_encodings[0].hooks:
        raise UserError(
            f"encoding.inner is '{inner}', which replaces the softmax: expected"
            " another, such as rope"
        )
