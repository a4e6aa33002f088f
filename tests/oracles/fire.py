"""FIRE: the network run on every key of a query, from the paper's equation."""

import torch

CASES = [{}, {"threshold": 5.0}, {"threshold": 1000.0}, {"threshold": None}]
PARTLY_UNUSED = "hidden units that are off at every distance"


def parameter_count(shape, options):
    network = 32 + 32 + 32 * shape.n_heads + shape.n_heads  # 1 -> 32 -> H, with biases
    return shape.n_layers * (network + 2)  # and c, and the threshold's multiplier


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    c, multiplier = parameters["c"][layer], parameters["multiplier"][layer]
    first, first_bias, last, last_bias = (
        parameters[f"networks.{layer}.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    )
    start = shape.train_length / 4 if options["threshold"] == "quarter" else options["threshold"] or shape.train_length
    threshold = (multiplier * start).abs()
    batches = []
    for row in positions.tolist():
        lines = []
        for i in row:
            far = torch.log(abs(c * max(i, threshold)) + 1)
            share = torch.stack(
                [torch.log(abs(c * (max(i - j, 0) if causal else i - j)) + 1) / (far + 1e-6) for j in row]
            )
            hidden = torch.relu(share[:, None] @ first.T + first_bias)
            lines.append(hidden @ last.T + last_bias)  # (T, H)
        batches.append(torch.stack(lines).permute(2, 0, 1))
    return {"bias": torch.stack(batches)}
