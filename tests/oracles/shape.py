"""The oracle of the inner encoding, at whatever positions; test_wrappers.py looks at the draws."""

import dataclasses
import importlib

from oracles._attention import output_of

_DEFAULTS = {
    "sinusoidal": {"base": 10000.0, "layout": "interleaved", "combine": "add", "scale": "token"},
    "learned": {},
    "t5": {"num_buckets": 32, "max_distance": 128},
}
CASES = [{}, {"inner": "learned", "shift": 9}, {"inner": "t5", "inner_options": {"num_buckets": 8}, "shift": 40}]
PARTLY_UNUSED = "rows of the table beyond the input"
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # sinusoidal's, by transformers' fp32 angles


def parameter_count(shape, options):
    inner = importlib.import_module(f"oracles.{options['inner']}")
    reached = dataclasses.replace(shape, train_length=shape.train_length + options["shift"])
    return inner.parameter_count(reached, options["inner_options"]) if hasattr(inner, "parameter_count") else 0


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    inner = importlib.import_module(f"oracles.{options['inner']}")
    own = {key.removeprefix("inners.0."): value for key, value in parameters.items()}
    reached = dataclasses.replace(shape, train_length=shape.train_length + options["shift"])
    found = inner.reference(own, reached, _DEFAULTS[options["inner"]] | options["inner_options"], q, k, v, x, positions,
                            layer, causal)  # fmt: skip
    return found if "embedded" in found else {"output": output_of(found, q, k, v, causal)}
