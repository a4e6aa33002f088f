"""Wrappers, around the oracle of the encoding inside."""

import dataclasses
import math
import types

import torch

from oracles import third_party
from oracles._shared import (
    Around,
    flat,
    inner,
    inner_count,
    inner_output,
    masked,
    output_of,
    softmax,
)
from oracles.distance import EVERYWHERE, distances

REBUILT = "each forward pass builds anew what a layer uses of the inner encoding"


class Counting(Around):
    """Of those that count tokens: positions are read by the encoding inside alone."""

    GRAPH_BREAKS = REBUILT

    def reads_positions(options):
        return options["inner"] not in ("none", "fox")


class canon(Counting):
    """transformers Inkling's short convolution (with its residual), on what is
    convolved.
    """

    CASES = [
        {},
        {"convolved": "kv", "width": 3},
        {"convolved": "qk", "residual": False},
        {"inner": "rope"},
    ]

    def parameter_count(shape, options):
        heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
        convolutions = (
            shape.n_layers
            * shape.head_dim
            * options["width"]
            * sum(heads[a] for a in options["convolved"])
        )
        return convolutions + inner_count(shape, options)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        inkling = third_party("transformers.models.inkling.modeling_inkling")
        convolution = inkling.InklingShortConvolution(
            shape.d_model, options["width"], layer_idx=0, conv_idx=0
        )
        given = {"q": q, "k": k, "v": v}
        for name in options["convolved"]:
            weight = {
                "conv1d.weight": (
                    parameters[f"weights.{name}"][layer].flatten(0, 1)[:, None]
                )
            }
            wide = flat(given[name])
            out = torch.func.functional_call(convolution, weight, (wide,))
            out = out if options["residual"] else out - wide
            given[name] = out.unflatten(2, (shape.n_heads, shape.head_dim)).transpose(
                1, 2
            )
        output = inner_output(
            parameters, shape, options, *given.values(), x, positions, layer, causal
        )
        return (
            output
            if options["inner"] != "none"
            else {"q": given["q"], "k": given["k"], **output}
        )


