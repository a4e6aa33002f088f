"""Other rotations: with a decay, learned, or by what the tokens say."""

import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch.func import functional_call

from oracles import third_party
from oracles._shared import (
    ROPE_TOLERANCE,
    Ordered,
    flat,
    masked,
    pairs_of,
    powers,
    softmax,
    turned,
    turned_by,
)
from oracles.distance import EVERYWHERE, distances

LOOKS = "looks at the positions' values, to know how many binary digits they have"


def mapped(maps, q, k):
    """Return q and k times the matrices of their places, (1|B, H, T, Dh, Dh)."""
    q = (maps @ q[..., None])[..., 0]
    k = (maps @ k[..., None])[..., 0]
    return {"q": q, "k": k}


def interleaved(a):
    """Return channels in halves as pairs side by side."""
    halves = a.chunk(2, dim=-1)
    return torch.stack(halves, -1).flatten(-2)


class xpos:
    """x-transformers RotaryEmbedding with use_xpos (interleaved; the half layout is a
    permutation of channels).
    """

    CASES = [{}, {"layout": "half", "scale_base": 20.0}, {"base": 500.0}]
    CAUSAL = (True,)  # the decay would be a growth towards keys after the query
    TOLERANCE = ROPE_TOLERANCE

    def reference(shape, options, q, k, positions, causal, **others):
        x_transformers = third_party("x_transformers.x_transformers")
        embedding = x_transformers.RotaryEmbedding(
            shape.head_dim,
            use_xpos=True,
            scale_base=options["scale_base"] or shape.train_length / 2,
            base=options["base"],
        )
        if options["layout"] == "half":
            q = interleaved(q)
            k = interleaved(k)
        freqs, scale = embedding(positions)
        q = x_transformers.apply_rotary_pos_emb(q, freqs, scale)
        k = x_transformers.apply_rotary_pos_emb(k, freqs, scale**-1)
        logits = q @ k.mT / math.sqrt(shape.head_dim)
        return {"probabilities": softmax(logits, causal)}


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

    def reference(parameters, shape, options, q, k, positions, layer, **others):
        x_transformers = third_party("x_transformers.x_transformers")
        sizes = (shape.head_dim, shape.n_heads)
        polar = x_transformers.PolarEmbedding(*sizes, base=options["base"])
        phase = parameters["phase"][layer]
        named = {"learned_bias": phase[:, None]}
        turn = x_transformers.apply_polar_pos_emb
        queries = []
        keys = []
        for b, places in enumerate(positions.expand(len(q), -1)):
            angles, bias = functional_call(polar, named, (places,))
            queries.append(turn(q[b : b + 1], angles))
            keys.append(turn(k[b : b + 1], angles + bias))
        return {"q": torch.cat(queries), "k": torch.cat(keys)}


