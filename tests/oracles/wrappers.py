"""Wrappers, around the oracle of the encoding inside."""

import dataclasses
import math
import types

import torch
import torch.nn.functional as F
from torch.func import functional_call

from oracles import third_party
from oracles._shared import (
    Around,
    flat,
    inner,
    inner_count,
    inner_output,
    logits_of,
    masked,
    output_of,
    softmax,
)
from oracles.distance import EVERYWHERE, distances

REBUILT = "each forward pass builds anew what a layer uses of the inner encoding"
NONE = {"name": "none"}
SLOW_ROPE = {"name": "rope", "base": 500.0}
SMALL_T5 = {"name": "t5", "num_buckets": 8, "max_distance": 20}


class Counting(Around):
    """Of those that count tokens: positions are read by the encoding inside alone."""

    GRAPH_BREAKS = REBUILT

    def reads_positions(options):
        return options["inner"] not in ("none", "fox")


def made_of(options, q, k, v, **others):
    """Return the output of made q, k and v; without an encoding inside q and k, too."""
    output = inner_output(options=options, q=q, k=k, v=v, **others)
    if options["inner"] == "none":
        return {"q": q, "k": k, "output": output}
    return {"output": output}


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
        per_head = shape.n_layers * shape.head_dim * options["width"]
        count = inner_count(shape, options)
        for name in options["convolved"]:
            n_heads = shape.n_heads if name == "q" else shape.n_kv_heads
            count += n_heads * per_head
        return count

    def reference(parameters, shape, options, layer, q, k, v, **others):
        inkling = third_party("transformers.models.inkling.modeling_inkling")
        sizes = (shape.d_model, options["width"])
        convolution = inkling.InklingShortConvolution(*sizes, layer_idx=0, conv_idx=0)
        convolved = {"q": q, "k": k, "v": v}
        for name in options["convolved"]:
            weight = parameters[f"weights.{name}"][layer]
            by_channel = weight.flatten(0, 1)[:, None]
            named = {"conv1d.weight": by_channel}
            wide = flat(convolved[name])
            out = functional_call(convolution, named, (wide,))
            if not options["residual"]:
                out = out - wide
            heads = out.unflatten(2, (shape.n_heads, shape.head_dim))
            convolved[name] = heads.transpose(1, 2)
        given = {"parameters": parameters, "shape": shape, "layer": layer}
        return made_of(options, **given, **convolved, **others)


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
        channels = (shape.n_heads + shape.n_kv_heads) * shape.head_dim
        of_channel = options["channel_width"] + 1
        of_head = shape.head_dim * options["head_width"] + 1
        count = shape.n_layers * channels * (of_channel + of_head)
        return count + inner_count(shape, options)

    def reference(parameters, shape, options, layer, q, k, v, **others):
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
        zaya = third_party("transformers.models.zaya.modeling_zaya")
        projection = zaya.ZayaCCAProjection(config, 0)
        pick = torch.eye(3 * size)
        half = 5 * size // 2
        named = {
            "q_proj.weight": pick[:size],
            "k_proj.weight": pick[size : 2 * size],
            "v_proj_current.weight": pick[2 * size : half],
            "v_proj_delayed.weight": pick[half:],
        }
        for kind in ("weight", "bias"):
            by_channel = parameters[f"by_channel.{layer}.{kind}"]
            named[f"conv_qk_depthwise.{kind}"] = by_channel
            named[f"conv_qk_grouped.{kind}"] = parameters[f"by_head.{layer}.{kind}"]
        wide = (flat(q, k, v), None)
        made = functional_call(projection, named, wide)
        q, k, v = [each.transpose(1, 2) for each in made]
        given = {"parameters": parameters, "shape": shape, "layer": layer}
        return made_of(options, q, k, v, **given, **others)


def leaky_relu(a):
    return torch.where(a > 0, a, 0.01 * a)


