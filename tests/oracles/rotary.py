"""Other rotations: with a decay, learned, or by what the tokens say."""

import math

import torch
import torch.nn.functional as F

from oracles import third_party
from oracles._shared import (
    ROPE_TOLERANCE,
    Ordered,
    flat,
    masked,
    powers,
    softmax,
    turned,
)

LOOKS = "looks at the positions' values, to know how many binary digits they have"


class xpos:
    """x-transformers RotaryEmbedding with use_xpos (interleaved; the half layout is a
    permutation of channels).
    """

    CASES = [{}, {"layout": "half", "scale_base": 20.0}, {"base": 500.0}]
    CAUSAL = (True,)  # the decay would be a growth towards keys after the query
    TOLERANCE = ROPE_TOLERANCE

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        x_transformers = third_party("x_transformers.x_transformers")
        scale_base = options["scale_base"] or shape.train_length / 2
        embedding = x_transformers.RotaryEmbedding(
            shape.head_dim, use_xpos=True, scale_base=scale_base, base=options["base"]
        )
        if options["layout"] == "half":
            q, k = (
                a.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for a in (q, k)
            )
        freqs, scale = embedding(positions)
        q = x_transformers.apply_rotary_pos_emb(q, freqs, scale)
        k = x_transformers.apply_rotary_pos_emb(k, freqs, scale**-1)
        return {"probabilities": softmax(q @ k.mT / math.sqrt(shape.head_dim), causal)}


class pope:
    """x-transformers' PolarEmbedding, one sequence at a time (its positions are those
    of all sequences).
    """

    CASES = [{}, {"base": 500.0, "phase_init": "uniform"}]
    PARTLY_UNUSED = (
        "phases that have left their bounds, where clamping ends the gradient"
    )
    TOLERANCE = ROPE_TOLERANCE

    def parameter_count(shape, options):
        return shape.n_layers * shape.n_heads * shape.head_dim

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        x_transformers = third_party("x_transformers.x_transformers")
        polar = x_transformers.PolarEmbedding(
            shape.head_dim, shape.n_heads, base=options["base"]
        )
        phase = {"learned_bias": parameters["phase"][layer][:, None]}
        apply = x_transformers.apply_polar_pos_emb
        sequences = []
        for b, place in enumerate(positions.expand(len(q), -1)):
            angles, bias = torch.func.functional_call(polar, phase, (place,))
            sequences.append(
                (apply(q[b : b + 1], angles), apply(k[b : b + 1], angles + bias))
            )
        return {
            name: torch.cat(parts)
            for name, parts in zip("qk", zip(*sequences, strict=True), strict=True)
        }


class rope_pp:
    """Plain loops over heads with complex logits; no package has it."""

    CASES = [{}, {"layout": "half", "base": 500.0}]
    DTYPE = torch.float64

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        law = powers(options["base"], shape.head_dim)
        # (1|B, T, T, P)
        turns = torch.exp(
            1j * (positions[:, :, None] - positions[:, None, :])[..., None] * law
        )

        def as_complex(a):
            interleaved = options["layout"] == "interleaved"
            return torch.complex(
                *((a[..., 0::2], a[..., 1::2]) if interleaved else a.chunk(2, dim=-1))
            )

        out = []
        for head in range(shape.n_heads):
            shared = head - head % 2
            query = as_complex(q[:, shared])
            key = as_complex(k[:, shared])
            logits = torch.einsum(
                "bip,bjp,bijp->bij", query, key.conj(), turns.expand(len(q), -1, -1, -1)
            )
            logits = (logits.imag if head % 2 else logits.real) * shape.head_dim**-0.5
            out.append(softmax(logits, causal) @ v[:, shared])
        return {"output": torch.stack(out, dim=1)}


