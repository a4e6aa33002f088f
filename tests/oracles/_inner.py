"""The oracle of the encoding inside a wrapper, for the oracles of wrappers."""

import importlib

from oracles import _attention

_ROPE = {"base": 10000.0, "layout": "interleaved"}
# Of the options that the oracles read.
_DEFAULTS = {
    "none": {},
    "p_rope": {**_ROPE, "fraction": 0.75},
    "rope": _ROPE,
    "sinusoidal": {**_ROPE, "combine": "add", "scale": "token"},
    "learned": {},
    "alibi": {"slopes": None},
    "t5": {"num_buckets": 32, "max_distance": 128},
    "kerple_log": {},
    "fire": {"threshold": "quarter"},
    "fox": {"gate_bias": 0.0},
    "shaw": {},
}


def known(options):
    """Options of the inner encoding, with its defaults."""
    return _DEFAULTS[options["inner"]] | options["inner_options"]


def parameter_count(shape, options):
    learned = getattr(importlib.import_module(f"oracles.{options['inner']}"), "parameter_count", None)
    return learned(shape, known(options)) if learned else 0


def found(parameters, shape, options, q, k, v, x, positions, layer, causal, at=0):
    """What the oracle of the inner encoding number `at` says, given its own parameters."""
    prefix = f"inners.{at}."
    own = {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}
    oracle = importlib.import_module(f"oracles.{options['inner']}")
    return oracle.reference(own, shape, known(options), q, k, v, x, positions, layer, causal)


def output_of(parameters, shape, options, q, k, v, x, positions, layer, causal):
    """The layer's output (B, H, T, Dh)."""
    said = found(parameters, shape, options, q, k, v, x, positions, layer, causal)
    return _attention.output_of(said, q, k, v, causal)