def zero_at_the_query(bias):
    """Return a bias of which the oracle leaves a constant per row open as its formula
    has it.
    """
    at_query = bias.diagonal(dim1=-2, dim2=-1)
    return bias - at_query[..., None]


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
        taps = shape.n_heads * options.get("kernel", 1)
        hidden = options["hidden"]
        first = (2 * taps + 1) * hidden
        second = hidden * taps + shape.n_heads
        count = shape.n_layers * (first + second)
        if options["per_layer"]:
            one = dataclasses.replace(shape, n_layers=1)
            return count + shape.n_layers * inner_count(one, options)
        return count + inner_count(shape, options)

    def inputs(shape, options, q, k, layer, **others):
        """Return the bias of the encoding inside, (B, H, T, T), and logits and biases
        over the heads, (B, T, T, 2H).
        """
        logits = q @ k.mT / shape.head_dim**0.5
        place = {"at": 0, "layer": layer}
        if options["per_layer"]:
            place = {"at": layer, "layer": 0}
        of_layer = inner(shape=shape, options=options, q=q, k=k, **place, **others)
        bias = of_layer["bias"].expand(logits.shape)
        if options["inner"] in ("alibi", "fox"):
            bias = zero_at_the_query(bias)
        both = torch.cat((logits, bias), dim=1)
        return bias, both.movedim(1, -1)

    def reference(parameters, layer, **others):
        bias, both = dape.inputs(parameters=parameters, layer=layer, **others)
        network = f"networks.{layer}"
        hidden = both @ parameters[f"{network}.0.weight"].T
        hidden = leaky_relu(hidden + parameters[f"{network}.0.bias"])
        added = hidden @ parameters[f"{network}.2.weight"].T
        added = added + parameters[f"{network}.2.bias"]  # (B, T, T, H)
        return {"bias": bias + added.movedim(-1, 1)}


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

    def reference(parameters, options, layer, causal, **others):
        given = {"parameters": parameters, "options": options, "layer": layer}
        bias, both = dape.inputs(causal=causal, **given, **others)
        reach = options["kernel"] // 2

        def convolved(keys, j, number):
            """Return a convolution's output at key j; keys that are not there are 0."""
            weight = parameters[f"networks.{layer}.{number}.weight"]
            total = parameters[f"networks.{layer}.{number}.bias"]
            for tap in range(-reach, reach + 1):
                if j + tap in keys:
                    of_tap = weight[:, :, 0, tap + reach]
                    total = total + keys[j + tap] @ of_tap.T
            return total

        length = both.shape[1]
        rows = []
        for i in range(length):
            seen = i + 1 if causal else length
            keys = {j: both[:, i, j] for j in range(seen)}
            hidden = {}
            for j in range(seen + reach):
                before = convolved(keys, j, 0)
                hidden[j] = leaky_relu(before)
            row = torch.zeros_like(bias[:, :, i])
            for j in range(seen):
                row[:, :, j] = convolved(hidden, j, 2)
            rows.append(row)
        return {"bias": bias + torch.stack(rows, dim=2)}


class learned_sinks(Counting):
    """transformers' gpt-oss attention, given the queries, keys and biases of the inner
    encoding's oracle.
    """

    CASES = [{}, {"inner": "none"}, {"inner": "alibi"}, {"inner": "fox"}]

    def parameter_count(shape, options):
        return shape.n_layers * shape.n_heads + inner_count(shape, options)

    def reference(parameters, shape, q, k, v, layer, causal, **others):
        given = {"parameters": parameters, "shape": shape, "layer": layer}
        of_layer = inner(q=q, k=k, v=v, causal=causal, **given, **others)
        q = of_layer.get("q", q)
        k = of_layer.get("k", k)
        bias = torch.as_tensor(of_layer.get("bias", 0.0))
        bias = bias.expand(*q.shape[:3], q.shape[2])
        # a sink would see a number that a whole row has
        bias = zero_at_the_query(bias)
        mask = masked(bias, causal)

        module = types.SimpleNamespace(num_key_value_groups=1, training=False)
        module.sinks = parameters["sinks"][layer]
        scaling = shape.head_dim**-0.5
        gpt_oss = third_party("transformers.models.gpt_oss.modeling_gpt_oss")
        attend = gpt_oss.eager_attention_forward
        output, _ = attend(module, q, k, v, mask, scaling=scaling)
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

    def reference(shape, options, **others):
        length = options["max_length"] or 16 * shape.train_length
        wide = dataclasses.replace(shape, train_length=length)
        return {"output": inner_output(shape=wide, options=options, **others)}


def lengthened(shape, options):
    length = shape.train_length + options["shift"]
    return dataclasses.replace(shape, train_length=length)


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

    def parameter_count(shape, options):
        return inner_count(lengthened(shape, options), options)

    def reference(shape, options, **others):
        given = {"shape": lengthened(shape, options), "options": options}
        if options["inner"] == "learned":
            return inner(**given, **others)
        return {"output": inner_output(**given, **others)}


class pose(randomized):
    """As randomized; test_wrappers.py looks at the draws."""

    CASES = [{}, {"inner": "alibi", "max_length": 2048}]


