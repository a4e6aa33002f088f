"""Shared by wrappers: encodings that contain other encodings.

Hooks on the whole model (positions, input) belong to the wrapper, which by default calls the inner encoding's. Hooks in
a layer are those of the encoding that `at` returns, so that a wrapped encoding keeps its cheap form.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from posbench import encodings
from posbench.encodings.base import Encoding, Layer, Shape, Stretch
from posbench.errors import OptionError, UserError

NO_OPTIONS: dict[str, Any] = {}


class Wrapper(Encoding):
    """Base of the encodings around others; a subclass adopts these, and its `at` returns the one that a layer uses."""

    def adopt(self, inners: Sequence[Encoding]) -> None:
        """Wrap these encodings: the wrapper takes on their parameters, hooks and maximum lengths."""
        self.inners = nn.ModuleList(inners)
        self.max_length = min((one.max_length for one in inners if one.max_length is not None), default=None)
        self.length_dependent = any(one.length_dependent for one in inners)
        self.history = frozenset().union(self.history, *(one.history for one in inners))
        self.whole_positions = any(one.whole_positions for one in inners)

    def around(self, inners: Sequence[Encoding]) -> Self:
        """A copy of the wrapper around other encodings; its own are not changed."""
        made = self.sharing()
        made.adopt(inners)
        return made

    @property
    def inner_encodings(self) -> list[Encoding]:
        return cast(list[Encoding], list(self.inners))

    @property
    def hooks(self) -> frozenset[str]:
        return frozenset().union(*(inner.hooks for inner in self.inner_encodings))

    def make_tables(self, positions: Tensor) -> list[Any]:
        """The tables of each inner encoding."""
        return [inner.make_tables(positions) for inner in self.inner_encodings]

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        return self.altered(*self.within(layer))

    def within(self, layer: Layer, which: int = 0) -> tuple[Encoding, Layer]:
        """What an inner encoding uses for a layer, as `at` returns it."""
        return self.inner_encodings[which].at(layer.replace(tables=layer.tables[which]))

    def altered(self, used: Encoding, layer: Layer, **hooks: Callable[..., Any]) -> tuple[Encoding, Layer]:
        """The inner encoding for a layer, with hooks overridden and windows combined."""
        if not hooks and self.window is None:
            return used, layer
        windows = [window for window in (self.window, used.window) if window is not None]
        made = used.sharing()
        # Other hooks stay bound to the inner encoding.
        own = {name: getattr(used, name) for name in used.overridden if name != "logit_scale"}
        vars(made).update(own | hooks, overridden=used.overridden | set(hooks), window=min(windows, default=None))
        return made, layer

    def before(
        self,
        layer: Layer,
        of_qk: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]],
        of_v: Callable[[Tensor, int], Tensor] | None = None,
    ) -> tuple[Encoding, Layer]:
        """The encoding of a layer where q and k (B, H, T, Dh), and maybe v, change before the inner encoding gets them.

        Args:
            of_qk, of_v: functions that change them, given the model's layer; heads may be repeated for groups.
        """
        used, within = self.within(layer)

        def given(hook: Callable[..., Any]) -> Callable[..., Any]:
            return lambda q, k, layer_within: hook(*of_qk(q, k, layer.index), layer_within)

        def valued(v: Tensor, layer_within: Layer) -> Tensor:
            return used.map_values(v if of_v is None else of_v(v, layer.index), layer_within)

        reading = {"rotate", *(used.hooks & {"prepare"})}
        hooks = {name: given(getattr(used, name)) for name in reading}
        return self.altered(used, within, **hooks, **({} if of_v is None else {"map_values": valued}))

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.inner_encodings[0].positions(ids, generator)

    def reached(self, inner: Encoding, stretch: Stretch) -> Stretch:
        """The lengths that an extension of the inner encoding goes by: its positions, or distances, end there."""
        return stretch

    def remarks(self) -> list[str]:
        return [remark for inner in self.inner_encodings for remark in inner.remarks()]

    def token_dim(self) -> int:
        return min(inner.token_dim() for inner in self.inner_encodings)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        # The encoding that concatenates comes first: the others add to the width that it makes.
        for inner in sorted(self.inner_encodings, key=lambda inner: inner.token_dim()):
            x = inner.embed(x, positions, ids)
        return x


class Repositioned(Wrapper):
    """Base of wrappers that replace the positions 0 .. T-1; all sequences of a batch share one draw."""

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        for one in self.inner_encodings:
            if "positions" in one.hooks:
                raise UserError(
                    f"encoding.inner is '{one.name}', which chooses positions itself: expected another, such as rope"
                )

    @property
    def hooks(self) -> frozenset[str]:
        return super().hooks | {"positions"}

    @staticmethod
    def stream(ids: Tensor, generator: torch.Generator | None) -> torch.Generator:
        """The generator for random positions; if none is given, every draw is the same."""
        return generator or torch.Generator(ids.device).manual_seed(0)


def build_inner(name: str, shape: Shape, options: Mapping[str, Any], key: str) -> Encoding:
    """Build an encoding for a wrapper; an error names the full key of its options, such as encoding.inner_options."""
    try:
        return encodings.build(name, shape, options)
    except OptionError as error:
        raise error.under(key) from None
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
