"""transformers: DistilBERT's table (interleaved) and Marian's (all sines, then all cosines).

Both have base 10000 built in; another base is plain loops."""

import math

import torch

from oracles import third_party

CASES = [
    {},
    {"layout": "halves"},
    {"scale": 1.0},
    {"combine": "concat", "scale": 0.5},
    {"combine": "concat", "layout": "halves"},
    {"base": 100.0},
]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    concat = options["combine"] == "concat"
    width = shape.d_model // 4 if concat else shape.d_model
    table = make_table(shape.train_length, width, options)
    scale = shape.token_rms if options["scale"] == "token" else options["scale"]
    code = scale * table[positions]
    if not concat:
        return {"embedded": x + code}
    tokens = x[..., : shape.d_model - width]
    return {"embedded": torch.cat((tokens, code.expand(len(x), -1, -1)), dim=-1)}


def make_table(length, width, options):
    if options["base"] != 10000:
        rows = []
        for i in range(length):
            angles = [i / options["base"] ** (2 * p / width) for p in range(width // 2)]
            rows.append([wave(angle) for angle in angles for wave in (math.sin, math.cos)])
        return torch.tensor(rows)
    if options["layout"] == "halves":
        marian = third_party("transformers.models.marian.modeling_marian")
        return torch.as_tensor(marian.MarianSinusoidalPositionalEmbedding(length, width).create_weight()).float()
    distilbert = third_party("transformers.models.distilbert.modeling_distilbert")
    table = torch.nn.Embedding(length, width).weight
    table.requires_grad = False
    distilbert.create_sinusoidal_embeddings(n_pos=length, dim=width, out=table)
    return table.detach()