def slopes_of_heads(shape):
    return {"slopes": [1.5 - 0.25 * head for head in range(shape.n_heads)]}


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
        {"inner": "alibi", "inner_options": slopes_of_heads},
    ]
    POSITIONS = EVERYWHERE

    def reference(shape, options, x, positions, **others):
        given = options["inner_options"]
        if options["inner"] == "alibi":
            slopes = torch.tensor(given["slopes"])[:, None, None]
            far = distances(positions).abs()[:, None]
            return {"bias": -slopes * far}

        base = given.get("base", 10000.0)
        half = shape.d_model // 2
        code = torch.zeros(*positions.shape, shape.d_model)
        for pair in range(half):
            first = 2 * pair
            second = first + 1
            if given.get("layout") == "halves":
                first = pair
                second = pair + half
            frequency = base ** (-pair / half)
            for b, row in enumerate(positions.tolist()):
                for t, place in enumerate(row):
                    angle = place * frequency
                    code[b, t, first] = math.sin(angle)
                    code[b, t, second] = math.cos(angle)
        scale = given.get("scale", shape.token_rms)
        return {"embedded": x + scale * code}


def inside(entry):
    """An entry as the options of a wrapper around its encoding."""
    options = {**entry}
    name = options.pop("name")
    options.pop("window", None)
    options.pop("chunk", None)
    return {"inner": name, "inner_options": options}


class layered(Around):
    """Each layer by the oracle of the encoding it uses, under that layer's window."""

    CASES = [
        {},
        {"layers": [{"name": "rope", "window": 5}, NONE, SLOW_ROPE]},
        {"layers": [{"name": "alibi", "window": 7}, SMALL_T5]},
        {"layers": [{"name": "rope", "chunk": 5}, {"name": "alibi", "chunk": 3}, NONE]},
    ]

    def entries(shape, options):
        """Return what each layer uses, and the different ones among them."""
        pattern = options["layers"]
        entries = [pattern[i % len(pattern)] for i in range(shape.n_layers)]
        distinct = []
        for entry in entries:
            if entry not in distinct:
                distinct.append(entry)
        return entries, distinct

    def parameter_count(shape, options):
        entries, distinct = layered.entries(shape, options)
        count = 0
        for entry in distinct:
            n_layers = entries.count(entry)
            narrow = dataclasses.replace(shape, n_layers=n_layers)
            count += inner_count(narrow, inside(entry))
        return count

    def reference(shape, options, q, k, v, layer, causal, **others):
        entries, distinct = layered.entries(shape, options)
        entry = entries[layer]
        # of a model that has the layers of this entry alone
        n_layers = entries.count(entry)
        given = {
            "shape": dataclasses.replace(shape, n_layers=n_layers),
            "layer": entries[:layer].count(entry),
            "options": inside(entry),
            "at": distinct.index(entry),
        }
        of_layer = inner(q=q, k=k, v=v, causal=causal, **given, **others)
        window = entry.get("window")
        chunk = entry.get("chunk")
        return {"output": output_of(of_layer, q, k, v, causal, window, chunk)}


class heads(Around):
    """Each block of heads by the oracle of the encoding it uses; which head is in which
    block is a loop.
    """

    CASES = [
        {},
        {"heads": [SLOW_ROPE, NONE, {"name": "fox"}]},
        {"heads": [SLOW_ROPE, {"name": "pope", "base": 90.0}]},
        {"heads": [{"name": "alibi"}, SMALL_T5]},
    ]
    PARTLY_UNUSED = "phases of pope that have left their bounds"

    def blocks(shape, options):
        """Yield the entries that have heads, each with these heads and the shape of a
        model of as many.
        """
        entries = options["heads"]
        blocks = [[] for _ in entries]
        for head in range(shape.n_heads):
            number = head * len(entries) // shape.n_heads
            blocks[number].append(head)
        for entry, block in zip(entries, blocks, strict=True):
            if not block:
                continue
            size = len(block)
            width = size * shape.head_dim
            if entry["name"] == "fox":  # which reads x
                width = shape.d_model
            sizes = {"d_model": width, "n_heads": size, "n_kv_heads": size}
            narrow = dataclasses.replace(shape, **sizes)
            yield entry, block, narrow

    def parameter_count(shape, options):
        count = 0
        for entry, _, narrow in heads.blocks(shape, options):
            count += inner_count(narrow, inside(entry))
        return count

    def reference(shape, options, q, k, v, causal, **others):
        outputs = []
        for entry, block, narrow in heads.blocks(shape, options):
            given = {"shape": narrow, "options": inside(entry), "at": len(outputs)}
            own = {"q": q[:, block], "k": k[:, block], "v": v[:, block]}
            output = inner_output(**own, causal=causal, **given, **others)
            outputs.append(output)
        return {"output": torch.cat(outputs, dim=1)}


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
        {"rule": "asentmax", "inner": "none"},
    ]
    LEARNED = {"ssmax": 1, "mistral_large4": 2}

    def parameter_count(shape, options):
        per_head = temperature.LEARNED.get(options["rule"], 0)
        if options["rule"] == "asentmax":
            per_head = 2 * shape.d_model
        return per_head * shape.n_layers * shape.n_heads

    def reference(parameters, shape, options, q, k, v, layer, causal, **others):
        given = {"parameters": parameters, "shape": shape, "layer": layer}
        given["options"] = options
        of_layer = inner(q=q, k=k, v=v, causal=causal, **given, **others)
        of_layer.pop("output", None)
        turned = of_layer.get("q", q)
        x = others["x"]
        of_layer["q"] = sharpened(turned, parameters, shape, options, layer, x)
        of_layer["output"] = output_of(of_layer, q, k, v, causal)
        return of_layer


