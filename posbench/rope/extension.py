"""Extensions of a model of transformers: its configuration with other RoPE, and a check
that a model rotates by it.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from posbench import encodings
from posbench.encodings import extend
from posbench.encodings.base import Shape
from posbench.encodings.rope import Rotary
from posbench.errors import Undefined
from posbench.rope.parameters import rope_parameters
from posbench.rope.reading import is_rotary, ropes

# largest error of cosines and sines: the library's frequencies are fp32
_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Extension:
    """An extension of a model, before it is built."""

    config: Any  # the library's configuration
    # what rotary modules must return, by the kind of layer; None: all layers
    rotations: dict[str | None, Rotary]
    facts: dict[str, Any]


def extension(
    config: Any,
    method: str,
    length: int,
    train_length: int,
    options: dict[str, Any],
    every_length: bool = False,
) -> Extension:
    """Return an extension of a rotary model; Undefined if the library has none, or if
    the model is already extended.

    Layers with a sliding window and a base of their own are unchanged: they meet no new
    distances.

    `every_length`: whether frequencies follow the input's length. Otherwise they are
    those of `length` for all inputs.
    """
    if not getattr(config, "rope_parameters", None):
        # raises the error of a mistyped method
        extended_rope(plain_rope(2, 1e4, train_length), method, length, options)
        raise Undefined(
            f"{config.model_type} has no rotary encoding: transformers extends only"
            " these"
        )
    read = {rope.layers: rope for rope in ropes(config)}
    rotations = {
        layers: plain_rope(rope.width, rope.base, train_length)
        for layers, rope in read.items()
    }
    layers = "full_attention" if "full_attention" in read else next(iter(read))
    # a mistyped method is told first
    extended, facts, parameters = extended_rope(
        rotations[layers], method, length, options, every_length
    )
    if read[layers].type != "default":
        raise Undefined(f"its RoPE is already extended (type '{read[layers].type}')")

    stretched = {**read[layers].parameters, **parameters}
    if stretched["rope_type"] == "dynamic":  # a saved model has its training length
        stretched["original_max_position_embeddings"] = train_length
    new_config = copy.deepcopy(config)
    # the starting length of the library's `dynamic`
    new_config.max_position_embeddings = train_length
    new_config.rope_parameters = stretched
    if layers is not None:
        new_config.rope_parameters = {**config.rope_parameters, layers: stretched}
    unchanged = {
        kind: rope for kind, rope in rotations.items() if read[kind].type == "default"
    }
    return Extension(
        new_config,
        unchanged | {layers: extended},
        {**facts, "rope_parameters": stretched},
    )


def extended_rope(
    plain: Rotary,
    method: str,
    length: int,
    options: Mapping[str, Any],
    every_length: bool = False,
) -> tuple[Rotary, dict[str, Any], dict[str, Any]]:
    """Return an extension of plain RoPE, facts for result rows, and its
    `rope_parameters`; Undefined if transformers has none.
    """
    train_length = plain.shape.train_length
    extended, facts = extend.extend_encoding(
        plain, method, length, train_length, **options
    )
    if not isinstance(extended, Rotary):
        raise Undefined(f"transformers has no configuration for '{method}'")

    name = method
    settings = facts
    long = extended.inv_freq()
    short = long
    if every_length and method == "longrope":
        short_rope, _ = extend.extend_encoding(
            plain, method, train_length, train_length, **options
        )
        short = cast(Rotary, short_rope).inv_freq()
    elif not every_length and method == "dynamic_ntk":
        factor = facts["factor"]
        now = factor * length / train_length - (factor - 1)
        name = "ntk"
        settings = facts | {"factor": max(1.0, now)}
    parameters = rope_parameters(name, settings, plain, long, short, train_length)
    return extended, facts, parameters


def plain_rope(width: int, base: float, train_length: int) -> Rotary:
    """Return plain RoPE of a number of channels, in the layout of transformers."""
    shape = Shape(d_model=width, n_heads=1, n_layers=1, train_length=train_length)
    options = {"base": base, "layout": "half"}
    return cast(Rotary, encodings.build("rope", shape, options))


def extend_model(model: nn.Module, extension: Extension, length: int) -> Any:
    """Return a model with an extension's RoPE that shares all weights; Undefined if the
    library's RoPE differs.
    """
    copied = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for parent in list(copied.modules()):
        for name, module in list(parent.named_children()):
            if is_rotary(module):
                setattr(
                    parent,
                    name,
                    type(module)(config=extension.config).to(
                        next(module.buffers()).device
                    ),
                )
    if not turns_as(copied, extension.rotations, length):
        raise Undefined(
            "transformers computes other frequencies than the extension's definition"
        )
    return copied


def turns_as(
    model: nn.Module, rotations: Mapping[str | None, Rotary], length: int
) -> bool:
    """Return whether a model has rotary modules, and all have the right angles at
    position 1 for inputs of a length.
    """
    positions = torch.tensor([[1, length - 1]])
    modules = list(filter(is_rotary, model.modules()))
    for module in modules:
        device = next(module.buffers()).device
        for layers, rope in rotations.items():
            angles = rope.inv_freq()
            with torch.no_grad():
                parts = module(
                    torch.zeros(1, device=device),
                    positions.to(device),
                    *filter(None, [layers]),
                )
            # Llama 4 has complex numbers
            parts = (parts.real, parts.imag) if torch.is_tensor(parts) else parts
            # others have each twice
            step = 2 if torch.equal(parts[0][0, 0, ::2], parts[0][0, 0, 1::2]) else 1
            halves = [
                part[0, 0, ::step][: len(angles)].cpu().double() for part in parts
            ]
            actual, expected = (
                torch.complex(*halves),
                torch.polar(torch.ones_like(angles), angles),
            )
            expected = expected * rope.attention_factor
            if (
                actual.shape != expected.shape
                or (actual - expected).abs().max() > _TOLERANCE
            ):
                return False
            if (
                (actual.angle() - angles).abs() / angles.clamp_min(1e-9)
            ).max() > 10 * _TOLERANCE:
                return False
    return bool(modules)
