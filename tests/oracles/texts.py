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

    def reference(parameters, options, x, ids, **others):
        rows = torch.zeros_like(ids)
        for b, sequence in enumerate(ids.tolist()):
            place = 0
            for t, token in enumerate(sequence):
                is_digit = abacus.VOCABULARY[token] in ("0", "1", "2", "3", "8")
                place = place + 1 if is_digit else 0
                rows[b, t] = place
        out = inner(parameters, options, x=x, **others)
        last = options["rows"] - 1
        rows = rows.clamp(max=last)
        out["embedded"] = x + parameters["table"][rows]
        return out


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
        if options["max_position"] is None:
            return 2 * shape.train_length
        return options["max_position"]

    def parameter_count(shape, options):
        return (coupling.last_of(shape, options) + 1) * shape.d_model

    def reference(parameters, shape, options, x, ids, **others):
        numbers = []
        for sequence in ids.tolist():
            texts = [coupling.VOCABULARY[token] for token in sequence]
            numbers.append(coupled(texts, options))
        last = coupling.last_of(shape, options)
        rows = torch.tensor(numbers).clamp(max=last)
        out = inner(parameters, options, shape=shape, x=x, **others)
        out["embedded"] = x + parameters["table"][rows]
        return out


def coupled(tokens, options):
    """Return the position of each token."""
    is_reversed = options["answer"] == "reversed"
    begin = 2 if is_reversed else 2 + options["longer"]
    step = -1 if is_reversed else 1
    numbers = []
    size = 0  # tokens of the part so far
    following = None  # an answer's next position
    for text in tokens:
        if text == "<|endoftext|>":
            numbers.append(0)
            size = 0
            following = None
        elif text == "=":
            following = size + 2 if is_reversed else 1
            numbers.append(following)
            size = 1
        elif following is not None and size > 0:
            following += step
            numbers.append(max(1, following))
            size += 1
        else:
            following = None
            numbers.append(begin + size)
            size += 1
        if text == "+":
            size = 0
            following = None
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

    def reference(parameters, shape, options, x, positions, ids, **others):
        ends = bipe.ENDS[tuple(options["separators"])]
        segments = torch.zeros_like(ids)
        places = torch.zeros_like(ids)
        for b, sequence in enumerate(ids.tolist()):
            segment = 0
            place = 0
            for t, token in enumerate(sequence):
                segments[b, t] = segment
                places[b, t] = place
                place += 1
                if bipe.VOCABULARY[token] in ends:
                    segment += 1
                    place = 0

        if options["inner"] == "rope":
            given = {"shape": shape, "x": x, "positions": positions}
            out = inner(parameters, options, **given, **others)
        else:
            slopes = torch.tensor(slopes_of(shape.n_heads))
            slopes = slopes[:, None, None]
            far = distances(positions).abs()[:, None]
            out = {"bias": -options["alibi_factor"] * slopes * far}
        out["positions"] = segments
        out["embedded"] = x + parameters["table"][places]
        return out


class rope_2d:
    VOCABULARY = ("a", "\n", " b", "c\n\n", ".")
    CASES = [{}, {"layout": "interleaved", "base": 500.0}]
    DTYPE = torch.float64
    POSITIONS = EVERYWHERE

    def reference(options, q, k, positions, ids, **others):
        numbers = torch.zeros_like(ids)
        for b, sequence in enumerate(ids.tolist()):
            line = 0
            place = 0
            for t, token in enumerate(sequence):
                numbers[b, t] = line * 2**20 + place
                place += 1
                breaks = rope_2d.VOCABULARY[token].count("\n")
                if breaks:
                    line += breaks
                    place = 0
        q = turned_2d(q, positions, **options)
        k = turned_2d(k, positions, **options)
        return {"positions": numbers, "q": q, "k": k}


def turned_2d(a, positions, base, layout):
    half = a.shape[-1] // 2
    quarter = half // 2
    out = a.clone()
    of_each = positions.expand(len(a), -1)
    for b, row in enumerate(of_each.tolist()):
        for t, number in enumerate(row):
            line, place = divmod(number, 2**20)
            for pair in range(half):
                axis = line if pair < quarter else place
                angle = axis * base ** (-(pair % quarter) / quarter)
                cos = math.cos(angle)
                sin = math.sin(angle)
                one = 2 * pair
                two = one + 1
                if layout == "half":
                    one = pair
                    two = pair + half

                first = a[b, :, t, one]
                second = a[b, :, t, two]
                out[b, :, t, one] = cos * first - sin * second
                out[b, :, t, two] = sin * first + cos * second
    return out
