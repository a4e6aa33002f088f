"""Extensions of a model of transformers: its configuration with other RoPE, and a check
that a model rotates by it.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from posbench import encodings
from posbench.encodings import extend
from posbench.encodings.base import Shape
from posbench.encodings.rope import Rotary
from posbench.errors import Undefined
from posbench.rope.parameters import rope_parameters
from posbench.rope.reading import ropes
from posbench.rope.traced import factors, is_rotary

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
) -> Extension:
    """Return an extension of a rotary model; Undefined if the library has none, or if
    the model is already extended.

    Layers with a sliding window and a base of their own are unchanged: they meet no new
    distances. Frequencies are those of `length` for all inputs.
    """
    if not getattr(config, "rope_parameters", None):
        # raises the error of a mistyped method
        extended_rope(plain_rope(2, 1e4, train_length), method, length, options)
        raise Undefined(
            f"{config.model_type} has no rotary encoding: transformers extends only"
            " these"
        )
    read = {rope.key: rope for rope in ropes(config)}
    # of one base and width per kind of layer, as if nothing were extended
    rotations = {
        layers: plain_rope(rope.width, rope.base, train_length)
        for layers, rope in read.items()
    }
    layers = "full_attention" if "full_attention" in read else next(iter(read))
    # a mistyped method is told first
    extended, facts, parameters = extended_rope(
        rotations[layers], method, length, options
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

    rotations[layers] = extended
    for kind, rope in read.items():
        if rope.type != "default":  # not extended here, and not by plain RoPE's law
            del rotations[kind]
    return Extension(new_config, rotations, {**facts, "rope_parameters": stretched})


def extended_rope(
    plain: Rotary,
    method: str,
    length: int,
    options: Mapping[str, Any],
) -> tuple[Rotary, dict[str, Any], dict[str, Any]]:
    """Return an extension of plain RoPE, facts for result rows, and its
    `rope_parameters`; Undefined if transformers has none.
    """
    train_length = plain.shape.train_length
    extended, facts = extend.extend_encoding(
        plain, method, length, train_length, **options
    )
    if "inv_freq_after" not in facts:  # it changes more than frequencies
        raise Undefined(f"transformers has no configuration for '{method}'")

    name = method
    settings = facts
    if method == "dynamic_ntk":
        factor = facts["factor"]
        now = factor * length / train_length - (factor - 1)
        name = "ntk"
        settings = facts | {"factor": max(1.0, now)}
    rope = cast(Rotary, extended)
    f = rope.inv_freq()
    parameters = rope_parameters(name, settings, plain, f, f, train_length)
    return rope, facts, parameters


def plain_rope(width: int, base: float, train_length: int) -> Rotary:
    """Return plain RoPE of a number of channels, in the layout of transformers."""
    shape = Shape(d_model=width, n_heads=1, n_layers=1, train_length=train_length)
    options = {"base": base, "layout": "half"}
    return cast(Rotary, encodings.build("rope", shape, options))


def extend_model(model: nn.Module, extension: Extension, length: int) -> Any:
    """Return a model with an extension's RoPE that shares all weights; Undefined if the
    library's RoPE differs.
    """
    shared = {id(weight): weight for weight in model.parameters()}
    copied = copy.deepcopy(model, shared)
    for parent in [*copied.modules()]:
        for name, module in [*parent.named_children()]:
            if is_rotary(module):
                device = next(module.buffers()).device
                rotary = type(module)(config=extension.config)
                setattr(parent, name, rotary.to(device))
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
    modules = [module for module in model.modules() if is_rotary(module)]
    for module in modules:
        for layers, rope in rotations.items():
            found = _factors(module, layers, length, rope.width // 2)
            if found is None or not _are_those_of(rope, found):
                return False
    return bool(modules)


@torch.no_grad()
def _factors(
    module: nn.Module, layers: str | None, length: int, n_pairs: int
) -> Tensor | None:
    """Return the complex factors (P,) by which a rotary module turns the pairs at
    position 1 of an input; None if it has fewer.
    """
    device = next(module.buffers()).device
    positions = torch.tensor([[1, length - 1]], device=device)
    kinds = [layers] if layers else []
    made = module(torch.zeros(1, device=device), positions, *kinds)
    found = factors(made)
    if len(found) < n_pairs:
        return None
    return found[:n_pairs].cpu()


def _are_those_of(rope: Rotary, factors: Tensor) -> bool:
    angles = rope.inv_freq()
    expected = rope.attention_factor * torch.polar(torch.ones_like(angles), angles)
    # a slow pair's angle is far below the tolerance of its cosine and sine
    relative = (factors.angle() - angles).abs() / angles.clamp_min(1e-9)
    is_close = (factors - expected).abs() <= _TOLERANCE
    return bool(is_close.all() and (relative <= 10 * _TOLERANCE).all())
