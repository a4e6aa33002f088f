"""Schemes that look at the texts of tokens: plain loops over these, and the oracle of
the encoding inside.
"""

import math

import torch

from oracles._shared import ROPE_TOLERANCE, inner
from oracles.distance import EVERYWHERE, distances, slopes_of


class abacus:
    VOCABULARY = ("1", "2", "+", "3", "12", "0", " 9", "8", "")
    CASES = [
        {},
        {"inner": "rope", "rows": 9, "max_offset": 4},
        {"rows": 3, "max_offset": 0},
    ]
    PARTLY_UNUSED = "rows of the table beyond the longest number"
    TOLERANCE = ROPE_TOLERANCE

    def parameter_count(shape, options):
        return options["rows"] * shape.d_model

    def reads_positions(options):
        return options["inner"] != "none"

    def reference(
        parameters, shape, options, q, k, v, x, positions, layer, causal, ids
    ):
        rows = []
        for row in ids.tolist():
            rows.append([])
            for token in row:
                digit = abacus.VOCABULARY[token] in ("0", "1", "2", "3", "8")
                rows[-1].append(
                    (rows[-1][-1] if len(rows[-1]) else 0) + 1 if digit else 0
                )
        table = parameters["table"][torch.tensor(rows).clamp(max=options["rows"] - 1)]
        return {
            "embedded": x + table,
            **inner(parameters, shape, options, q, k, v, x, positions, layer, causal),
        }


class coupling:
    VOCABULARY = ("<|endoftext|>", "1", "2", "+", "=", "3", "a", "x=")
    CASES = [
        {},
        {"answer": "plain", "inner": "rope"},
        {"answer": "plain", "longer": 0, "max_position": 6},
    ]
    PARTLY_UNUSED = "rows of the table beyond the longest problem"
    TOLERANCE = ROPE_TOLERANCE
    reads_positions = abacus.reads_positions

    def last_of(shape, options):
        return (
            2 * shape.train_length
            if options["max_position"] is None
            else options["max_position"]
        )

    def parameter_count(shape, options):
        return (coupling.last_of(shape, options) + 1) * shape.d_model

    def reference(
        parameters, shape, options, q, k, v, x, positions, layer, causal, ids
    ):
        numbers = [
            coupled([coupling.VOCABULARY[token] for token in row], options)
            for row in ids.tolist()
        ]
        table = parameters["table"][
            torch.tensor(numbers).clamp(max=coupling.last_of(shape, options))
        ]
        return {
            "embedded": x + table,
            **inner(parameters, shape, options, q, k, v, x, positions, layer, causal),
        }


def coupled(tokens, options):
    """Return the position of each token."""
    begin = 2 if options["answer"] == "reversed" else 2 + options["longer"]
    # `size`: tokens of the part so far; `following`: an answer's next position
    numbers = []
    size = 0
    following = None
    for text in tokens:
        if text == "<|endoftext|>":
            numbers.append(0)
            size, following = 0, None
        elif text == "=":
            following = size + 2 if options["answer"] == "reversed" else 1
            numbers.append(following)
            size = 1
        elif following is not None and size > 0:
            following += -1 if options["answer"] == "reversed" else 1
            numbers.append(max(1, following))
            size += 1
        else:
            following = None
            numbers.append(begin + size)
            size += 1
        if text == "+":
            size, following = 0, None
    return numbers


class bipe:
    VOCABULARY = ("a", ".", "b", "\n", " .", "b.", "\n\n", "!")
    CASES = [
        {},
        {"separators": ["!", "\n\n"]},
        {"inner": "alibi"},
        {"inner": "alibi", "alibi_factor": 2.0},
    ]
    PARTLY_UNUSED = "rows of the table beyond the longest segment"
    TOLERANCE = ROPE_TOLERANCE
    # which tokens end a segment
    ENDS = {(".", "\n"): {".", "\n", " ."}, ("!", "\n\n"): {"!", "\n\n"}}

    def parameter_count(shape, options):
        return shape.train_length * shape.d_model

    def reference(
        parameters, shape, options, q, k, v, x, positions, layer, causal, ids
    ):
        segments = []
        places = []
        for row in ids.tolist():
            segment = place = 0
            segments.append([])
            places.append([])
            for token in row:
                segments[-1].append(segment)
                places[-1].append(place)
                ends = bipe.VOCABULARY[token] in bipe.ENDS[tuple(options["separators"])]
                segment, place = (segment + 1, 0) if ends else (segment, place + 1)
        out = {
            "positions": torch.tensor(segments),
            "embedded": x + parameters["table"][torch.tensor(places)],
        }
        if options["inner"] == "rope":
            return out | inner(
                parameters, shape, options, q, k, v, x, positions, layer, causal
            )
        slopes = options["alibi_factor"] * torch.tensor(slopes_of(shape.n_heads))
        return out | {
            "bias": -slopes[:, None, None] * distances(positions).abs()[:, None]
        }


class rope_2d:
    VOCABULARY = ("a", "\n", " b", "c\n\n", ".")
    CASES = [{}, {"layout": "interleaved", "base": 500.0}]
    DTYPE = torch.float64
    POSITIONS = EVERYWHERE

    def reference(
        parameters, shape, options, q, k, v, x, positions, layer, causal, ids
    ):
        numbers = []
        for row in ids.tolist():
            line = place = 0
            numbers.append([])
            for token in row:
                numbers[-1].append(line * 2**20 + place)
                place += 1
                if breaks := rope_2d.VOCABULARY[token].count("\n"):
                    line = line + breaks
                    place = 0
        two = [turned_2d(a, positions, shape, options) for a in (q, k)]
        return {"positions": torch.tensor(numbers), "q": two[0], "k": two[1]}


def turned_2d(a, positions, shape, options):
    half = shape.head_dim // 2
    quarter = shape.head_dim // 4
    out = a.clone()
    for b, row in enumerate(positions.expand(len(a), -1).tolist()):
        for t, number in enumerate(row):
            line, place = divmod(number, 2**20)
            for pair in range(half):
                axis, p = (line, pair) if pair < quarter else (place, pair - quarter)
                angle = axis * options["base"] ** (-p / quarter)
                one, two = (
                    (pair, pair + half)
                    if options["layout"] == "half"
                    else (2 * pair, 2 * pair + 1)
                )
                first = a[b, :, t, one]
                second = a[b, :, t, two]
                out[b, :, t, one] = math.cos(angle) * first - math.sin(angle) * second
                out[b, :, t, two] = math.sin(angle) * first + math.cos(angle) * second
    return out
