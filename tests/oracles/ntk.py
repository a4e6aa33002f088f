"""x-transformers' frequencies (base_rescale_factor), turned by transformers."""

from oracles import third_party
from oracles._transformers import TOLERANCE, rotated

CASES = [{}, {"layout": "half", "factor": 2.5, "base": 500.0}]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    x_transformers = third_party("x_transformers.x_transformers")
    rescaled = x_transformers.RotaryEmbedding(
        shape.head_dim, base=options["base"], base_rescale_factor=options["factor"]
    )
    return rotated(q, k, positions, options["layout"], rescaled.inv_freq)
