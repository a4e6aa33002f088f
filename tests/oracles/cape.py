"""Plain loops: sinusoids and ALiBi at positions that need not be whole; test_wrappers.py looks at the draws."""

import math

import torch

CASES = [
    {},
    {"inner_options": {"base": 100.0, "layout": "halves", "scale": 1.0}, "local_shift": 1.0},
    {"inner": "alibi", "inner_options": lambda shape: {"slopes": [1.5 - 0.25 * h for h in range(shape.n_heads)]}},
]
POSITIONS = ("consecutive", "offset", "gaps", "far", "fractional")


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    given = options["inner_options"]
    if options["inner"] == "alibi":
        rows = [
            [[[-slope * abs(i - j) for j in row] for i in row] for slope in given["slopes"]]
            for row in positions.tolist()
        ]
        return {"bias": torch.tensor(rows)}
    scale = given.get("scale", shape.token_rms)
    code = torch.zeros(*positions.shape, shape.d_model)
    for b, row in enumerate(positions.tolist()):
        for t, place in enumerate(row):
            for pair in range(shape.d_model // 2):
                angle = place * given.get("base", 10000.0) ** (-2 * pair / shape.d_model)
                halves = given.get("layout") == "halves"
                first, second = (pair, pair + shape.d_model // 2) if halves else (2 * pair, 2 * pair + 1)
                code[b, t, first], code[b, t, second] = math.sin(angle), math.cos(angle)
    return {"embedded": x + scale * code}
