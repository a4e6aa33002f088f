"""Plain loops over tokens from the authors' description; no package has it."""

import torch

from oracles.none import reads_positions

CASES = [{}, {"rank": 4, "layout": "half", "base": 500.0, "bias": True, "gate": True}]
DTYPE = torch.float64


def parameter_count(shape, options):
    pairs = shape.n_heads * shape.head_dim // 2
    low_rank = options["rank"] * (shape.d_model + pairs)
    gate = options["gate"] * shape.n_heads * (shape.d_model + 1)
    return shape.n_layers * (low_rank + 4 * pairs + options["bias"] * pairs + gate)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    heads, width, pairs = shape.n_heads, shape.head_dim, shape.head_dim // 2
    own = shape.d_model // heads
    scaled = [part / (part.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for part in x.split(own, dim=-1)]
    x = torch.cat(scaled, dim=-1)
    low = x @ parameters[f"down.{layer}.weight"].T @ parameters[f"up.{layer}.weight"].T
    taps = parameters[f"convolution.{layer}.weight"][:, 0]  # (H P, 4), the last for the token itself
    turned, total = [], 0
    for t in range(x.shape[1]):
        phi = sum(low[:, t - back] * taps[:, 3 - back] for back in range(4) if t >= back)
        if options["bias"]:
            phi = phi + parameters["constant"][layer].exp()
        phi = phi.view(-1, heads, pairs)
        if options["gate"]:
            opened = x[:, t] @ parameters[f"gate.{layer}.weight"].T + parameters[f"gate.{layer}.bias"]
            phi = phi * torch.sigmoid(opened)[..., None]
        total = total + phi
        angle = total * options["base"] ** (-2 * torch.arange(pairs, dtype=torch.float64) / width)
        turned.append([_turn(a[:, :, t], angle, options["layout"]) for a in (q, k)])
    return {name: torch.stack(list(rows), dim=2) for name, rows in zip("qk", zip(*turned, strict=True), strict=True)}


def _turn(a, angle, layout):
    one, two = (a[..., 0::2], a[..., 1::2]) if layout == "interleaved" else a.chunk(2, dim=-1)
    one, two = one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()
    return torch.stack((one, two), -1).flatten(-2) if layout == "interleaved" else torch.cat((one, two), -1)
