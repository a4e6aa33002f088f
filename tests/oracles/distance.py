"""Biases that depend on distance."""

import math

import torch
import torch.nn.functional as F

from oracles import third_party
from oracles._shared import softmax
from oracles.absolute import waves

EVERYWHERE = ("consecutive", "offset", "gaps", "far", "fractional")


def distances(positions):
    """Query minus key, (1|B, T, T)."""
    return positions[:, :, None] - positions[:, None, :]


def slopes_of(heads):
    """ALiBi's slopes by the authors' rule."""
    regular = 2 ** math.floor(math.log2(heads))
    slopes = []
    for h in range(regular):
        exponent = -8 * (h + 1) / regular
        slopes.append(2**exponent)
    for h in range(heads - regular):
        exponent = -8 * (2 * h + 1) / (2 * regular)
        slopes.append(2**exponent)
    return slopes


def falling_slopes(shape):
    return [1.5 - 0.25 * head for head in range(shape.n_heads)]


class alibi:
    """transformers BLOOM under a causal mask (equal up to a constant per row);
    x-transformers for the rest.
    """

    CASES = [{}, {"slopes": falling_slopes}]

    def reference(shape, options, q, positions, causal, **others):
        slopes = options["slopes"]
        consecutive = bool((positions.diff() == 1).all())
        if slopes is None and causal and consecutive:
            bloom = third_party("transformers.models.bloom.modeling_bloom")
            mask = torch.ones(1, q.shape[2])
            bias = bloom.build_alibi_tensor(mask, shape.n_heads, torch.float32)
            return {"bias": bias[None]}  # (1, H, 1, T)
        x_transformers = third_party("x_transformers.x_transformers")
        module = x_transformers.AlibiPositionalBias(shape.n_heads, slopes=slopes)
        bias = module.forward_custom_pos(positions.expand(len(q), -1))
        return {"bias": bias}


class bam:
    """The authors' equation of their prior, and of their scaled softmax around it, in
    plain loops over heads.
    """

    CASES = [{}, {"location": True}, {"ssmax": True}, {"location": True, "ssmax": True}]
    DTYPE = torch.float64
    POSITIONS = EVERYWHERE

    def parameter_count(shape, options):
        per_head = 2 + options["location"] + options["ssmax"]
        return shape.n_layers * shape.n_heads * per_head

    def reference(
        parameters, shape, options, q, k, v, positions, layer, causal, **others
    ):
        heads = []
        for h in range(shape.n_heads):
            alpha = parameters["scale"][layer][h].exp()
            beta = parameters["exponent"][layer][h]
            place = 0
            if options["location"]:
                learned = parameters["location"][layer][h]
                place = learned.exp() - (-learned).exp()
            away = (-distances(positions) - place).abs()  # (1|B, T, T)
            prior = -((away + 1e-5) ** beta) * alpha

            products = q[:, h] @ k[:, h].mT
            logits = products / math.sqrt(shape.head_dim) + prior
            if options["ssmax"]:
                count = torch.arange(1, q.shape[2] + 1, dtype=torch.float64)
                sharpness = parameters["sharpness"][layer][h]
                logits = logits * sharpness * count.log()[:, None]
            heads.append(logits)
        logits = torch.stack(heads, 1)
        return {"output": softmax(logits, causal) @ v}


class kerple_log:
    """The paper's equation; a number out of its range counts as the nearest one in it,
    and its gradient passes.
    """

    CASES = [{}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        return 2 * shape.n_heads  # shared by all layers

    def reference(parameters, positions, **others):
        far = distances(positions).abs()
        heads = []
        for r1, r2 in zip(parameters["r1"], parameters["r2"], strict=True):
            growth = torch.log(1 + held(r2) * far)
            heads.append(-held(r1) * growth)
        return {"bias": torch.stack(heads, 1)}


def held(number, most=math.inf):
    """The nearest number in 0.01 .. most, which the gradient does not see."""
    value = number.item()
    nearest = min(max(value, 0.01), most)
    return number - value + nearest


class kerple_power(kerple_log):
    """The paper's equation, as there."""

    def reference(parameters, positions, **others):
        far = distances(positions).abs().double()
        heads = []
        for r1, r2 in zip(parameters["r1"], parameters["r2"], strict=True):
            # the logarithm of distance 0 would make gradients that are no numbers
            logarithm = far.clamp(min=1).log()
            power = torch.exp(held(r2, 2.0) * logarithm)
            power = torch.where(far > 0, power, 0)
            heads.append(-held(r1) * power)
        return {"bias": torch.stack(heads, 1)}


class t5:
    """T5's bias, with the buckets of transformers."""

    CASES = [
        {},
        {"num_buckets": 8, "max_distance": 20},
        {"num_buckets": 32, "max_distance": 64},
        {"num_buckets": 7},
    ]
    PARTLY_UNUSED = "buckets beyond the input"

    def parameter_count(shape, options):
        return options["num_buckets"] * shape.n_heads

    def reference(parameters, options, positions, **others):
        module = third_party("transformers.models.t5.modeling_t5")
        buckets = module.T5Attention._relative_position_bucket(
            -distances(positions),
            bidirectional=False,
            num_buckets=options["num_buckets"],
            max_distance=options["max_distance"],
        )
        bias = parameters["table"][buckets]  # (1|B, T, T, H)
        return {"bias": bias.permute(0, 3, 1, 2)}


class sandwich:
    """transformers: inner products of DistilBERT's sinusoidal positions, over the
    heads' strengths.
    """

    CASES = [{}, {"width": 8}]
    TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}  # inner products of 128 numbers, in fp32
    WAVES = {"base": 10000, "layout": "interleaved"}

    def reference(shape, options, positions, **others):
        table = waves(shape.train_length, options["width"], sandwich.WAVES)
        code = table[positions]  # (1|B, T, width)
        heads = []
        for h in range(1, shape.n_heads + 1):
            strength = 8 / shape.n_heads * h
            heads.append(code @ code.mT / strength)
        return {"bias": torch.stack(heads, 1)}


