"""Plain loops: both convolutions run at every pair, on the bias that the oracle of the encoding inside gives."""

import torch

from oracles.dape import inner_bias, inner_count, reads_positions

CASES = [{}, {"inner": "alibi", "hidden": 5}, {"inner": "fox", "kernel": 5, "hidden": 4}]
PARTLY_UNUSED = "what shifts whole rows, the last constants"


def parameter_count(shape, options):
    heads, hidden, kernel = shape.n_heads, options["hidden"], options["kernel"]
    network = 2 * heads * hidden * kernel + hidden + hidden * heads * kernel + heads
    return shape.n_layers * network + inner_count(shape, options)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    z = q @ k.mT / shape.head_dim**0.5
    bias = inner_bias(parameters, shape, options, q, k, v, x, positions, layer, causal).expand(z.shape)
    w1, c1, w2, c2 = (parameters[f"networks.{layer}.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
    length, reach = q.shape[2], options["kernel"] // 2
    rows = []
    for i in range(length):
        last = i if causal else length - 1

        def seen(j, i=i, last=last):
            return torch.cat([z[:, :, i, j], bias[:, :, i, j]], dim=1) if 0 <= j <= last else None

        def convolved(of, j, weight, constant):
            total = constant
            for tap in range(-reach, reach + 1):
                found = of(j + tap)
                if found is not None:
                    total = total + found @ weight[:, :, 0, tap + reach].T
            return total

        made = {}
        for j in range(last + reach + 1):
            value = convolved(seen, j, w1, c1)
            made[j] = torch.where(value > 0, value, 0.01 * value)
        row = []
        for j in range(length):
            added = convolved(made.get, j, w2, c2) if j <= last else torch.zeros_like(bias[:, :, i, j])
            row.append(bias[:, :, i, j] + added)
        rows.append(torch.stack(row, dim=-1))
    return {"bias": torch.stack(rows, dim=2)}
