"""Plain loops from the authors' description: a SwiGLU without a way back, a linear map to heads, and a rotation."""

import torch

CASES = [{}, {"first": 0, "layout": "half", "base": 500.0}]
DTYPE = torch.float64
POSITIONS = ("consecutive", "offset", "gaps", "far", "fractional")


def reads_positions(options):
    return options["first"] != 0  # layers below the first one have RoPE


def parameter_count(shape, options):
    layers = shape.n_layers - first_of(shape, options)
    return layers * (shape.d_model // 8) * (2 * shape.d_model + shape.n_heads)


def first_of(shape, options):
    return round(5 * shape.n_layers / 16) if options["first"] is None else options["first"]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    width, pairs, at = shape.head_dim, shape.head_dim // 2, layer - first_of(shape, options)
    out = {"q": torch.zeros_like(q), "k": torch.zeros_like(k)}
    for b in range(len(q)):
        for t in range(q.shape[2]):
            if at >= 0:
                asked = parameters[f"gate.{at}.weight"] @ x[b, t]
                swish = asked / (1 + (-asked).exp())
                made = swish * (parameters[f"content.{at}.weight"] @ x[b, t])
            for head in range(shape.n_heads):
                place = parameters[f"position.{at}.weight"][head] @ made if at >= 0 else positions.expand(2, -1)[b, t]
                for p in range(pairs):
                    one, two = (2 * p, 2 * p + 1) if options["layout"] == "interleaved" else (p, p + pairs)
                    angle = place.double() * options["base"] ** (-2 * p / width)
                    for name, a in (("q", q), ("k", k)):
                        first, second = a[b, head, t, one], a[b, head, t, two]
                        out[name][b, head, t, one] = first * angle.cos() - second * angle.sin()
                        out[name][b, head, t, two] = second * angle.cos() + first * angle.sin()
    return out
