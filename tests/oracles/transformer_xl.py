"""transformers XLNet, which has Transformer-XL's attention, where positions are consecutive; else plain loops."""

import torch

from oracles import third_party

CASES = [{}, {"base": 300.0}]


def parameter_count(shape, options):
    width = shape.d_model
    return shape.n_layers * (width * width + 2 * width)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    u, position, project = (parameters[key][layer] for key in ("content", "position", "projection"))
    length = q.shape[2]
    hidden = torch.ones(length, length).triu(1) if causal else torch.zeros(length, length)
    if not bool((positions.diff() == 1).all()):
        return {"probabilities": by_loops(u, position, project, options["base"], q, k, positions, hidden)}
    transformers = third_party("transformers")
    module = third_party("transformers.models.xlnet.modeling_xlnet")
    config = transformers.XLNetConfig(
        d_model=shape.d_model, n_head=shape.n_heads, d_inner=8, n_layer=1, dropout=0.0, vocab_size=8
    )
    told = torch.stack([sinusoid(r, shape.d_model, options["base"]) for r in range(length, -length, -1)])
    heads = torch.einsum("rm,hdm->rhd", told, project)[:, None]
    content = [tensor.permute(2, 0, 1, 3) for tensor in (q, k, v)]
    _, weights = torch.func.functional_call(
        Core(module.XLNetRelativeAttention(config)),
        {"attention.r_w_bias": u, "attention.r_r_bias": position},
        (*content, heads),
        {"attn_mask": hidden[:, :, None, None], "output_attentions": True},
    )
    return {"probabilities": weights.permute(2, 3, 0, 1)}


class Core(torch.nn.Module):
    """XLNet's attention behind its projections of one input."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        return self.attention.rel_attn_core(*args, **kwargs)


def by_loops(u, position, project, base, q, k, positions, hidden):
    logits = torch.einsum("bhid,bhjd->bhij", q + u[:, None], k)
    rows = [
        torch.stack([
            torch.stack([project @ sinusoid(i - j, project.shape[-1], base) for j in row]) for i in row
        ])
        for row in positions.tolist()
    ]  # B of (T, T, H, d)  # fmt: skip
    logits = logits + torch.einsum("bhid,bijhd->bhij", q + position[:, None], torch.stack(rows))
    return (logits / q.shape[-1] ** 0.5).masked_fill(hidden.bool(), -torch.inf).softmax(-1)


def sinusoid(r, width, base):
    angles = r / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.cat([angles.sin(), angles.cos()]).float()
