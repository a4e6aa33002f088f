"""Order from the content."""

import importlib.util
import math
import sys
import types
from unittest import mock

import torch
import torch.nn.functional as F
from torch.func import functional_call

from oracles import third_party
from oracles._shared import Ordered, fla, flat, masked


def gates_of(weight, constant, x):
    """Return what a linear map of x gives to each head, (B, H, T)."""
    return torch.einsum("btd,hd->bht", x, weight) + constant[:, None]


class fox(Ordered):
    """fla-core's naive forgetting attention for the causal output, x-transformers'
    DataDependentAlibi for the bias.
    """

    CASES = [{}]

    def parameter_count(shape, options):
        return shape.n_layers * shape.n_heads * (shape.d_model + 1)

    def reference(parameters, shape, q, k, v, x, layer, causal, **others):
        weight = parameters["weight"][layer]
        constant = parameters["gate_bias"][layer]
        x_transformers = third_party("x_transformers.x_transformers")
        sizes = (shape.d_model, shape.n_heads)
        module = x_transformers.DataDependentAlibi(*sizes, causal=True)
        named = dict(module.named_parameters())
        assert len(named) == 2, named
        for name in named:
            named[name] = weight if name.endswith("weight") else constant
        bias = functional_call(module, named, (x,))
        out = {"bias": bias}
        if causal:
            gates = F.logsigmoid(gates_of(weight, constant, x))
            naive = fla("forgetting_attn", "naive_forgetting_attn")
            out["output"] = naive(q, k, v, gates)
        return out


class cable(fox):
    """Plain loops from the paper's equation for the bias, fox with turned signs for the
    causal output.
    """

    CASES = [{}, {"gate_bias": -2.0}]

    def reference(parameters, x, layer, **others):
        weight = parameters["weight"][layer]
        constant = parameters["gate_bias"][layer]
        gates = gates_of(weight, constant, x)
        lengths = torch.log(1 + torch.exp(gates))
        rows = []
        for i in range(x.shape[1]):
            row = []
            for j in range(x.shape[1]):
                # Keys after the query, visible only without a mask, are brought nearer
                # by what lies between.
                after = lengths[..., i + 1 : j + 1].sum(-1)
                before = lengths[..., j + 1 : i + 1].sum(-1)
                row.append(after - before)
            rows.append(torch.stack(row, dim=-1))

        turned = {name: -value for name, value in parameters.items()}
        of_fox = fox.reference(turned, x=x, layer=layer, **others)
        of_fox["bias"] = torch.stack(rows, 2)
        return of_fox


_NONE = {
    "kv_shift": False,
    "qk_norm": False,
    "output_norm": False,
    "output_gate": False,
}


class fox_pro(Ordered):
    """fla-core's naive forgetting attention on keys and values that plain loops have
    shifted; norms by loops.
    """

    CASES = [
        {},
        {**_NONE, "kv_shift": True},
        {**_NONE, "qk_norm": True, "output_gate": True},
    ]
    CAUSAL = (True,)

    def parameter_count(shape, options):
        width = shape.head_dim
        per_layer = shape.n_heads * (shape.d_model + 1)
        if options["output_gate"]:
            per_layer += shape.n_heads * width * shape.d_model
        if options["qk_norm"]:
            per_layer += (shape.n_heads + shape.n_kv_heads) * width
        if options["output_norm"]:
            per_layer += shape.n_heads * width
        if options["kv_shift"]:
            per_layer += 2 * shape.n_kv_heads * shape.d_model
        return shape.n_layers * per_layer

    def reference(parameters, shape, options, q, k, v, x, layer, **others):
        def shifted(name, a):
            weight = parameters[f"shifts.{name}"][layer]
            rows = []
            before = torch.zeros_like(a[:, :, 0])
            for t in range(a.shape[2]):
                asked = x[:, t] @ weight.T
                share = torch.sigmoid(asked)[..., None]
                now = a[:, :, t]
                rows.append(share * before + (1 - share) * now)
                before = now
            return torch.stack(rows, 2)

        def normed(name, a, epsilon):
            square = a.pow(2).mean(-1, keepdim=True)
            size = (square + epsilon).sqrt()
            return a / size * parameters[f"norms.{name}"][layer]

        if options["kv_shift"]:
            k = shifted("k", k)
            v = shifted("v", v)
        if options["qk_norm"]:
            q = normed("q", q, 1e-5)
            k = normed("k", k, 1e-5)
        weight = parameters["weight"][layer]
        constant = parameters["gate_bias"][layer]
        gates = gates_of(weight, constant, x)
        naive = fla("forgetting_attn", "naive_forgetting_attn")
        out = naive(q, k, v, F.logsigmoid(gates))
        if options["output_norm"]:
            out = normed("output", out, 1e-6)
        if options["output_gate"]:
            opened = torch.sigmoid(x @ parameters["output_gate"][layer].T)
            of_heads = opened.split(shape.head_dim, dim=-1)
            out = out * torch.stack(of_heads, 1)
        return {"output": out}


