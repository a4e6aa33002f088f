"""Plain loops from the paper's equations; the bias of TUPE-R by the oracle of `t5`."""

import torch

from oracles import t5

CASES = [{}, {"relative": True}]
PARTLY_UNUSED = "buckets beyond the input; the bias of K, which moves whole rows"

_T5 = {"num_buckets": 32, "max_distance": 128}


def parameter_count(shape, options):
    width = shape.d_model
    shared = shape.train_length * width + 2 * width + 2 * (width + 1) * width
    return shared + (t5.parameter_count(shape, _T5) if options["relative"] else 0)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    width = shape.d_model // shape.n_heads
    batches = []
    for row in positions.tolist():
        places = [normalised(parameters, p) for p in row]
        both = [parameters["projection.weight"] @ n + parameters["projection.bias"] for n in places]
        asking, asked = (
            torch.stack(part).view(len(row), -1, width) for part in zip(*[b.chunk(2) for b in both], strict=True)
        )
        batches.append(torch.einsum("ihd,jhd->hij", asking, asked))
    logits = (torch.einsum("bhid,bhjd->bhij", q, k) + torch.stack(batches)) / (2 * width) ** 0.5
    if options["relative"]:
        table = {"table": parameters["relative.table"]}
        found = t5.reference(table, shape, _T5, q, k, v, x, positions, layer, causal)
        logits = logits + found["bias"]
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return {"probabilities": logits.softmax(-1)}


def normalised(parameters, position):
    vector = parameters["table"][position]
    centred = vector - vector.mean()
    return centred / (centred.pow(2).mean() + 1e-5).sqrt() * parameters["norm.weight"] + parameters["norm.bias"]
