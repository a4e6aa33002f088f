"""Plain loops from the authors' equation of their prior, and of their scaled softmax around it."""

import math

import torch

CASES = [{}, {"location": True}, {"ssmax": True}, {"location": True, "ssmax": True}]
DTYPE = torch.float64
POSITIONS = ("consecutive", "offset", "gaps", "far", "fractional")


def parameter_count(shape, options):
    return shape.n_layers * shape.n_heads * (2 + options["location"] + options["ssmax"])


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    batch, heads, length, width = q.shape
    rows = positions.expand(batch, -1).tolist()
    logits = []
    for b in range(batch):
        for h in range(heads):
            alpha, beta = parameters["scale"][layer][h].exp(), parameters["exponent"][layer][h]
            loc = parameters["location"][layer][h] if options["location"] else torch.zeros(())
            loc = loc.exp() - (-loc).exp()
            for i in range(length):
                times = parameters["sharpness"][layer][h] * math.log(i + 1) if options["ssmax"] else 1
                for j in range(length):
                    prior = -((((rows[b][j] - rows[b][i]) - loc).abs() + 1e-5) ** beta) * alpha
                    logit = (q[b, h, i] @ k[b, h, j] / math.sqrt(width) + prior) * times
                    logits.append(logit if j <= i or not causal else logit.new_tensor(-math.inf))
    return {"output": torch.stack(logits).view(batch, heads, length, length).softmax(-1) @ v}