def cumulative_sum(g, scale, cu_seqlens=None):
    return g.cumsum(1) * scale


class wall(Ordered):
    """The plain form in fla, whose two helpers are stood in for, since their package
    wants triton.
    """

    CASES = [{}, {"gate_bias": 0.0}]
    CAUSAL = (True,)

    def parameter_count(shape, options):
        channels = shape.n_heads * shape.head_dim
        return shape.n_layers * channels * (shape.d_model + 1)

    def reference(parameters, shape, q, k, v, x, layer, **others):
        weight = parameters["weight"][layer]
        constant = parameters["gate_bias"][layer]
        channels = gates_of(weight, constant, x)
        gates = F.logsigmoid(channels)
        gates = gates.unflatten(1, (shape.n_heads, shape.head_dim)).mT
        scale = shape.head_dim**-0.5
        naive = wall.naive()
        return {"output": naive(q, k, v, gates, scale=scale)}

    def naive():
        package = types.ModuleType("fla")
        package.__spec__ = importlib.util.find_spec("fla")  # where the file is
        constant = types.ModuleType("fla.ops.utils.constant")
        constant.RCP_LN2 = 1 / math.log(2)
        cumsum = types.ModuleType("fla.ops.utils.cumsum")
        cumsum.chunk_global_cumsum = cumulative_sum
        stand_ins = {
            "fla": package,
            "fla.ops": types.ModuleType("fla.ops"),
            "fla.ops.utils": types.ModuleType("fla.ops.utils"),
            "fla.ops.utils.constant": constant,
            "fla.ops.utils.cumsum": cumsum,
        }
        with mock.patch.dict(sys.modules, stand_ins):
            return fla("wall_attn", "naive_wall_attn")


class cope(Ordered):
    """x-transformers' CoPE module, on the scaled and masked logits."""

    CASES = [{"max_position": 4}, {}]
    PARTLY_UNUSED = "counts beyond the input"

    def parameter_count(shape, options):
        return shape.n_layers * options["max_position"] * shape.head_dim

    def reference(parameters, shape, options, q, k, layer, causal, **others):
        logits = masked(q @ k.mT * shape.head_dim**-0.5, causal)
        most = torch.finfo(q.dtype).max
        logits = logits.clamp(min=-most)
        x_transformers = third_party("x_transformers.x_transformers")
        sizes = (shape.head_dim, shape.n_heads, options["max_position"])
        module = x_transformers.CoPE(*sizes)
        named = {"pos_emb": parameters["table"][layer]}
        bias = functional_call(module, named, (q, logits))
        return {"probabilities": (logits + bias).softmax(-1)}


class tapa:
    """The paper's equation 12 in fp64, product by product; no package has it."""

    CASES = [{}, {"alpha": 0.2}]
    DTYPE = torch.float64

    def reference(shape, options, q, k, positions, causal, **others):
        half = shape.head_dim // 2
        root = math.sqrt(half)
        products = q[:, :, :, None] * k[:, :, None] / root  # (B, H, T, T, Dh)
        amplitude = products[..., :half].sum(-1)
        turns = products[..., half:].sum(-1)
        far = positions[:, :, None] - positions[:, None]
        growth = far.abs().double() ** options["alpha"]
        phases = 2 * math.pi * growth[:, None] * turns
        logits = amplitude * torch.cos(phases)
        return {"probabilities": masked(logits, causal).softmax(-1)}


