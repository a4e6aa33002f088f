"""The oracle of the inner encoding, which is shown whatever positions were drawn."""

import dataclasses
import importlib

from oracles._attention import output_of

_DEFAULTS = {"rope": {"base": 10000.0, "layout": "interleaved"}, "t5": {"num_buckets": 32, "max_distance": 128}}
CASES = [
    {},
    {"inner": "t5", "inner_options": {"num_buckets": 8, "max_distance": 20}},
    {"max_length": lambda shape: shape.train_length},
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles


def parameter_count(shape, options):
    inner = importlib.import_module(f"oracles.{options['inner']}")
    return inner.parameter_count(shape, options["inner_options"]) if hasattr(inner, "parameter_count") else 0


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    inner = importlib.import_module(f"oracles.{options['inner']}")
    own = {key.removeprefix("inners.0."): value for key, value in parameters.items()}
    reached = dataclasses.replace(shape, train_length=options["max_length"] or 16 * shape.train_length)
    found = inner.reference(own, reached, _DEFAULTS[options["inner"]] | options["inner_options"], q, k, v, x, positions,
                            layer, causal)  # fmt: skip
    return {"output": output_of(found, q, k, v, causal)}
