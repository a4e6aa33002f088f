"""Stick-breaking: the plain form in fla."""

from oracles import third_party_file
from oracles.none import reads_positions

CASES = [
    {},
    {"attend_current": True},
    {"remainder": False},
    {"attend_current": True, "remainder": False},
]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    naive = third_party_file("fla", "ops/stickbreaking_attn/naive.py")
    output, rest = naive.naive_stickbreaking_attn(
        *(part.transpose(1, 2) for part in (q, k, v)), attend_current=options["attend_current"]
    )
    if options["remainder"]:
        output = output + rest[..., None] * v.transpose(1, 2)
    return {"output": output.transpose(1, 2)}