class stick_breaking(Ordered):
    """The plain form in fla."""

    CASES = [
        {},
        {"attend_current": True},
        {"remainder": False},
        {"attend_current": True, "remainder": False},
    ]

    def reference(options, q, k, v, **others):
        naive = fla("stickbreaking_attn", "naive_stickbreaking_attn")
        output, rest = naive(q, k, v, attend_current=options["attend_current"])
        if options["remainder"]:
            output = output + rest[..., None] * v
        return {"output": output}


class path(Ordered):
    """The authors' plain form in fla, fed with reflections made token by token."""

    CASES = [{}, {"rank": 4, "silu": False}]
    CAUSAL = (True,)

    def parameter_count(shape, options):
        low_rank = 2 * options["rank"] * shape.d_model
        convolution = 3 * shape.d_model
        beta = shape.n_heads * (shape.d_model + 1)
        return shape.n_layers * (low_rank + convolution + beta)

    def reference(parameters, shape, options, q, k, v, x, layer, gates=None, **others):
        low = x @ parameters[f"down.{layer}.weight"].T
        low = low @ parameters[f"up.{layer}.weight"].T
        # (D, 3), the last for the token itself
        taps = parameters[f"convolution.{layer}.weight"][:, 0]
        reflections = []
        for t in range(x.shape[1]):
            mixed = 0
            for back in range(min(3, t + 1)):
                mixed = mixed + low[:, t - back] * taps[:, 2 - back]
            if options["silu"]:
                mixed = mixed * torch.sigmoid(mixed)
            heads = mixed.view(-1, shape.n_heads, shape.head_dim)
            length = heads.norm(dim=-1, keepdim=True)
            reflections.append(heads / length)
        w = torch.stack(reflections, dim=2)  # (B, H, T, Dh)

        weight = parameters[f"beta.{layer}.weight"]
        constant = parameters[f"beta.{layer}.bias"]
        beta = 2 * torch.sigmoid(gates_of(weight, constant, x))
        if gates is None:
            gates = torch.zeros_like(beta)
        scale = shape.head_dim**-0.5
        naive = fla("path_attn", "naive_path_attn")
        output = naive(q, k, v, w, beta, gates, scale=scale)
        return {"output": output}


class path_fox(path):
    """The authors' plain form with forget gates."""

    CASES = [{}, {"rank": 4, "silu": False, "gate_bias": 2.0}]

    def parameter_count(shape, options):
        of_fox = fox.parameter_count(shape, options)
        return path.parameter_count(shape, options) + of_fox

    def reference(parameters, x, layer, **others):
        weight = parameters["gate"][layer]
        constant = parameters["gate_bias"][layer]
        gates = F.logsigmoid(gates_of(weight, constant, x))
        return path.reference(parameters, x=x, layer=layer, gates=gates, **others)


def picking_weights(parameters, layer, width):
    """Return the weights of projections that pick q, k and v out of one wide input, and
    of the convolution after them.
    """
    kernels = []
    for name in "qkv":
        kernel = parameters[f"kernels.{name}"][layer]
        kernels.append(kernel.flatten(0, 1))
    convolution = torch.cat(kernels)
    weights = {"conv1d.weight": convolution[:, None]}
    pick = torch.eye(len(convolution), width)
    for name, rows in zip("qkv", pick.chunk(3), strict=True):
        weights[f"{name}_proj.weight"] = rows
    return weights