class dynamic_bias:
    """x-transformers' DynamicPositionBias where positions are consecutive, else its
    network at each pair.
    """

    CASES = [{}, {"log": False}, {"width": 5, "depth": 1}]
    PARTLY_UNUSED = "what shifts whole rows: the last constants"

    def parameter_count(shape, options):
        width = options["width"] or shape.d_model // 4
        first = 2 * width
        middle = (options["depth"] - 1) * (width + 1) * width
        last = (width + 1) * shape.n_heads
        return first + middle + last

    def reference(parameters, shape, options, q, positions, **others):
        if len(positions) == 1:
            x_transformers = third_party("x_transformers.x_transformers")
            module = x_transformers.DynamicPositionBias(
                options["width"] or shape.d_model // 4,
                heads=shape.n_heads,
                depth=options["depth"],
                log_distance=options["log"],
            )
            weights = {}
            for name, value in parameters.items():
                theirs = name.replace("network", "mlp")
                weights[theirs] = value
            lengths = (q.shape[2], q.shape[2])
            bias = torch.func.functional_call(module, weights, lengths)
            return {"bias": bias[None]}

        far = distances(positions).float()
        if options["log"]:
            far = far.sign() * torch.log(1 + far.abs())
        hidden = far[..., None]  # (B, T, T, 1)
        for n in range(options["depth"]):
            weight = parameters[f"network.{n}.0.weight"]
            constant = parameters[f"network.{n}.0.bias"]
            hidden = F.silu(hidden @ weight.T + constant)
        weight = parameters[f"network.{options['depth']}.weight"]
        constant = parameters[f"network.{options['depth']}.bias"]
        bias = hidden @ weight.T + constant  # (B, T, T, H)
        return {"bias": bias.movedim(-1, 1)}


class fire:
    """The network run on every pair, from the paper's equation."""

    CASES = [{}, {"threshold": 5.0}, {"threshold": 1000.0}, {"threshold": None}]
    PARTLY_UNUSED = "hidden units that are off at every distance"

    def parameter_count(shape, options):
        # 1 -> 32 -> H, with biases
        network = 32 + 32 + 32 * shape.n_heads + shape.n_heads
        return shape.n_layers * (network + 2)  # and c, and the threshold's multiplier

    def reference(parameters, shape, options, positions, layer, causal, **others):
        start = options["threshold"]
        if start == "quarter":
            start = shape.train_length / 4
        elif start is None:
            start = shape.train_length

        c = parameters["c"][layer]
        threshold = (parameters["multiplier"][layer] * start).abs()
        furthest = torch.maximum(positions[:, :, None], threshold)  # (1|B, T, 1)
        far = distances(positions)
        if causal:
            far = far.clamp(min=0)
        grown = torch.log(abs(c * far) + 1)
        most = torch.log(abs(c * furthest) + 1)
        share = grown / (most + 1e-6)  # (1|B, T, T)

        network = f"networks.{layer}"
        first = share[..., None] @ parameters[f"{network}.0.weight"].T
        hidden = torch.relu(first + parameters[f"{network}.0.bias"])
        last = hidden @ parameters[f"{network}.2.weight"].T
        bias = last + parameters[f"{network}.2.bias"]  # (1|B, T, T, H)
        return {"bias": bias.movedim(-1, 1)}


class grape_a:
    """The paper's equation in plain loops over heads, with ALiBi's slopes by the
    authors' rule.
    """

    CASES = [{}, {"gate": "query"}, {"gate": "both"}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        gates = 2 if options["gate"] == "both" else 1
        return shape.n_layers * shape.n_heads * (1 + gates * shape.head_dim)

    def reference(parameters, shape, q, k, positions, layer, **others):
        def gate(side, head, vectors):  # (B, T)
            if side not in parameters:
                return torch.zeros(vectors.shape[:2])
            along = parameters[side][layer, head]
            length = along.norm() * math.sqrt(shape.head_dim)
            projected = vectors @ along / length
            return torch.log(1 + torch.exp(projected))

        far = distances(positions).abs()
        heads = []
        for h, slope in enumerate(slopes_of(shape.n_heads)):
            learned = parameters["strength"][layer][h]
            strength = torch.log(1 + torch.exp(learned))
            of_queries = gate("query", h, q[:, h])
            of_keys = gate("key", h, k[:, h])
            gates = of_queries[:, :, None] + of_keys[:, None, :]  # (B, T, T)
            heads.append(-slope * strength * far * gates)
        return {"bias": torch.stack(heads, 1)}
