"""No encoding, and codes at the input."""

import math

import torch
import torch.nn.functional as F

from oracles import third_party
from oracles._shared import Ordered


class none(Ordered):
    """torch's own attention without any position."""

    CASES = [{}]

    def reference(q, k, v, causal, **others):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return {"output": output}


def coded(x, positions, shape, options, code):
    """Return x with `code(position)`, numbers or a tensor, added to it or in the place
    of its last channels.
    """
    scale = options["scale"]
    if scale == "token":
        scale = shape.token_rms

    sequences = []
    for b, sequence in enumerate(x):
        places = positions[b % len(positions)]
        tokens = []
        for token, place in zip(sequence, places, strict=True):
            numbers = scale * torch.as_tensor(code(place), dtype=x.dtype)
            left = shape.d_model - len(numbers)
            if options["combine"] == "concat":
                with_code = torch.cat([token[:left], numbers])
            else:
                with_code = token + F.pad(numbers, (0, left))
            tokens.append(with_code)
        sequences.append(torch.stack(tokens))
    return {"embedded": torch.stack(sequences)}


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

    def reference(shape, options, x, positions, **others):
        width = shape.d_model
        if options["combine"] == "concat":
            width = width // 4
        table = waves(shape.train_length, width, options)
        return coded(x, positions, shape, options, lambda place: table[place])


def waves(length, width, options):
    """Return the table of sinusoids (length, width)."""
    table = torch.zeros(length, width)
    if options["base"] != 10000:
        for place in range(length):
            for pair in range(width // 2):
                angle = place / options["base"] ** (2 * pair / width)
                table[place, 2 * pair] = math.sin(angle)
                table[place, 2 * pair + 1] = math.cos(angle)
    elif options["layout"] == "halves":
        marian = third_party("transformers.models.marian.modeling_marian")
        embedding = marian.MarianSinusoidalPositionalEmbedding(length, width)
        table = torch.as_tensor(embedding.create_weight()).float()
    else:
        distilbert = third_party("transformers.models.distilbert.modeling_distilbert")
        distilbert.create_sinusoidal_embeddings(n_pos=length, dim=width, out=table)
    return table


class learned:
    """transformers GPT-2: the sum of its word and position embeddings, before any
    block.
    """

    CASES = [{}]
    PARTLY_UNUSED = "rows beyond the input"

    def parameter_count(shape, options):
        return shape.train_length * shape.d_model

    def reference(parameters, shape, x, positions, **others):
        transformers = third_party("transformers")
        config = transformers.GPT2Config(
            n_positions=shape.train_length,
            n_embd=shape.d_model,
            n_head=shape.n_heads,
            n_layer=0,
            vocab_size=8,
            embd_pdrop=0.0,
        )
        gpt2 = transformers.GPT2Model(config)
        gpt2.ln_f = torch.nn.Identity()
        weights = {"wpe.weight": parameters["table"]}
        of_each = positions.expand(len(x), -1)
        given = {"inputs_embeds": x, "position_ids": of_each}
        made = torch.func.functional_call(gpt2, weights, kwargs=given)
        return {"embedded": made.last_hidden_state}


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
        if options["direction"] == "learned":
            return shape.d_model
        return 0

    def reference(parameters, shape, options, x, positions, **others):
        if options["direction"] == "learned":
            direction = parameters["u"]
        elif options["direction"] == "ones":
            direction = torch.ones(shape.d_model)
        else:
            direction = torch.ones(1)
        return coded(x, positions, shape, options, lambda place: place * direction)


class minmax(index):
    """The index between 0 and 1."""

    CASES = [
        {},
        {"norm": "length", "scale": 1.0},
        {"direction": "learned", "scale": 2.0},
        {"combine": "concat"},
    ]

    def reference(parameters, shape, options, x, positions, **others):
        shares = torch.zeros(positions.shape)
        for b, row in enumerate(positions.tolist()):
            low = 0
            high = shape.train_length - 1
            if options["norm"] == "batch":
                low = min(row)
                high = max(row)
            for t, place in enumerate(row):
                if high > low:
                    shares[b, t] = (place - low) / (high - low)
        return index.reference(parameters, shape, options, x, shares)


class binary:
    """Binary digits, as Python writes them."""

    CASES = [{}, {"digits": 7, "scale": 1.0}, {"combine": "concat", "scale": 2.0}]
    POSITIONS = ("consecutive", "offset", "gaps")  # seven digits end at 127
    GRAPH_BREAKS = (
        "looks at the positions' values, to refuse those that it has no digits for"
    )

    def reference(shape, options, x, positions, **others):
        count = options["digits"] or 6  # 64 positions

        def code(place):
            digits = format(place.item(), f"0{count}b")
            return [float(digit) for digit in reversed(digits)]

        return coded(x, positions, shape, options, code)


class sine:
    """Sines, a speed per channel."""

    CASES = [{}, {"base": 500.0, "scale": 1.0}, {"combine": "concat", "scale": 2.0}]

    def reference(shape, options, x, positions, **others):
        width = shape.d_model
        if options["combine"] == "concat":
            width = width // 4

        speeds = [options["base"] ** (-j / width) for j in range(width)]

        def code(place):
            return [math.sin(place.item() * speed) for speed in speeds]

        return coded(x, positions, shape, options, code)
