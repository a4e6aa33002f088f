"""No encoding, and codes at the input."""

import math

import torch
import torch.nn.functional as F

from oracles import third_party
from oracles._shared import Ordered


class none(Ordered):
    """torch's own attention without any position."""

    CASES = [{}]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        return {"output": F.scaled_dot_product_attention(q, k, v, is_causal=causal)}


def coded(x, positions, shape, options, code):
    """Return x with `code(position)`, numbers or a tensor, added to it or in the place
    of its last channels.
    """
    scale = shape.token_rms if options["scale"] == "token" else options["scale"]
    rows = []
    for b in range(len(x)):
        for token, place in zip(x[b], positions[b % len(positions)], strict=True):
            numbers = scale * torch.as_tensor(code(place), dtype=x.dtype)
            if options["combine"] == "concat":
                rows.append(torch.cat([token[: shape.d_model - len(numbers)], numbers]))
            else:
                rows.append(token + F.pad(numbers, (0, shape.d_model - len(numbers))))
    return {"embedded": torch.stack(rows).view(*x.shape[:2], shape.d_model)}


class sinusoidal:
    """transformers: DistilBERT's table (interleaved), Marian's (halves), both of base
    10000; else plain loops.
    """

    CASES = [
        {},
        {"layout": "halves"},
        {"combine": "concat", "scale": 0.5},
        {"base": 100.0},
    ]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        width = shape.d_model // 4 if options["combine"] == "concat" else shape.d_model
        table = waves(shape.train_length, width, options)
        return coded(x, positions, shape, options, lambda place: table[place])


def waves(length, width, options):
    """Return the table of sinusoids (length, width)."""
    if options["base"] != 10000:
        angles = [
            [i / options["base"] ** (2 * p / width) for p in range(width // 2)]
            for i in range(length)
        ]
        return torch.tensor(
            [[wave(a) for a in row for wave in (math.sin, math.cos)] for row in angles]
        )
    if options["layout"] == "halves":
        marian = third_party("transformers.models.marian.modeling_marian")
        return torch.as_tensor(
            marian.MarianSinusoidalPositionalEmbedding(length, width).create_weight()
        ).float()
    distilbert = third_party("transformers.models.distilbert.modeling_distilbert")
    table = torch.nn.Embedding(length, width).weight
    table.requires_grad = False
    distilbert.create_sinusoidal_embeddings(n_pos=length, dim=width, out=table)
    return table.detach()


class learned:
    """transformers GPT-2: the sum of its word and position embeddings, before any
    block.
    """

    CASES = [{}]
    PARTLY_UNUSED = "rows beyond the input"

    def parameter_count(shape, options):
        return shape.train_length * shape.d_model

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        transformers = third_party("transformers")
        sizes = {
            "n_positions": shape.train_length,
            "n_embd": shape.d_model,
            "n_head": shape.n_heads,
        }
        gpt2 = transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=8, n_layer=0, embd_pdrop=0.0, **sizes)
        )
        gpt2.ln_f = torch.nn.Identity()
        given = {"inputs_embeds": x, "position_ids": positions.expand(len(x), -1)}
        embedded = torch.func.functional_call(
            gpt2, {"wpe.weight": parameters["table"]}, kwargs=given
        )
        return {"embedded": embedded.last_hidden_state}


class index:
    """The raw index along a direction, or in a channel of its own; `random` is tested
    in test_schemes.py.
    """

    CASES = [
        {},
        {"direction": "ones", "scale": 1.0},
        {"direction": "learned", "scale": 0.5},
        {"combine": "concat"},
    ]

    def parameter_count(shape, options):
        return shape.d_model if options["direction"] == "learned" else 0

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        along = {
            "learned": parameters.get("u"),
            "ones": torch.ones(shape.d_model),
            "first": torch.ones(1),
        }
        return coded(
            x,
            positions,
            shape,
            options,
            lambda number: number * along[options["direction"]],
        )


class minmax(index):
    """The index between 0 and 1."""

    CASES = [
        {},
        {"norm": "length", "scale": 1.0},
        {"direction": "learned", "scale": 2.0},
        {"combine": "concat"},
    ]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        rows = []
        for row in positions.tolist():
            low, high = (
                (min(row), max(row))
                if options["norm"] == "batch"
                else (0, shape.train_length - 1)
            )
            rows.append([(i - low) / (high - low) if high > low else 0.0 for i in row])
        return index.reference(
            parameters, shape, options, q, k, v, x, torch.tensor(rows), layer, causal
        )


class binary:
    """Binary digits, as Python writes them."""

    CASES = [{}, {"digits": 7, "scale": 1.0}, {"combine": "concat", "scale": 2.0}]
    POSITIONS = ("consecutive", "offset", "gaps")  # seven digits end at 127
    GRAPH_BREAKS = (
        "looks at the positions' values, to refuse those that it has no digits for"
    )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        digits = options["digits"] or 6  # 64 positions

        def code(place):
            return [
                float(digit)
                for digit in format(place.item(), "b")[::-1].ljust(digits, "0")
            ]

        return coded(x, positions, shape, options, code)


class sine:
    """Sines, a speed per channel."""

    CASES = [{}, {"base": 500.0, "scale": 1.0}, {"combine": "concat", "scale": 2.0}]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        width = shape.d_model if options["combine"] == "add" else shape.d_model // 4

        def code(place):
            return [
                math.sin(place.item() / options["base"] ** (j / width))
                for j in range(width)
            ]

        return coded(x, positions, shape, options, code)
