"""The oracle of the encoding inside a wrapper, for the oracles of wrappers."""

import importlib

from oracles import _attention

_DEFAULTS = {
    "rope": {"base": 10000.0, "layout": "interleaved"},
    "none": {},
    "alibi": {"slopes": None},
    "fox": {"gate_bias": 0.0},
    "shaw": {},
}


def known(options):
    """Options of the inner encoding, with its defaults."""
    return _DEFAULTS[options["inner"]] | options["inner_options"]


def parameter_count(shape, options):
    learned = getattr(importlib.import_module(f"oracles.{options['inner']}"), "parameter_count", None)
    return learned(shape, known(options)) if learned else 0


def found(parameters, shape, options, q, k, v, x, positions, layer, causal):
    """What the inner oracle says, given its own parameters."""
    own = {key.removeprefix("inners.0."): value for key, value in parameters.items() if key.startswith("inners.0.")}
    oracle = importlib.import_module(f"oracles.{options['inner']}")
    return oracle.reference(own, shape, known(options), q, k, v, x, positions, layer, causal)


def output_of(parameters, shape, options, q, k, v, x, positions, layer, causal):
    """The layer's output (B, H, T, Dh)."""
    said = found(parameters, shape, options, q, k, v, x, positions, layer, causal)
    return _attention.output_of(said, q, k, v, causal)