class fope:
    """The paper's sums, with the weights of a learnable scheme; the frozen ones are
    tested in test_schemes.py.
    """

    CASES = [
        {"learnable": True},
        {"learnable": True, "layout": "half", "base": 500.0, "still_sine": 1.0},
        {"gain": 0.0},
    ]
    DTYPE = torch.float64

    def frequencies_within(shape, options):
        law = powers(options["base"], shape.head_dim)
        return law[law * shape.train_length >= 2 * math.pi]

    def parameter_count(shape, options):
        count = len(fope.frequencies_within(shape, options))
        return (
            options["learnable"]
            * shape.n_layers
            * 2
            * shape.n_heads
            * count
            * min(count, shape.head_dim // 4)
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        kept = fope.frequencies_within(shape, options)
        pairs = shape.head_dim // 2
        turning = min(len(kept), shape.head_dim // 4)
        step = math.ceil(len(kept) / turning)
        angles = positions[:, None, :, None] * kept  # (1|B, 1, T, kept)
        parts = []
        for part, waves, still in (
            (0, angles.cos(), 1.0),
            (1, angles.sin(), options["still_sine"]),
        ):
            weights = torch.zeros(len(kept), turning, dtype=torch.float64)
            weights[step * torch.arange(turning), torch.arange(turning)] = 1
            weights = (
                parameters["coefficients"][part, layer]
                if options["learnable"]
                else weights
            )
            parts.append(F.pad(waves @ weights, (0, pairs - turning), value=still))
        return turned(q, k, *parts, options["layout"])


class decoupled_rope:
    """transformers: DeepSeek V3's attention layer (beside), DeepSeek V4's rotation of
    q, k, v, outputs (trailing).
    """

    CASES = [
        {},
        {"turning": 6, "layout": "half"},
        {"placement": "trailing", "turning": 2, "turn_values": True},
    ]

    def parameter_count(shape, options):
        turning = options["turning"] or shape.head_dim // 2
        beside = options["placement"] != "trailing"
        return beside * shape.n_layers * (shape.n_heads + 1) * turning * shape.d_model

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        turning = options["turning"] or shape.head_dim // 2
        mask = masked(torch.zeros(1, 1, q.shape[2], q.shape[2]), causal)
        if options["placement"] == "trailing":
            return {
                "output": deepseek_v4(shape, options, turning, q, k, v, positions, mask)
            }
        query = parameters[f"query.{layer}.weight"]
        key = parameters[f"key.{layer}.weight"]
        return {
            "output": deepseek_v3(
                query, key, shape, options, turning, q, k, v, x, positions, mask
            )
        }


def deepseek_v3(query, key, shape, options, turning, q, k, v, x, positions, mask):
    """Its projections pick q, k, v out of one wide input, x beside them; its norm of
    the latents is left out.
    """
    module = third_party("transformers.models.deepseek_v3.modeling_deepseek_v3")
    heads = shape.n_heads
    width = shape.head_dim
    content = heads * width
    config = third_party("transformers").DeepseekV3Config(
        hidden_size=3 * content + shape.d_model,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=2 * content,
        qk_nope_head_dim=width,
        qk_rope_head_dim=turning,
        v_head_dim=width,
        rope_interleave=options["layout"] == "interleaved",
        rope_parameters={"rope_type": "default", "rope_theta": options["base"]},
        attn_implementation="eager",
    )
    attention = module.DeepseekV3Attention(config, 0)
    attention.kv_a_layernorm = attention.o_proj = torch.nn.Identity()
    pick = torch.eye(3 * content, 3 * content + shape.d_model)
    pick_q = pick[:content].unflatten(0, (heads, width))
    pick_kv = pick[content:]
    from_x = F.pad(query, (3 * content, 0)).unflatten(0, (heads, turning))
    weights = {
        "q_proj.weight": torch.cat((pick_q, from_x), dim=1).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat((pick_kv, F.pad(key, (3 * content, 0)))),
        "kv_b_proj.weight": (
            torch.eye(2 * content)
            .view(2, heads, width, -1)
            .transpose(0, 1)
            .flatten(0, 2)
        ),
    }
    embedded = module.DeepseekV3RotaryEmbedding(config)(x, positions)
    output, _ = torch.func.functional_call(
        attention, weights, (torch.cat((flat(q, k, v), x), -1), embedded, mask)
    )
    return output.unflatten(-1, (heads, width)).transpose(1, 2)


def deepseek_v4(shape, options, turning, q, k, v, positions, mask):
    module = third_party("transformers.models.deepseek_v4.modeling_deepseek_v4")
    angles = positions[..., None] * powers(options["base"], turning)
    cos = angles.cos().float()
    sin = angles.sin().float()
    q, k = (module.apply_rotary_pos_emb(a, cos, sin) for a in (q, k))
    weights = (q @ k.mT * shape.head_dim**-0.5 + mask).softmax(-1)
    if not options["turn_values"]:
        return weights @ v
    out = weights @ module.apply_rotary_pos_emb(v, cos, sin)
    return module.apply_rotary_pos_emb(
        out.transpose(1, 2), cos, -sin, unsqueeze_dim=2
    ).transpose(1, 2)


# -- by what the tokens say
# --------------------------------------------------------------------------------------


class carope(Ordered):
    """Token by token, from the paper's section 2; no package has it."""

    CASES = [{}, {"layout": "half", "base": 500.0}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        return shape.n_layers * shape.n_heads * shape.d_model

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        # 1/f - 1 where xW is 0
        start = (
            torch.tensor(options["base"], dtype=torch.float64) ** (2 / shape.head_dim)
            - 1
        )
        angles = []
        angle = 0
        for t in range(x.shape[1]):
            asked = x[:, t] @ parameters["step"][layer].T + (start.exp() - 1).log()
            f = 1 / (F.softplus(asked) + 1)
            # (B, H, P)
            angle = angle + f[..., None] ** torch.arange(shape.head_dim // 2)
            angles.append(angle)
        angles = torch.stack(angles, 2)
        return turned(q, k, angles.cos(), angles.sin(), options["layout"])


class selective_rope(Ordered):
    """Token by token, from the authors' description; no package has it."""

    CASES = [
        {},
        {"rank": 4, "layout": "half", "base": 500.0, "bias": True, "gate": True},
    ]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        pairs = shape.n_heads * shape.head_dim // 2
        low_rank = options["rank"] * (shape.d_model + pairs)
        gate = options["gate"] * shape.n_heads * (shape.d_model + 1)
        return shape.n_layers * (low_rank + 4 * pairs + options["bias"] * pairs + gate)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        parts = x.split(shape.d_model // shape.n_heads, dim=-1)
        x = torch.cat(
            [
                part / (part.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
                for part in parts
            ],
            dim=-1,
        )
        low = (
            x
            @ parameters[f"down.{layer}.weight"].T
            @ parameters[f"up.{layer}.weight"].T
        )
        # (H P, 4), the last for the token itself
        taps = parameters[f"convolution.{layer}.weight"][:, 0]
        totals = []
        total = 0
        for t in range(x.shape[1]):
            phi = sum(
                low[:, t - back] * taps[:, 3 - back] for back in range(4) if t >= back
            )
            if options["bias"]:
                phi = phi + parameters["constant"][layer].exp()
            phi = phi.view(len(x), shape.n_heads, -1)
            if options["gate"]:
                opened = (
                    x[:, t] @ parameters[f"gate.{layer}.weight"].T
                    + parameters[f"gate.{layer}.bias"]
                )
                phi = phi * torch.sigmoid(opened)[..., None]
            total = total + phi
            totals.append(total)
        angles = torch.stack(totals, 2) * powers(options["base"], shape.head_dim)
        return turned(q, k, angles.cos(), angles.sin(), options["layout"])


class repo:
    """The authors' description: a SwiGLU without a way back, a linear map to heads, and
    a rotation.
    """

    CASES = [{}, {"first": 0, "layout": "half", "base": 500.0}]
    DTYPE = torch.float64
    POSITIONS = ("consecutive", "offset", "gaps", "far", "fractional")

    def first_of(shape, options):
        return (
            round(5 * shape.n_layers / 16)
            if options["first"] is None
            else options["first"]
        )

    def reads_positions(options):
        return options["first"] != 0  # layers below the first one have RoPE

    def parameter_count(shape, options):
        layers = shape.n_layers - repo.first_of(shape, options)
        return layers * (shape.d_model // 8) * (2 * shape.d_model + shape.n_heads)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        at = layer - repo.first_of(shape, options)
        places = positions[:, None]
        if at >= 0:
            gate = x @ parameters[f"gate.{at}.weight"].T
            gated = (
                gate / (1 + (-gate).exp()) * (x @ parameters[f"content.{at}.weight"].T)
            )
            places = (gated @ parameters[f"position.{at}.weight"].T).mT  # (B, H, T)
        angles = places[..., None].double() * powers(options["base"], shape.head_dim)
        return turned(q, k, angles.cos(), angles.sin(), options["layout"])


def generator(entries, width):
    """A skew-symmetric matrix, from what stands above its diagonal, row by row."""
    matrix = torch.zeros(width, width, dtype=entries.dtype)
    rest = iter(entries)
    for i in range(width):
        for j in range(i + 1, width):
            unit = torch.zeros(width, width, dtype=entries.dtype)
            unit[i, j] = 1
            unit[j, i] = -1
            matrix = matrix + unit * next(rest)
    return matrix


class liere:
    """The paper's definition: torch's matrix exponential of the generator times each
    position.
    """

    CASES = [{}, {"per_head": False}, {"block": 4}]
    DTYPE = torch.float64
    GRAPH_BREAKS = LOOKS

    def parameter_count(shape, options):
        heads = shape.n_heads if options.get("per_head", True) else 1
        return (
            shape.n_layers
            * heads
            * shape.head_dim
            * ((options["block"] or shape.head_dim) - 1)
            // 2
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        # of each block, row by row
        above = parameters["above"][layer].expand(shape.n_heads, -1, -1)
        width = shape.head_dim // above.shape[1]
        heads = [
            torch.block_diag(*(generator(entries, width) for entries in blocks))
            for blocks in above
        ]
        step = torch.stack(heads) / shape.train_length  # (H, Dh, Dh)
        # (1|B, H, T, Dh, Dh)
        rotation = torch.linalg.matrix_exp(
            positions[:, None, :, None, None] * step[:, None]
        )
        return {
            "q": (rotation @ q[..., None])[..., 0],
            "k": (rotation @ k[..., None])[..., 0],
        }


class comrope(liere):
    """The same definition."""

    CASES = [{}, {"block": 4, "std": 0.5}, {"block": lambda shape: shape.head_dim}]


class algebraic:
    """The power of torch's matrix exponential at each position, as in the paper's
    section 3.1.
    """

    CASES = [{}, {"decay": 1.0}]
    DTYPE = torch.float64
    GRAPH_BREAKS = LOOKS

    def parameter_count(shape, options):
        return shape.n_heads * shape.head_dim * (shape.head_dim - 1) // 2

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        width = shape.head_dim
        step = [
            torch.linalg.matrix_exp(generator(entries, width))
            for entries in parameters["above"][0, :, 0]
        ]
        maps = torch.stack(
            [
                torch.stack(
                    [
                        torch.stack([torch.linalg.matrix_power(w, int(n)) for n in row])
                        for w in step
                    ]
                )
                for row in positions
            ]
        )  # (1|B, H, T, Dh, Dh)
        rotated = {
            "q": (maps @ q[..., None])[..., 0],
            "k": (maps @ k[..., None])[..., 0],
        }
        distance = (positions[:, None, :, None] - positions[:, None, None, :]).abs()
        logits = (
            rotated["q"] @ rotated["k"].mT / width**0.5 * options["decay"] ** distance
        )
        return {**rotated, "output": softmax(logits, causal) @ v}


class spe:
    """The kernel of each channel at each pair, from the authors' code in the mean of
    its draws.
    """

    CASES = [{}, {"sines": 3}, {"sines": 2, "gated": False}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        return (
            shape.n_layers
            * shape.n_heads
            * shape.head_dim
            * (3 * options["sines"] + options["gated"])
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        gain = F.softplus(parameters["gain"][layer])
        frequency = torch.sigmoid(parameters["frequency"][layer]) / 2  # turns per token
        gate = (
            torch.sigmoid(parameters["gate"][layer])
            if options["gated"]
            else torch.zeros(gain.shape[:2])
        )
        distance = (positions[:, :, None] - positions[:, None, :]).double()
        kernel = 0
        for s in range(options["sines"]):
            angles = (
                2 * math.pi * torch.einsum("bij,hc->bhijc", distance, frequency[..., s])
            )
            waves = torch.cos(angles + parameters["phase"][layer][:, None, None, :, s])
            kernel = kernel + gain[:, None, None, :, s] ** 2 * waves / (
                2 * options["sines"]
            )
        gate = gate[:, None, None, :]
        kernel = (1 - gate) * kernel + gate  # (1|B, H, T, T, Dh)
        logits = torch.einsum(
            "bhic,bhjc,bhijc->bhij", q, k, kernel.expand(len(q), -1, -1, -1, -1)
        )
        return {"output": softmax(logits / math.sqrt(shape.head_dim), causal) @ v}
