"""Context extensions of rotary models in transformers, as configurations for the library.

`posbench.encodings.extend` defines what an extension does. This module turns it into `rope_parameters` and checks that
transformers then rotates by the same frequencies, in every rotary module and for every kind of layer.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posbench import encodings
from posbench.encodings._rotary import Rotary
from posbench.encodings.base import Shape
from posbench.encodings.extend import methods
from posbench.errors import Undefined
from posbench.huggingface import spelling
from posbench.huggingface.spelling import Parameters

_TOLERANCE = 1e-5  # of cosines and sines: the library's frequencies are fp32
_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Turns:
    """The rotation that the rotary module of one kind of layer must return."""

    rope: Rotary
    layers: str | None  # the kind of layer, if the model has several bases; None: all


def extended(
    config: Any, method: str, length: int, train_length: int, options: dict[str, Any], every_length: bool = False
) -> "Extension":
    """An extension of a rotary model.

    Layers with a sliding window and a separate base are unchanged: they meet no new distances.

    Args:
        every_length: the model will read other lengths, too: LongRoPE keeps its set for those up to the training
            length. Otherwise it has one set, that of this length.

    Raises:
        UserError: unknown method or a wrong option.
        Undefined: the library has no configuration for it, or the model was stretched before.
    """
    (layers, parameters), *others = sorted(_parts(config), key=lambda part: part[0] != "full_attention")
    plain = _rope(config, parameters, train_length)
    made, facts = methods.extended(plain, method, length, train_length, **options)
    if parameters["rope_type"] != "default":
        raise Undefined(f"its RoPE is already extended (type '{parameters['rope_type']}')")
    if method not in SPELT or facts.get("ramp") != _RAMPS.get(method):
        kind = f"{method} with ramp={facts['ramp']}" if method in SPELT else method
        raise Undefined(f"transformers has no configuration for '{kind}': expected {', '.join(SPELT)}")
    assert isinstance(made, Rotary)  # all methods that transformers knows change frequencies
    short = (
        methods.extended(plain, method, train_length, train_length, **options)[0]
        if every_length and method == "longrope"
        else made
    )
    assert isinstance(short, Rotary)
    spelt = {**parameters, **_spelt(method, plain, made, short, facts, train_length)}
    new = copy.deepcopy(config)
    new.max_position_embeddings = train_length  # the starting length of the library's `dynamic`
    new.rope_parameters = spelt if layers is None else {**new.rope_parameters, layers: spelt}
    kept = [
        Turns(_rope(config, their, train_length), name) for name, their in others if their["rope_type"] == "default"
    ]
    return Extension(new, [Turns(made, layers), *kept], {**facts, "rope_parameters": spelt})


@dataclasses.dataclass(frozen=True)
class Extension:
    """An extended model before it is built."""

    config: Any
    turns: list[Turns]
    facts: dict[str, Any]


def difference(model: nn.Module, turns: list[Turns], length: int) -> float:
    """The largest error of a model's rotary modules at position 1, in cosines and sines; `length` of the input.

    Or a tenth of the largest relative error of an angle, which tells the slow pairs apart.
    """
    positions = torch.tensor([[1, length - 1]])
    found = [0.0]
    for rotary in modules(model):
        device = next(buffer.device for _, buffer in rotary.named_buffers())
        for each in turns:
            kind = () if each.layers is None else (each.layers,)
            with torch.no_grad():
                given = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions.to(device), *kind)
            angle, factor = each.rope.inv_freq(_CPU), each.rope.attention_factor
            wanted = torch.cat([angle.cos(), angle.sin()]) * factor
            halves = [part[0, 0, : len(angle)].cpu().double() for part in given]  # each number stands there twice
            found.append(_error(torch.cat(halves), wanted))
    return max(found)


def _error(given: Tensor, wanted: Tensor) -> float:
    """Of cosines and sines (2 * pairs,), as `difference` has it."""
    if given.shape != wanted.shape:
        return math.inf
    turned, angle = (torch.atan2(sin, cos) for cos, sin in (given.chunk(2), wanted.chunk(2)))
    relative = ((turned - angle).abs() / angle.abs().clamp_min(1e-9)).max()
    return float(torch.maximum((given - wanted).abs().max(), relative / 10))


def agrees(model: nn.Module, turns: list[Turns], length: int) -> bool:
    """Whether the model has rotary modules and all of them turn as required."""
    return bool(list(modules(model))) and difference(model, turns, length) <= _TOLERANCE


def modules(model: nn.Module) -> Iterator[nn.Module]:
    """The rotary modules of a model."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            yield module