class rope_pp:
    """Plain loops over heads with complex logits; no package has it."""

    CASES = [{}, {"layout": "half", "base": 500.0}]
    DTYPE = torch.float64

    def reference(shape, options, q, k, v, positions, causal, **others):
        law = powers(options["base"], shape.head_dim)
        scale = shape.head_dim**-0.5
        angles = distances(positions)[..., None] * law  # (1|B, T, T, P)
        turns = torch.exp(1j * angles)
        turns = turns.expand(len(q), -1, -1, -1)

        heads = []
        for head in range(shape.n_heads):
            is_odd = head % 2 == 1
            shared = head - 1 if is_odd else head
            query = torch.complex(*pairs_of(q[:, shared], options["layout"]))
            key = torch.complex(*pairs_of(k[:, shared], options["layout"]))
            products = torch.einsum("bip,bjp,bijp->bij", query, key.conj(), turns)
            logits = products.imag if is_odd else products.real
            weights = softmax(logits * scale, causal)
            heads.append(weights @ v[:, shared])
        return {"output": torch.stack(heads, dim=1)}


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
        if not options["learnable"]:
            return 0
        count = len(fope.frequencies_within(shape, options))
        turning = min(count, shape.head_dim // 4)
        return 2 * shape.n_layers * shape.n_heads * count * turning

    def reference(parameters, shape, options, q, k, positions, layer, **others):
        kept = fope.frequencies_within(shape, options)
        turning = min(len(kept), shape.head_dim // 4)
        if options["learnable"]:
            of_cosines, of_sines = parameters["coefficients"][:, layer]
        else:
            step = math.ceil(len(kept) / turning)
            of_cosines = torch.zeros(len(kept), turning, dtype=torch.float64)
            for pair in range(turning):
                of_cosines[step * pair, pair] = 1
            of_sines = of_cosines

        angles = positions[:, None, :, None] * kept  # (1|B, 1, T, kept)
        still = (0, shape.head_dim // 2 - turning)
        cos = F.pad(angles.cos() @ of_cosines, still, value=1.0)
        sin = F.pad(angles.sin() @ of_sines, still, value=options["still_sine"])
        return turned(q, k, cos, sin, options["layout"])


TURNED_VALUES = {"placement": "trailing", "turn_values": True}


class decoupled_rope:
    """transformers: DeepSeek V3's attention layer (beside), DeepSeek V4's rotation of
    q, k, v, outputs (trailing).
    """

    CASES = [
        {},
        {"turning": 6, "layout": "half"},
        {**TURNED_VALUES, "turning": 2},
        {**TURNED_VALUES, "turning": lambda shape: shape.head_dim},
    ]

    def parameter_count(shape, options):
        if options["placement"] == "trailing":
            return 0
        turning = options["turning"] or shape.head_dim // 2
        return shape.n_layers * (shape.n_heads + 1) * turning * shape.d_model

    def reference(shape, options, q, causal, **others):
        reading = deepseek_v3
        if options["placement"] == "trailing":
            reading = deepseek_v4
        turning = options["turning"] or shape.head_dim // 2
        length = q.shape[2]
        mask = masked(torch.zeros(1, 1, length, length), causal)
        output = reading(shape, options, turning, mask, q=q, **others)
        return {"output": output}


def deepseek_v3(
    shape, options, turning, mask, parameters, q, k, v, x, positions, layer
):
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
    attention.kv_a_layernorm = torch.nn.Identity()
    attention.o_proj = torch.nn.Identity()

    pick = torch.eye(3 * content, 3 * content + shape.d_model)
    pick_q = pick[:content].unflatten(0, (heads, width))
    pick_kv = pick[content:]
    after_qkv = (3 * content, 0)
    query = F.pad(parameters[f"query.{layer}.weight"], after_qkv)
    query = query.unflatten(0, (heads, turning))
    both = torch.cat((pick_q, query), dim=1)  # (H, Dh + turning, wide)
    key = F.pad(parameters[f"key.{layer}.weight"], after_qkv)
    k_and_v = torch.eye(2 * content).view(2, heads, width, -1)
    k_and_v = k_and_v.transpose(0, 1)
    weights = {
        "q_proj.weight": both.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat((pick_kv, key)),
        "kv_b_proj.weight": k_and_v.flatten(0, 2),
    }

    wide = torch.cat((flat(q, k, v), x), -1)
    embed = module.DeepseekV3RotaryEmbedding(config)
    given = (wide, embed(x, positions), mask)
    output, _ = functional_call(attention, weights, given)
    heads_apart = output.unflatten(-1, (heads, width))
    return heads_apart.transpose(1, 2)


def deepseek_v4(shape, options, turning, mask, q, k, v, positions, **others):
    """Each head is an input of its own. Theirs has one tensor for keys and values: a
    first pass gives it our keys and keeps them, turned; a second one our values.
    """
    package = "transformers.models.deepseek_v4"
    module = third_party(f"{package}.modeling_deepseek_v4")
    width = shape.head_dim
    config = third_party(package).DeepseekV4Config(
        hidden_size=3 * width,
        num_attention_heads=1,
        head_dim=width,
        q_lora_rank=width,
        o_groups=1,
        layer_types=["sliding_attention"],
        num_hidden_layers=1,
    )
    config._attn_implementation = "eager"
    attention = module.DeepseekV4Attention(config, 0)
    for name in ("q_a_norm", "q_b_proj", "q_b_norm", "kv_norm", "o_a_proj", "o_b_proj"):
        setattr(attention, name, torch.nn.Identity())

    keys = []

    def weigh(module, query, key, value, mask, scaling, **others):
        keys.append(key)
        weights = (query @ keys[0].mT * scaling + mask).softmax(-1)
        out = weights @ value
        by_token = out.transpose(1, 2)
        return by_token, weights

    angles = positions[..., None] * powers(options["base"], turning)
    of_batch = angles.expand(len(q), -1, -1)
    angles = of_batch.repeat_interleave(shape.n_heads, dim=0)
    cos = angles.cos().float()
    sin = angles.sin().float()
    turns = {"main": (cos, sin)}
    wide = torch.cat((q, k, v), -1)
    wide = wide.flatten(0, 1)  # (B·H, T, 3 Dh)
    pick_q, pick_k, pick_v = torch.eye(3 * width).chunk(3)
    with mock.patch.object(module, "eager_attention_forward", weigh):
        for pick_kv in (pick_k, pick_v):
            weights = {"q_a_proj.weight": pick_q}
            weights["kv_proj.weight"] = pick_kv
            given = (wide, turns, positions, mask)
            output, _ = functional_call(attention, weights, given)
    return output.unflatten(0, q.shape[:2])


# -- by what the tokens say
# --------------------------------------------------------------------------------------


class carope(Ordered):
    """Token by token, from the paper's section 2; no package has it."""

    CASES = [{}, {"layout": "half", "base": 500.0}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        return shape.n_layers * shape.n_heads * shape.d_model

    def reference(parameters, shape, options, q, k, x, layer, **others):
        base = torch.tensor(options["base"], dtype=torch.float64)
        start = base ** (2 / shape.head_dim) - 1  # 1/f - 1 where xW is 0
        constant = (start.exp() - 1).log()
        step = parameters["step"][layer]
        pairs = torch.arange(shape.head_dim // 2)
        angles = []
        angle = 0
        for t in range(x.shape[1]):
            asked = x[:, t] @ step.T + constant
            f = 1 / (F.softplus(asked) + 1)  # (B, H)
            angle = angle + f[..., None] ** pairs  # (B, H, P)
            angles.append(angle)
        angles = torch.stack(angles, 2)
        return turned_by(angles, q, k, options["layout"])


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
        convolution = 4 * pairs
        per_layer = low_rank + convolution
        if options["bias"]:
            per_layer += pairs
        if options["gate"]:
            per_layer += shape.n_heads * (shape.d_model + 1)
        return shape.n_layers * per_layer

    def reference(parameters, shape, options, q, k, x, layer, **others):
        parts = x.unflatten(-1, (shape.n_heads, -1))
        squares = parts.pow(2).sum(-1, keepdim=True)
        size = (squares + 1e-6).sqrt()
        x = (parts / size).flatten(-2)
        low = x @ parameters[f"down.{layer}.weight"].T
        low = low @ parameters[f"up.{layer}.weight"].T
        # (H P, 4), the last for the token itself
        taps = parameters[f"convolution.{layer}.weight"][:, 0]

        totals = []
        total = 0
        for t in range(x.shape[1]):
            phi = 0
            for back in range(min(4, t + 1)):
                phi = phi + low[:, t - back] * taps[:, 3 - back]
            if options["bias"]:
                phi = phi + parameters["constant"][layer].exp()
            phi = phi.view(len(x), shape.n_heads, -1)
            if options["gate"]:
                opened = x[:, t] @ parameters[f"gate.{layer}.weight"].T
                opened = torch.sigmoid(opened + parameters[f"gate.{layer}.bias"])
                phi = phi * opened[..., None]
            total = total + phi
            totals.append(total)
        angles = torch.stack(totals, 2) * powers(options["base"], shape.head_dim)
        return turned_by(angles, q, k, options["layout"])


class repo:
    """The authors' description: a SwiGLU without a way back, a linear map to heads, and
    a rotation.
    """

    CASES = [{}, {"first": 0, "layout": "half", "base": 500.0}]
    DTYPE = torch.float64
    POSITIONS = EVERYWHERE

    def first_of(shape, options):
        if options["first"] is None:
            return round(5 * shape.n_layers / 16)
        return options["first"]

    def reads_positions(options):
        return options["first"] != 0  # layers below the first one have RoPE

    def parameter_count(shape, options):
        layers = shape.n_layers - repo.first_of(shape, options)
        hidden = shape.d_model // 8
        return layers * hidden * (2 * shape.d_model + shape.n_heads)

    def reference(parameters, shape, options, q, k, x, positions, layer, **others):
        at = layer - repo.first_of(shape, options)
        places = positions[:, None]
        if at >= 0:
            gate = x @ parameters[f"gate.{at}.weight"].T
            swish = gate / (1 + (-gate).exp())
            content = x @ parameters[f"content.{at}.weight"].T
            gated = swish * content
            of_heads = gated @ parameters[f"position.{at}.weight"].T
            places = of_heads.mT  # (B, H, T)
        law = powers(options["base"], shape.head_dim)
        angles = places[..., None].double() * law
        return turned_by(angles, q, k, options["layout"])


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
        block = options["block"] or shape.head_dim
        per_head = shape.head_dim * (block - 1) // 2
        return shape.n_layers * heads * per_head

    def reference(parameters, shape, q, k, positions, layer, **others):
        # of each block, row by row
        above = parameters["above"][layer].expand(shape.n_heads, -1, -1)
        width = shape.head_dim // above.shape[1]
        heads = []
        for blocks in above:
            generators = [generator(entries, width) for entries in blocks]
            heads.append(torch.block_diag(*generators))
        step = torch.stack(heads) / shape.train_length  # (H, Dh, Dh)
        turns = positions[:, None, :, None, None] * step[:, None]
        return mapped(torch.linalg.matrix_exp(turns), q, k)


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

    def reference(parameters, shape, options, q, k, v, positions, causal, **others):
        heads = []
        for entries in parameters["above"][0, :, 0]:
            of_head = generator(entries, shape.head_dim)
            step = torch.linalg.matrix_exp(of_head)
            maps = []
            for place in positions.flatten().tolist():
                power = torch.linalg.matrix_power(step, place)
                maps.append(power)
            by_place = torch.stack(maps).unflatten(0, positions.shape)
            heads.append(by_place)
        maps = torch.stack(heads, dim=1)
        rotated = mapped(maps, q, k)

        far = distances(positions).abs()[:, None]
        decay = options["decay"] ** far
        logits = rotated["q"] @ rotated["k"].mT / shape.head_dim**0.5
        weights = softmax(logits * decay, causal)
        return {**rotated, "output": weights @ v}


class spe:
    """The kernel of each channel at each pair, from the authors' code in the mean of
    its draws.
    """

    CASES = [{}, {"sines": 3}, {"sines": 2, "gated": False}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        per_channel = 3 * options["sines"] + options["gated"]
        return shape.n_layers * shape.n_heads * shape.head_dim * per_channel

    def reference(
        parameters, shape, options, q, k, v, positions, layer, causal, **others
    ):
        gain = F.softplus(parameters["gain"][layer])  # (H, Dh, sines)
        share = torch.sigmoid(parameters["frequency"][layer])
        frequency = share / 2  # turns per token
        phase = parameters["phase"][layer]
        distance = distances(positions).double()
        kernel = 0  # (1|B, H, T, T, Dh)
        for s in range(options["sines"]):
            turns = torch.einsum("bij,hc->bhijc", distance, frequency[..., s])
            angles = 2 * math.pi * turns + phase[:, None, None, :, s]
            squared = gain[:, None, None, :, s] ** 2
            strength = squared / (2 * options["sines"])
            kernel = kernel + strength * angles.cos()
        if options["gated"]:
            gate = torch.sigmoid(parameters["gate"][layer])
            gate = gate[:, None, None]
            kernel = (1 - gate) * kernel + gate
        kernel = kernel.expand(len(q), -1, -1, -1, -1)
        products = torch.einsum("bhic,bhjc,bhijc->bhij", q, k, kernel)
        logits = products / math.sqrt(shape.head_dim)
        return {"output": softmax(logits, causal) @ v}