class gated_delta(Ordered):
    """transformers OLMo Hybrid's layer, its kernel replaced by its own loop over
    tokens; its projections pick q, k, v out of one wide input.
    """

    CASES = [{}, {"width": 2, "negative": True}]
    CAUSAL = (True,)

    def parameter_count(shape, options):
        heads = shape.n_heads
        count = 2 * heads * (shape.d_model + 1)
        count += heads * shape.head_dim * shape.d_model
        count += 3 * heads * shape.head_dim * options["width"]
        count += shape.head_dim
        return shape.n_layers * count

    def reference(parameters, shape, options, q, k, v, x, layer, **others):
        package = "transformers.models.olmo_hybrid"
        olmo = third_party(f"{package}.modeling_olmo_hybrid")
        content = shape.n_heads * shape.head_dim
        wide = torch.cat((flat(q, k, v), x), -1)
        config = third_party(package).OlmoHybridConfig()
        config.hidden_size = wide.shape[-1]
        config.linear_num_key_heads = shape.n_heads
        config.linear_num_value_heads = shape.n_heads
        config.linear_key_head_dim = shape.head_dim
        config.linear_value_head_dim = shape.head_dim
        config.linear_conv_kernel_dim = options["width"]
        config.linear_allow_neg_eigval = options["negative"]
        module = olmo.OlmoHybridGatedDeltaNet(config, 0)
        module.o_proj = torch.nn.Identity()

        def after_qkv(name):
            weight = parameters[f"{name}.{layer}.weight"]
            return F.pad(weight, (3 * content, 0))

        weights = picking_weights(parameters, layer, wide.shape[-1])
        weights["a_proj.weight"] = after_qkv("decay")
        weights["b_proj.weight"] = after_qkv("beta")
        weights["g_proj.weight"] = after_qkv("gate")
        weights["A_log"] = parameters["A_log"][layer]
        weights["dt_bias"] = parameters["dt_bias"][layer]
        weights["o_norm.weight"] = parameters["norm"][layer]

        by_steps = olmo.torch_recurrent_gated_delta_rule
        with mock.patch.object(olmo, "torch_chunk_gated_delta_rule", by_steps):
            output = functional_call(module, weights, (wide,))
        heads_apart = output.unflatten(-1, (shape.n_heads, shape.head_dim))
        return {"output": heads_apart.transpose(1, 2)}


class kda(Ordered):
    """transformers Kimi Linear's layer, or with `bound` GLM-5.3's, its kernel replaced
    by its own loop over tokens; its projections pick q, k, v out of one wide input.
    """

    CASES = [{}, {"width": 2, "bound": 5.0}]
    CAUSAL = (True,)

    def parameter_count(shape, options):
        content = shape.n_heads * shape.head_dim
        low_rank = shape.head_dim * (shape.d_model + content)
        count = 2 * low_rank + shape.n_heads * (shape.d_model + 1)
        count += content + 3 * content * options["width"] + shape.head_dim
        return shape.n_layers * count

    def reference(parameters, shape, options, q, k, v, x, layer, **others):
        content = shape.n_heads * shape.head_dim
        wide = torch.cat((flat(q, k, v), x), -1)
        sizes = {
            "hidden_size": wide.shape[-1],
            "linear_num_heads": shape.n_heads,
            "linear_head_dim": shape.head_dim,
            "linear_conv_kernel_dim": options["width"],
        }
        if options["bound"] is None:
            package = "transformers.models.kimi_linear"
            modeling = third_party(f"{package}.modeling_kimi_linear")
            config = third_party(package).KimiLinearConfig(**sizes)
            module = modeling.KimiLinearDeltaAttention(config, 0)
        else:
            package = "transformers.models.glm5_next"
            modeling = third_party(f"{package}.modeling_glm5_next")
            sizes["linear_lower_bound"] = -options["bound"]
            config = third_party(package).Glm5NextTextConfig(**sizes)
            module = modeling.Glm5NextTextLinearAttention(config, 0)
        module.o_proj = torch.nn.Identity()

        def after_qkv(name):
            weight = parameters[f"{name}.weight"]
            return F.pad(weight, (3 * content, 0))

        weights = picking_weights(parameters, layer, wide.shape[-1])
        weights["b_proj.weight"] = after_qkv(f"beta.{layer}")
        weights["g_a_proj.weight"] = after_qkv(f"gate.{layer}.0")
        weights["g_b_proj.weight"] = parameters[f"gate.{layer}.1.weight"]
        weights["o_norm.weight"] = parameters["norm"][layer]
        gate = "forget_gate"
        weights[f"{gate}.f_a_proj.weight"] = after_qkv(f"decay.{layer}.0")
        weights[f"{gate}.f_b_proj.weight"] = parameters[f"decay.{layer}.1.weight"]
        rates = parameters["A_log"][layer]
        weights[f"{gate}.A_log"] = rates.view_as(module.forget_gate.A_log)
        weights[f"{gate}.dt_bias"] = parameters["dt_bias"][layer]

        by_steps = modeling.recurrent_kimi_delta_attention
        with mock.patch.object(modeling, "chunk_kimi_delta_attention", by_steps):
            output = functional_call(module, weights, (wide,))
        heads_apart = output.unflatten(-1, (shape.n_heads, shape.head_dim))
        return {"output": heads_apart.transpose(1, 2)}
