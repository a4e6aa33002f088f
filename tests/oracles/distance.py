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
    slopes = [2 ** (-8 * (h + 1) / regular) for h in range(regular)]
    return (
        slopes
        + [2 ** (-8 * (h + 1) / (2 * regular)) for h in range(0, 2 * regular, 2)][
            : heads - regular
        ]
    )


class alibi:
    """transformers BLOOM under a causal mask (equal up to a constant per row);
    x-transformers for the rest.
    """

    CASES = [
        {},
        {"slopes": lambda shape: [1.5 - 0.25 * h for h in range(shape.n_heads)]},
    ]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        slopes = options["slopes"]
        if slopes is None and causal and bool((positions.diff() == 1).all()):
            bloom = third_party("transformers.models.bloom.modeling_bloom")
            bias = bloom.build_alibi_tensor(
                torch.ones(1, q.shape[2]), shape.n_heads, torch.float32
            )
            return {"bias": bias[None]}  # (1, H, 1, T)
        bias = third_party("x_transformers.x_transformers").AlibiPositionalBias(
            shape.n_heads, slopes=slopes
        )
        return {"bias": bias.forward_custom_pos(positions.expand(len(q), -1))}


class bam:
    """The authors' equation of their prior, and of their scaled softmax around it, in
    plain loops over heads.
    """

    CASES = [{}, {"location": True}, {"ssmax": True}, {"location": True, "ssmax": True}]
    DTYPE = torch.float64
    POSITIONS = EVERYWHERE

    def parameter_count(shape, options):
        return (
            shape.n_layers
            * shape.n_heads
            * (2 + options["location"] + options["ssmax"])
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        heads = []
        for h in range(shape.n_heads):
            alpha = parameters["scale"][layer][h].exp()
            beta = parameters["exponent"][layer][h]
            loc = (
                parameters["location"][layer][h]
                if options["location"]
                else torch.zeros(())
            )
            prior = (
                -(
                    ((-distances(positions) - (loc.exp() - (-loc).exp())).abs() + 1e-5)
                    ** beta
                )
                * alpha
            )
            logits = q[:, h] @ k[:, h].mT / math.sqrt(shape.head_dim) + prior
            if options["ssmax"]:
                count = torch.arange(1, q.shape[2] + 1, dtype=torch.float64)
                logits = (
                    logits * parameters["sharpness"][layer][h] * count.log()[:, None]
                )
            heads.append(logits)
        return {"output": softmax(torch.stack(heads, 1), causal) @ v}


class kerple_log:
    """The paper's equation; a number out of its range counts as the nearest one in it,
    and its gradient passes.
    """

    CASES = [{}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        return 2 * shape.n_heads  # shared by all layers

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        rows = zip(
            held(parameters["r1"], math.inf),
            held(parameters["r2"], math.inf),
            strict=True,
        )
        return {
            "bias": torch.stack(
                [
                    -r1 * torch.log(1 + r2 * distances(positions).abs())
                    for r1, r2 in rows
                ],
                1,
            )
        }


def held(numbers, most):
    """Each number as the nearest one in 0.01 .. most, which the gradient does not
    see.
    """
    return torch.stack(
        [r - r.detach() + min(max(r.item(), 0.01), most) for r in numbers]
    )


class kerple_power(kerple_log):
    """The paper's equation, as there."""

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        far = distances(positions).abs().double()
        rows = zip(
            held(parameters["r1"], math.inf), held(parameters["r2"], 2.0), strict=True
        )
        grown = [
            -r1 * torch.where(far > 0, torch.exp(r2 * far.clamp(min=1).log()), 0)
            for r1, r2 in rows
        ]
        return {"bias": torch.stack(grown, 1)}


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

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        attention = third_party("transformers.models.t5.modeling_t5").T5Attention
        sizes = {
            "num_buckets": options["num_buckets"],
            "max_distance": options["max_distance"],
        }
        bucket = attention._relative_position_bucket(
            -distances(positions), bidirectional=False, **sizes
        )
        return {"bias": parameters["table"][bucket].permute(0, 3, 1, 2)}


class sandwich:
    """transformers: inner products of DistilBERT's sinusoidal positions, over the
    heads' strengths.
    """

    CASES = [{}, {"width": 8}]
    TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}  # inner products of 128 numbers, in fp32

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        code = waves(
            shape.train_length,
            options["width"],
            {"base": 10000, "layout": "interleaved"},
        )[positions]
        return {
            "bias": torch.stack(
                [
                    code @ code.mT / (8 / shape.n_heads * h)
                    for h in range(1, shape.n_heads + 1)
                ],
                1,
            )
        }


class dynamic_bias:
    """x-transformers' DynamicPositionBias where positions are consecutive, else its
    network at each pair.
    """

    CASES = [{}, {"log": False}, {"width": 5, "depth": 1}]
    PARTLY_UNUSED = "what shifts whole rows: the last constants"

    def parameter_count(shape, options):
        width = options["width"] or shape.d_model // 4
        depth = options["depth"]
        return (
            2 * width + (depth - 1) * (width + 1) * width + (width + 1) * shape.n_heads
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        depth = options["depth"]
        if len(positions) == 1:
            module = third_party("x_transformers.x_transformers").DynamicPositionBias(
                options["width"] or shape.d_model // 4,
                heads=shape.n_heads,
                depth=depth,
                log_distance=options["log"],
            )
            named = {
                key.replace("network", "mlp"): value
                for key, value in parameters.items()
            }
            return {
                "bias": torch.func.functional_call(
                    module, named, (q.shape[2], q.shape[2])
                )[None]
            }
        far = distances(positions).float()
        hidden = (far.sign() * torch.log(1 + far.abs()) if options["log"] else far)[
            ..., None
        ]
        for n in range(depth):
            hidden = F.silu(
                hidden @ parameters[f"network.{n}.0.weight"].T
                + parameters[f"network.{n}.0.bias"]
            )
        bias = (
            hidden @ parameters[f"network.{depth}.weight"].T
            + parameters[f"network.{depth}.bias"]
        )
        return {"bias": bias.movedim(-1, 1)}


class fire:
    """The network run on every pair, from the paper's equation."""

    CASES = [{}, {"threshold": 5.0}, {"threshold": 1000.0}, {"threshold": None}]
    PARTLY_UNUSED = "hidden units that are off at every distance"

    def parameter_count(shape, options):
        # 1 -> 32 -> H, with biases
        network = 32 + 32 + 32 * shape.n_heads + shape.n_heads
        return shape.n_layers * (network + 2)  # and c, and the threshold's multiplier

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        c = parameters["c"][layer]
        multiplier = parameters["multiplier"][layer]
        names = ("0.weight", "0.bias", "2.weight", "2.bias")
        first, first_bias, last, last_bias = (
            parameters[f"networks.{layer}.{name}"] for name in names
        )
        start = {"quarter": shape.train_length / 4, None: shape.train_length}.get(
            options["threshold"], options["threshold"]
        )
        furthest = torch.maximum(positions[:, :, None], (multiplier * start).abs())
        far = distances(positions).clamp(min=0) if causal else distances(positions)
        share = torch.log(abs(c * far) + 1) / (torch.log(abs(c * furthest) + 1) + 1e-6)
        return {
            "bias": (
                (
                    torch.relu(share[..., None] @ first.T + first_bias) @ last.T
                    + last_bias
                ).movedim(-1, 1)
            )
        }


class grape_a:
    """The paper's equation in plain loops over heads, with ALiBi's slopes by the
    authors' rule.
    """

    CASES = [{}, {"gate": "query"}, {"gate": "both"}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        gates = 2 if options["gate"] == "both" else 1
        return shape.n_layers * shape.n_heads * (1 + gates * shape.head_dim)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        strengths = torch.log(1 + torch.exp(parameters["strength"][layer]))

        def gate(side, head, vectors):  # (B, T)
            if side not in parameters:
                return torch.zeros(vectors.shape[:2])
            along = parameters[side][layer, head]
            return torch.log(
                1
                + torch.exp(vectors @ along / along.norm() / math.sqrt(shape.head_dim))
            )

        heads = []
        for h, slope in enumerate(slopes_of(shape.n_heads)):
            gates = (
                gate("query", h, q[:, h])[:, :, None]
                + gate("key", h, k[:, h])[:, None, :]
            )
            heads.append(-slope * strengths[h] * distances(positions).abs() * gates)
        return {"bias": torch.stack(heads, 1)}