def sharpened(q, parameters, shape, options, layer, x):
    rule = options["rule"]
    length = q.shape[2]
    if rule == "asentmax":
        beta = F.softplus(x @ parameters[f"beta.{layer}.weight"].T)
        gamma = 2 * torch.tanh(x @ parameters[f"gamma.{layer}.weight"].T)
        counts = torch.arange(2, length + 2)[:, None]
        factor = 1 + beta * torch.log(counts) ** gamma  # (B, T, H)
        return q * factor.mT[..., None]
    alpha = options["alpha"]
    floor = options["floor"] or shape.train_length
    if rule == "mistral_large4":
        models = "transformers.models.mistral_large4"
        mistral = third_party(f"{models}.modeling_mistral_large4")
        module = mistral.MistralLarge4TextSoftmaxScaling(shape.n_heads)
        scale = parameters[f"scale.{layer}"]
        bias = parameters[f"offset.{layer}"]
        positions = torch.arange(length)[None]
        learned = {"scale": scale, "bias": bias}
        return functional_call(module, learned, (q, positions, True))
    if rule == "llama4":  # Ministral 3 counts positions from 0, Llama 4 tokens
        module = third_party("transformers.models.ministral3.modeling_ministral3")
        counts = torch.arange(1, length + 1)[None]
        return q * module.get_llama_4_attn_scale(counts, alpha, floor)

    factors = []
    for count in range(1, length + 1):
        if rule == "ssmax":
            factor = math.log(count)
        elif rule == "logn":
            longer = max(count, shape.train_length)
            factor = math.log(longer, shape.train_length)
        else:
            growth = max(1, count / floor)
            factor = 1 + alpha * math.log(growth)
        factors.append(factor)
    factors = torch.tensor(factors)
    if rule == "ssmax":
        of_heads = parameters[f"scale.{layer}"]
        factors = of_heads[:, None] * factors  # (H, T)
    return q * factors[..., None]


class entmax(Counting):
    """Weights by bisection, their gradients by the Jacobian of the paper, on logits of
    the inner encoding's oracle.
    """

    CASES = [{}, {"inner": "rope", "alpha": 1.25}, {"inner": "fox", "alpha": 1.75}]

    def parameter_count(shape, options):
        return inner_count(shape, with_asentmax(options))

    def reference(options, q, k, v, causal, **others):
        given = {"options": with_asentmax(options), "causal": causal}
        of_layer = inner(q=q, k=k, v=v, **given, **others)
        logits = logits_of(of_layer, q, k).double()
        logits = masked(logits, causal).clamp(min=-1e4)
        less_1 = options["alpha"] - 1
        weights = bisected(less_1 * logits.detach(), 1 / less_1)

        # the Jacobian is diag(s) - s sᵀ / sum of s
        s = weights ** (1 - less_1)
        change = logits - logits.detach()  # 0, with gradients
        mean = s / s.sum(-1, keepdim=True)
        common = (mean * change).sum(-1, keepdim=True)
        weights = weights + s * (change - common)
        return {"output": weights @ v.double()}


def with_asentmax(options):
    """Return options with the rule that a temperature inside has by default."""
    if options["inner"] != "temperature":
        return options
    of_inner = {"rule": "asentmax"} | options["inner_options"]
    return options | {"inner_options": of_inner}


def bisected(z, power):
    """Return max(0, z - tau)^power with the tau for which a row's sum is 1."""
    high = z.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(60):
        tau = (low + high) / 2
        weights = (z - tau).clamp(min=0) ** power
        is_low = weights.sum(-1, keepdim=True) > 1
        low = torch.where(is_low, tau, low)
        high = torch.where(is_low, high, tau)
    return weights


class scale_invariant(Around):
    """The paper's equation, around what the oracle of the inner encoding says."""

    CASES = [{}, {"inner": "none", "tau": 3.0}, {"inner": "kerple_log"}]
    GRAPH_BREAKS = REBUILT

    def reference(options, q, k, v, positions, causal, **others):
        given = {"options": options, "positions": positions, "causal": causal}
        of_layer = inner(q=q, k=k, v=v, **given, **others)
        far = distances(positions).abs()[:, None]
        growth = torch.log(far / options["tau"] + 1)
        scale = torch.sqrt(2 * growth + 1)
        logits = logits_of(of_layer, q, k) * scale - 2 * growth
        return {"output": softmax(logits, causal) @ v}