def restore(model: nn.Module) -> None:
    """Reset state from earlier inputs: `dynamic` keeps the frequencies of the longest one."""
    for rotary in modules(model):
        for name, original in list(rotary.named_buffers()):
            if name.endswith("original_inv_freq"):
                prefix = name.removesuffix("original_inv_freq")
                setattr(rotary, f"{prefix}inv_freq", original.clone())
                if hasattr(rotary, f"{prefix}max_seq_len_cached"):
                    setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def exchanged(model: nn.Module, config: Any) -> nn.Module:
    """A copy that shares all weights, with the rotary modules of another configuration."""
    made = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for parent in list(made.modules()):
        for name, rotary in list(parent.named_children()):
            if type(rotary).__name__.endswith("RotaryEmbedding"):
                device = next(rotary.buffers()).device
                setattr(parent, name, type(rotary)(config=config).to(device))
    return made


def rebuilt(model: nn.Module, config: Any) -> nn.Module:
    """Only the rotary modules of a model, built from another configuration; needs no weights."""
    return nn.ModuleList([type(module)(config=config) for module in modules(model)])


def _parts(config: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """The rope_parameters per kind of rotary layer; the kind is None if there is only one."""
    parameters: dict[str, Any] = config.rope_parameters
    if "rope_type" in parameters:
        return [(None, parameters)]
    used = set(config.layer_types)
    return [(layers, parameters[layers]) for layers in sorted(used) if isinstance(parameters.get(layers), dict)]


def _rope(config: Any, parameters: dict[str, Any], train_length: int) -> Rotary:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turning = int(width * parameters.get("partial_rotary_factor", 1.0))
    shape = Shape(d_model=turning, n_heads=1, n_layers=1, train_length=train_length)
    made = encodings.build("rope", shape, {"base": float(parameters["rope_theta"]), "layout": "half"})
    assert isinstance(made, Rotary)
    return made


# -- how the library spells them ---------------------------------------------------------------------------------------

SPELT = ("pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "abf")
_RAMPS = {"ntk_by_parts": "index", "yarn": "index", "llama3": "rotations"}  # the only one that the library has


def _spelt(
    method: str, plain: Rotary, made: Rotary, short: Rotary, facts: dict[str, Any], train_length: int
) -> Parameters:
    """The `rope_parameters` of one of `SPELT`; `short`: as made for inputs up to the training length."""
    base, factor = plain.base, facts.get("factor", 1.0)
    match method:
        case "pi":
            return spelling.linear(base, factor)
        case "ntk":
            return spelling.larger_base(base, factor, plain.width)
        case "dynamic_ntk":
            return spelling.dynamic(base, factor) | {"original_max_position_embeddings": train_length}
        case "abf":
            return spelling.default(facts["base"])
        case "llama3":
            slow, fast = facts["low_freq_factor"], facts["high_freq_factor"]
            return spelling.llama3(base, factor, slow=slow, fast=fast, original=train_length)
        case "longrope":
            divisors = {
                name: plain.inv_freq(_CPU) / one.inv_freq(_CPU) for name, one in (("short", short), ("long", made))
            }
            scale = made.attention_factor
            return spelling.longrope(base, factor, **divisors, attention_factor=scale, original=train_length)
    slow, fast, scale = facts["alpha"], facts["beta"], made.attention_factor
    return spelling.yarn(base, factor, slow=slow, fast=fast, attention_factor=scale, original=train_length)
