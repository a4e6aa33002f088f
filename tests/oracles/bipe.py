"""Plain loops over the tokens of a text; RoPE by GPT-J's rotation and ALiBi by a loop, at the positions given."""

import torch

from oracles import rope

VOCABULARY = ("a", ".", "b", "\n", " .", "b.", "\n\n", "!")
CASES = [{}, {"separators": ["!", "\n\n"]}, {"inner": "alibi"}, {"inner": "alibi", "alibi_factor": 2.0}]
PARTLY_UNUSED = "rows of the table beyond the longest segment"
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles
TEXTS = {(".", "\n"): {".", "\n", " ."}, ("!", "\n\n"): {"!", "\n\n"}}  # which tokens end a segment


def parameter_count(shape, options):
    return shape.train_length * shape.d_model


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal, ids):
    ends = TEXTS[tuple(options["separators"])]
    segments, embedded = [], []
    for b, row in enumerate(ids.tolist()):
        segment = place = 0
        segments.append([])
        for t, token in enumerate(row):
            segments[-1].append(segment)
            embedded.append(x[b, t] + parameters["table"][place])
            place += 1
            if VOCABULARY[token] in ends:
                segment, place = segment + 1, 0
    told = {"positions": torch.tensor(segments), "embedded": torch.stack(embedded).view(x.shape)}
    if options["inner"] == "rope":
        return told | rope.reference({}, shape, {"base": 10000.0, "layout": "interleaved"}, q, k, v, x, positions,
                                     layer, causal)  # fmt: skip
    slopes = [options["alibi_factor"] * slope for slope in SLOPES[shape.n_heads]]
    rows = [[[[-slope * abs(i - j) for j in row] for i in row] for slope in slopes] for row in positions.tolist()]
    return told | {"bias": torch.tensor(rows)}


SLOPES = {  # by the number of heads: powers of two, and those between them where heads are no power of two
    1: [2.0**-8],
    4: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8],
    6: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3],
    12: [2.0**-n for n in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5],
}
