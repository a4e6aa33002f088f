"""Plain loops from the paper's equation, in fp64, with ALiBi's slopes by the authors' rule."""

import math

import torch

CASES = [{}, {"gate": "query"}, {"gate": "both"}]
DTYPE = torch.float64


def parameter_count(shape, options):
    gates = 2 if options["gate"] == "both" else 1
    return shape.n_layers * shape.n_heads * (1 + gates * shape.head_dim)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    strengths = torch.log(1 + torch.exp(parameters["strength"][layer]))
    slopes = alibi(shape.n_heads)
    batches = []
    for b in range(len(q)):
        row = positions[b % len(positions)].tolist()
        heads = []
        for h in range(shape.n_heads):
            gates = [gate(parameters, "key", layer, h, key) for key in k[b, h]]
            lines = []
            for i, query in zip(row, q[b, h], strict=True):
                own = gate(parameters, "query", layer, h, query)
                penalties = [abs(i - j) * (own + other) for j, other in zip(row, gates, strict=True)]
                lines.append(-slopes[h] * strengths[h] * torch.stack(penalties))
            heads.append(torch.stack(lines))
        batches.append(torch.stack(heads))
    return {"bias": torch.stack(batches)}


def gate(parameters, side, layer, head, vector):
    if side not in parameters:
        return 0 * vector[0]
    along = parameters[side][layer, head]
    return torch.log(1 + torch.exp((vector * along).sum() / along.norm() / math.sqrt(len(vector))))


def alibi(heads):
    regular = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / regular) for h in range(regular)]
    return slopes + [2 ** (-8 * (h + 1) / (2 * regular)) for h in range(0, 2 * regular, 2)][: heads - regular]