class cca(Counting):
    """transformers Zaya: its projection, given q, k and v to pick from."""

    CASES = [
        {},
        {"channel_width": 4, "head_width": 1},
        {"inner": "rope"},
        {"inner": "fox"},
    ]
    PARTLY_UNUSED = "biases of keys: what all keys have alike changes no weight"

    def parameter_count(shape, options):
        heads = shape.n_heads + shape.n_kv_heads
        channel = heads * shape.head_dim * (options["channel_width"] + 1)
        head = heads * shape.head_dim * (shape.head_dim * options["head_width"] + 1)
        return shape.n_layers * (channel + head) + inner_count(shape, options)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        size = shape.n_heads * shape.head_dim
        config = types.SimpleNamespace(
            hidden_size=3 * size,
            cca_time0=options["channel_width"],
            cca_time1=options["head_width"],
            num_attention_heads=shape.n_heads,
            num_key_value_heads=shape.n_heads,
            head_dim=shape.head_dim,
            attention_bias=False,
        )
        picked = torch.eye(3 * size).split([size, size, size // 2, size // 2])
        names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
        weights = {
            f"{name}.weight": rows for name, rows in zip(names, picked, strict=True)
        }
        for ours, theirs in (
            ("by_channel", "conv_qk_depthwise"),
            ("by_head", "conv_qk_grouped"),
        ):
            weights |= {
                f"{theirs}.{kind}": parameters[f"{ours}.{layer}.{kind}"]
                for kind in ("weight", "bias")
            }
        projection = third_party(
            "transformers.models.zaya.modeling_zaya"
        ).ZayaCCAProjection(config, 0)
        q, k, v = (
            a.transpose(1, 2)
            for a in torch.func.functional_call(
                projection, weights, (flat(q, k, v), None)
            )
        )
        output = inner_output(
            parameters, shape, options, q, k, v, x, positions, layer, causal
        )
        return output if options["inner"] != "none" else {"q": q, "k": k, **output}


class dape(Counting):
    """The network run at every pair, on the bias that the oracle of the encoding inside
    gives.
    """

    # a leaky ReLU takes the other side of its bend for what fp32 rounds
    DTYPE = torch.float64
    CASES = [
        {},
        {"inner": "fire", "inner_options": {"threshold": 5.0}},
        {"inner": "fox"},
        {"per_layer": False},
    ]
    PARTLY_UNUSED = (
        "what shifts whole rows, the last constants; FIRE's hidden units that are off"
        " at every distance"
    )
    TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
    GRAPH_BREAKS = ""

    def parameter_count(shape, options):
        heads = shape.n_heads
        hidden = options["hidden"]
        kernel = options.get("kernel", 1)
        network = 2 * heads * hidden * kernel + hidden + hidden * heads * kernel + heads
        inner_shape = (
            dataclasses.replace(shape, n_layers=1) if options["per_layer"] else shape
        )
        copies = shape.n_layers // inner_shape.n_layers
        return shape.n_layers * network + copies * inner_count(inner_shape, options)

    def inputs(parameters, shape, options, q, k, v, x, positions, layer, causal):
        """The bias of the encoding inside, logits and biases over the heads (B, T, T,
        2H), and the network.
        """
        logits = q @ k.mT / shape.head_dim**0.5
        at, own_layer = (layer, 0) if options["per_layer"] else (0, layer)
        bias = inner(
            parameters, shape, options, q, k, v, x, positions, own_layer, causal, at
        )["bias"]
        bias = bias.expand(logits.shape)
        # their oracles leave a constant per row open: 0 at the query
        if options["inner"] in ("alibi", "fox"):
            bias = bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
        names = ("0.weight", "0.bias", "2.weight", "2.bias")
        both = torch.cat((logits, bias), dim=1).movedim(1, -1)
        return bias, both, [parameters[f"networks.{layer}.{name}"] for name in names]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        given = (parameters, shape, options, q, k, v, x, positions, layer, causal)
        bias, both, (w1, c1, w2, c2) = dape.inputs(*given)
        hidden = both @ w1.T + c1
        return {
            "bias": (
                bias
                + (torch.where(hidden > 0, hidden, 0.01 * hidden) @ w2.T + c2).movedim(
                    -1, 1
                )
            )
        }


class dape_v2(dape):
    """Both convolutions run key by key, on the bias that the oracle of the encoding
    inside gives.
    """

    CASES = [
        {},
        {"inner": "alibi", "hidden": 5},
        {"inner": "fox", "kernel": 5, "hidden": 4},
    ]
    DTYPE = torch.float32

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        given = (parameters, shape, options, q, k, v, x, positions, layer, causal)
        bias, both, (w1, c1, w2, c2) = dape.inputs(*given)
        length = q.shape[2]
        reach = options["kernel"] // 2

        def convolved(keys, j, weight, constant):
            total = constant
            for tap in range(-reach, reach + 1):
                if (key := keys.get(j + tap)) is not None:
                    total = total + key @ weight[:, :, 0, tap + reach].T
            return total

        rows = []
        for i in range(length):
            last = i if causal else length - 1
            seen = {j: both[:, i, j] for j in range(last + 1)}
            made = {j: convolved(seen, j, w1, c1) for j in range(last + reach + 1)}
            made = {
                j: torch.where(value > 0, value, 0.01 * value)
                for j, value in made.items()
            }
            added = [convolved(made, j, w2, c2) for j in range(last + 1)]
            rows.append(
                torch.stack(
                    added + [torch.zeros_like(added[0])] * (length - 1 - last), dim=-1
                )
            )
        return {"bias": bias + torch.stack(rows, dim=2)}


class learned_sinks(Counting):
    """transformers' gpt-oss attention, given the queries, keys and biases of the inner
    encoding's oracle.
    """

    CASES = [{}, {"inner": "none"}, {"inner": "alibi"}, {"inner": "fox"}]

    def parameter_count(shape, options):
        return shape.n_layers * shape.n_heads + inner_count(shape, options)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        gpt_oss = third_party("transformers.models.gpt_oss.modeling_gpt_oss")
        of_layer = inner(
            parameters, shape, options, q, k, v, x, positions, layer, causal
        )
        length = q.shape[2]
        # Up to a number per row, which a sink would see: the formulas of both biases
        # have 0 for the query's own key.
        bias = torch.as_tensor(of_layer.get("bias", 0.0)).expand(
            len(q), shape.n_heads, length, length
        )
        bias = bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
        module = types.SimpleNamespace(
            num_key_value_groups=1, sinks=parameters["sinks"][layer], training=False
        )
        given = (of_layer.get("q", q), of_layer.get("k", k), v, masked(bias, causal))
        output, _ = gpt_oss.eager_attention_forward(
            module, *given, scaling=shape.head_dim**-0.5
        )
        return {"output": output.transpose(1, 2)}


class randomized(Around):
    """The oracle of the inner encoding, which is shown whatever positions were
    drawn.
    """

    CASES = [
        {},
        {"inner": "t5", "inner_options": {"num_buckets": 8, "max_distance": 20}},
        {"continuous": True, "inner": "alibi"},
        {"max_length": lambda shape: shape.train_length},
    ]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        wide = dataclasses.replace(
            shape, train_length=options["max_length"] or 16 * shape.train_length
        )
        return inner_output(
            parameters, wide, options, q, k, v, x, positions, layer, causal
        )


class shape(Around):
    """The oracle of the inner encoding, at whatever positions; test_wrappers.py looks
    at the draws.
    """

    CASES = [
        {},
        {"inner": "learned", "shift": 9},
        {"inner": "t5", "inner_options": {"num_buckets": 8}, "shift": 40},
    ]
    PARTLY_UNUSED = "rows of the table beyond the input"

    def wide(shape, options):
        return dataclasses.replace(
            shape, train_length=shape.train_length + options["shift"]
        )

    def parameter_count(of_model, options):
        return inner_count(shape.wide(of_model, options), options)

    def reference(parameters, of_model, options, q, k, v, x, positions, layer, causal):
        of_layer = inner(
            parameters,
            shape.wide(of_model, options),
            options,
            q,
            k,
            v,
            x,
            positions,
            layer,
            causal,
        )
        return (
            of_layer
            if "embedded" in of_layer
            else {"output": output_of(of_layer, q, k, v, causal)}
        )


class cape:
    """Plain loops: sinusoids and ALiBi at positions that need not be whole;
    test_wrappers.py looks at the draws.
    """

    CASES = [
        {},
        {
            "inner_options": {"base": 100.0, "layout": "halves", "scale": 1.0},
            "local_shift": 1.0,
        },
        {
            "inner": "alibi",
            "inner_options": lambda shape: {
                "slopes": [1.5 - 0.25 * h for h in range(shape.n_heads)]
            },
        },
    ]
    POSITIONS = EVERYWHERE

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        given = options["inner_options"]
        if options["inner"] == "alibi":
            return {
                "bias": (
                    -torch.tensor(given["slopes"])[:, None, None]
                    * distances(positions).abs()[:, None]
                )
            }
        code = torch.zeros(*positions.shape, shape.d_model)
        for b, row in enumerate(positions.tolist()):
            for t, place in enumerate(row):
                for pair in range(shape.d_model // 2):
                    angle = place * given.get("base", 10000.0) ** (
                        -2 * pair / shape.d_model
                    )
                    halves = given.get("layout") == "halves"
                    first, second = (
                        (pair, pair + shape.d_model // 2)
                        if halves
                        else (2 * pair, 2 * pair + 1)
                    )
                    code[b, t, first] = math.sin(angle)
                    code[b, t, second] = math.cos(angle)
        return {"embedded": x + given.get("scale", shape.token_rms) * code}


def inside(entry):
    """An entry as the options of a wrapper around its encoding."""
    given = {
        key: value
        for key, value in entry.items()
        if key not in ("name", "window", "chunk")
    }
    return {"inner": entry["name"], "inner_options": given}


class layered(Around):
    """Each layer by the oracle of the encoding it uses, under that layer's window."""

    CASES = [
        {},
        {
            "layers": [
                {"name": "rope", "window": 5},
                {"name": "none"},
                {"name": "rope", "base": 500.0},
            ]
        },
        {
            "layers": [
                {"name": "alibi", "window": 7},
                {"name": "t5", "num_buckets": 8, "max_distance": 20},
            ]
        },
        {
            "layers": [
                {"name": "rope", "chunk": 5},
                {"name": "alibi", "chunk": 3},
                {"name": "none"},
            ]
        },
    ]

    def entries(shape, options):
        """What each layer uses, and the different ones, each with the shape of a model
        of its layers.
        """
        entries = [
            options["layers"][i % len(options["layers"])] for i in range(shape.n_layers)
        ]
        distinct = [
            entry for i, entry in enumerate(entries) if entry not in entries[:i]
        ]
        return entries, [
            (entry, dataclasses.replace(shape, n_layers=entries.count(entry)))
            for entry in distinct
        ]

    def parameter_count(shape, options):
        return sum(
            inner_count(narrow, inside(entry))
            for entry, narrow in layered.entries(shape, options)[1]
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        entries, distinct = layered.entries(shape, options)
        entry = entries[layer]
        at, narrow = next(
            (at, narrow) for at, (each, narrow) in enumerate(distinct) if each == entry
        )
        given = (q, k, v, x, positions, entries[:layer].count(entry), causal)
        of_layer = inner(parameters, narrow, inside(entry), *given, at=at)
        return {
            "output": output_of(
                of_layer, q, k, v, causal, entry.get("window"), entry.get("chunk")
            )
        }


class heads(Around):
    """Each block of heads by the oracle of the encoding it uses; which head is in which
    block is a loop.
    """

    CASES = [
        {},
        {"heads": [{"name": "rope", "base": 500.0}, {"name": "none"}, {"name": "fox"}]},
        {"heads": [{"name": "rope", "base": 500.0}, {"name": "pope", "base": 90.0}]},
        {
            "heads": [
                {"name": "alibi"},
                {"name": "t5", "num_buckets": 8, "max_distance": 20},
            ]
        },
    ]
    PARTLY_UNUSED = "phases of pope that have left their bounds"

    def blocks(shape, options):
        """The entries that have heads, each with these heads and the shape of a model
        of as many.
        """
        entries = options["heads"]
        for place, entry in enumerate(entries):
            block = [
                head
                for head in range(shape.n_heads)
                if head * len(entries) // shape.n_heads == place
            ]
            if block:
                # fox reads x
                width = (
                    shape.d_model
                    if entry["name"] == "fox"
                    else len(block) * shape.head_dim
                )
                sizes = {
                    "d_model": width,
                    "n_heads": len(block),
                    "n_kv_heads": len(block),
                }
                yield entry, block, dataclasses.replace(shape, **sizes)

    def parameter_count(shape, options):
        return sum(
            inner_count(narrow, inside(entry))
            for entry, _, narrow in heads.blocks(shape, options)
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        output = []
        for at, (entry, block, narrow) in enumerate(heads.blocks(shape, options)):
            given = [each[:, block] for each in (q, k, v)]
            of_layer = inner(
                parameters,
                narrow,
                inside(entry),
                *given,
                x,
                positions,
                layer,
                causal,
                at=at,
            )
            output.append(output_of(of_layer, *given, causal))
        return {"output": torch.cat(output, dim=1)}


class temperature(Counting):
    """transformers' scales where it has them, else the rule, on the queries of the
    inner encoding's oracle.
    """

    CASES = [
        {},
        {"rule": "mistral_large4"},
        {"rule": "logn", "inner": "none"},
        {"rule": "llama4", "inner": "none", "alpha": 0.5, "floor": 4},
        {"rule": "inkling", "inner": "alibi", "alpha": 0.5, "floor": 3},
    ]

    def parameter_count(shape, options):
        return (
            {"ssmax": 1, "mistral_large4": 2}.get(options["rule"], 0)
            * shape.n_layers
            * shape.n_heads
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        of_layer = inner(
            parameters, shape, options, q, k, v, x, positions, layer, causal
        )
        of_layer["q"] = sharpened(
            of_layer.get("q", q), parameters, shape, options, layer
        )
        of_layer.pop("output", None)
        return {"output": output_of(of_layer, q, k, v, causal)}


def sharpened(q, parameters, shape, options, layer):
    rule = options["rule"]
    length = q.shape[2]
    floor = options["floor"] or shape.train_length
    if rule == "mistral_large4":
        module = third_party(
            "transformers.models.mistral_large4.modeling_mistral_large4"
        )
        learned = {
            "scale": parameters[f"scale.{layer}"],
            "bias": parameters[f"offset.{layer}"],
        }
        args = (q, torch.arange(length)[None], True)
        return torch.func.functional_call(
            module.MistralLarge4TextSoftmaxScaling(shape.n_heads), learned, args
        )
    if rule == "llama4":  # Ministral 3 counts positions from 0, Llama 4 tokens
        module = third_party("transformers.models.ministral3.modeling_ministral3")
        return q * module.get_llama_4_attn_scale(
            torch.arange(1, length + 1)[None], options["alpha"], floor
        )
    counts = range(1, length + 1)
    if rule == "ssmax":
        return (
            q
            * (
                parameters[f"scale.{layer}"][:, None]
                * torch.tensor([math.log(n) for n in counts])
            )[..., None]
        )
    if rule == "logn":
        factors = [
            math.log(n, shape.train_length) if n > shape.train_length else 1.0
            for n in counts
        ]
    else:
        factors = [1 + options["alpha"] * math.log(max(1, n / floor)) for n in counts]
    return q * torch.tensor(factors)[:, None]


class scale_invariant(Around):
    """The paper's equation, around what the oracle of the inner encoding says."""

    CASES = [{}, {"inner": "none", "tau": 3.0}, {"inner": "kerple_log"}]
    GRAPH_BREAKS = REBUILT

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        of_layer = inner(
            parameters, shape, options, q, k, v, x, positions, layer, causal
        )
        logits = of_layer.get("q", q) @ of_layer.get("k", k).mT / math.sqrt(
            shape.head_dim
        ) + of_layer.get("bias", 0)
        growth = torch.log(distances(positions).abs()[:, None] / options["tau"] + 1)
        return {
            "output": (
                softmax(logits * torch.sqrt(2 * growth + 1) - 2 * growth, causal) @ v
            )
        }
