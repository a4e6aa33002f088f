"""Plain loops over the tokens of a text; RoPE by GPT-J's rotation and ALiBi by a loop, at the positions given."""

import torch

from oracles import _inner, grape_a

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
        return told | _inner.found(parameters, shape, options, q, k, v, x, positions, layer, causal)
    slopes = [options["alibi_factor"] * slope for slope in grape_a.alibi(shape.n_heads)]
    rows = [[[[-slope * abs(i - j) for j in row] for i in row] for slope in slopes] for row in positions.tolist()]
    return told | {"bias": torch.tensor(rows)}
