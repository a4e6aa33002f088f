"""RoPE in transformers: the `rope_parameters` of encodings and extensions, and a check
that a model rotates by them.
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
from posbench.encodings.rope import Rotary, frequencies
from posbench.errors import Undefined
from posbench.huggingface.load import position_of

# largest error of cosines and sines: the library's frequencies are fp32
_TOLERANCE = 1e-5


def rope_parameters(
    name: str,
    options: Mapping[str, Any],
    rope: Rotary,
    long: Tensor,
    short: Tensor,
    original: int,
) -> dict[str, Any]:
    """Return the `rope_parameters` of a rotary encoding or of an extension of one;
    Undefined if a pair comes to a halt.

    Args:
        rope: the encoding that gives the base and the width.
        long, short: radians per position of each pair, for inputs above and up to the
            original length.
    """
    factor, scale, low, high = (
        options.get(key) for key in ("factor", "attention_factor", "alpha", "beta")
    )
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    stretched = plain | {"factor": factor, "original_max_position_embeddings": original}
    match name, options.get("ramp"):
        case "rope", _ if options.get("frequencies", "geometric") == "geometric":
            return plain
        case "abf", _:
            return plain | {"rope_theta": options["base"]}
        case "ntk", _:
            return plain | {
                "rope_theta": (
                    rope.base
                    * options["factor"] ** (rope.width / max(1, rope.width - 2))
                )
            }
        case (("pi" | "dynamic_ntk"), _):
            return plain | {
                "rope_type": "linear" if name == "pi" else "dynamic",
                "factor": factor,
            }
        case (("yarn" | "ntk_by_parts"), "index"):
            return stretched | {
                "rope_type": "yarn",
                "beta_slow": low,
                "beta_fast": high,
                "attention_factor": scale,
            }
        case (("llama3" | "ntk_by_parts"), _):
            low, high = (
                options.get("low_freq_factor", low),
                options.get("high_freq_factor", high),
            )
            return stretched | {
                "rope_type": "llama3",
                "low_freq_factor": low,
                "high_freq_factor": high,
            }
    if not bool((torch.minimum(long, short) > 0).all()):
        raise Undefined(
            f"transformers has no configuration for '{name}': a pair comes to a halt"
        )
    # LongRoPE can express any frequencies, by a divisor for each pair
    base = frequencies(rope.width, rope.base)
    divisors = {
        "short_factor": (base / short).tolist(),
        "long_factor": (base / long).tolist(),
    }
    return stretched | {"rope_type": "longrope", **divisors, "attention_factor": scale}


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

    Its frequencies are those of `length` for all inputs. Layers with a sliding window
    and a base of their own are unchanged: they meet no new distances.
    """
    if position_of(config) != "rope":
        plain = encodings.build(
            "rope", Shape(d_model=2, n_heads=1, n_layers=1, train_length=train_length)
        )
        # raises the error of a mistyped method
        extend.extend_encoding(plain, method, length, train_length, **options)
        raise Undefined(
            f"{config.model_type} has no rotary encoding: transformers extends only"
            " these"
        )
    parts: dict[str | None, Any] = {None: config.rope_parameters}
    if "rope_type" not in parts[None]:
        parts = {
            kind: part
            for kind, part in sorted(parts[None].items())
            if part and kind in config.layer_types
        }
    layers = "full_attention" if "full_attention" in parts else next(iter(parts))
    rotations = {
        kind: _rotary(config, part, train_length) for kind, part in parts.items()
    }
    parameters, plain = parts[layers], rotations[layers]
    extended, facts = extend.extend_encoding(
        plain, method, length, train_length, **options
    )
    if parameters["rope_type"] != "default":
        raise Undefined(
            f"its RoPE is already extended (type '{parameters['rope_type']}')"
        )
    if not isinstance(extended, Rotary):
        raise Undefined(f"transformers has no configuration for '{method}'")
    name = method
    settings = facts
    if method == "dynamic_ntk":  # at one length it is NTK with that length's factor
        factor = facts["factor"]
        at_length = max(1.0, factor * length / train_length - (factor - 1))
        name, settings = "ntk", facts | {"factor": at_length}
    inv_freq = extended.inv_freq()
    stretched = parameters | rope_parameters(
        name, settings, plain, inv_freq, inv_freq, train_length
    )
    new_config = copy.deepcopy(config)
    new_config.rope_parameters = (
        stretched if layers is None else {**config.rope_parameters, layers: stretched}
    )
    rotations = {
        kind: rope
        for kind, rope in rotations.items()
        if parts[kind]["rope_type"] == "default"
    }
    return Extension(
        new_config,
        rotations | {layers: extended},
        {**facts, "rope_parameters": stretched},
    )


def _rotary(config: Any, parameters: dict[str, Any], train_length: int) -> Rotary:
    """Return plain RoPE with a model's base and width."""
    width = (
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    width = int(width * parameters.get("partial_rotary_factor", 1.0))
    shape = Shape(d_model=width, n_heads=1, n_layers=1, train_length=train_length)
    return cast(
        Rotary,
        encodings.build(
            "rope", shape, {"base": float(parameters["rope_theta"]), "layout": "half"}
        ),
    )


def extend_model(model: nn.Module, extension: Extension, length: int) -> Any:
    """Return a model with an extension's RoPE that shares all weights; Undefined if the
    library's RoPE differs.
    """
    copied = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for parent in list(copied.modules()):
        for name, module in list(parent.named_children()):
            if _is_rotary(module):
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
    modules = list(filter(_is_rotary, model.modules()))
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


def restore(model: nn.Module) -> None:
    """Reset what earlier inputs left behind: `dynamic` keeps the frequencies of the
    longest one.
    """
    for rotary in filter(_is_rotary, model.modules()):
        for name, original in list(rotary.named_buffers()):
            if name.endswith("original_inv_freq"):
                prefix = name.removesuffix("original_inv_freq")
                setattr(rotary, f"{prefix}inv_freq", original.clone())
                if hasattr(rotary, f"{prefix}max_seq_len_cached"):
                    setattr(
                        rotary,
                        f"{prefix}max_seq_len_cached",
                        rotary.original_max_seq_len,
                    )


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")
