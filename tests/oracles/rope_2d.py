"""Plain loops over the tokens of a text and over the pairs of a head, in fp64."""

import math

import torch

VOCABULARY = ("a", "\n", " b", "c\n\n", ".")
CASES = [{}, {"layout": "interleaved", "base": 500.0}]
DTYPE = torch.float64
POSITIONS = ("consecutive", "offset", "gaps", "far", "fractional")


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal, ids):
    numbers = []
    for row in ids.tolist():
        line = place = 0
        numbers.append([])
        for token in row:
            numbers[-1].append(line * 2**20 + place)
            place += 1
            if breaks := VOCABULARY[token].count("\n"):
                line, place = line + breaks, 0
    return {
        "positions": torch.tensor(numbers),
        **{name: turned(a, positions, shape, options) for name, a in (("q", q), ("k", k))},
    }


def turned(a, positions, shape, options):
    half, quarter = shape.head_dim // 2, shape.head_dim // 4
    out = a.clone()
    for b, row in enumerate(positions.expand(len(a), -1).tolist()):
        for t, number in enumerate(row):
            line, place = divmod(number, 2**20)
            for pair in range(half):
                axis, p = (line, pair) if pair < quarter else (place, pair - quarter)
                angle = axis * options["base"] ** (-p / quarter)
                one, two = (pair, pair + half) if options["layout"] == "half" else (2 * pair, 2 * pair + 1)
                first, second = a[b, :, t, one], a[b, :, t, two]
                out[b, :, t, one] = math.cos(angle) * first - math.sin(angle) * second
                out[b, :, t, two] = math.sin(angle) * first + math.cos(angle) * second
    return out
