"""The raw index along a direction, or in a channel of its own: plain loops."""

import torch

CASES = [
    {},
    {"direction": "ones", "scale": 1.0},
    {"direction": "learned", "scale": 0.5},
    {"combine": "concat", "scale": 2.0},
]
UNCHECKED = "direction: random (a test in test_schemes.py says what it is)"


def parameter_count(shape, options):
    return shape.d_model if options["direction"] == "learned" else 0


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    return {"embedded": embedded(x, positions.tolist(), parameters, shape, options)}


def embedded(x, numbers, parameters, shape, options):
    """x with `numbers` (1|B lists of T) put along the direction; shared with the min-max oracle."""
    scale = shape.token_rms if options["scale"] == "token" else options["scale"]
    rows = []
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            number = scale * numbers[b % len(numbers)][i]
            if options["combine"] == "concat":
                rows.append(torch.cat([x[b, i, : shape.d_model - 1], x.new_tensor([number])]))
            elif options["direction"] == "learned":
                rows.append(x[b, i] + number * parameters["u"])
            else:
                first = [1.0] + [0.0] * (shape.d_model - 1)
                rows.append(x[b, i] + number * x.new_tensor(first if options["direction"] == "first" else 1.0))
    return torch.stack(rows).view(x.shape[0], x.shape[1], shape.d_model)
