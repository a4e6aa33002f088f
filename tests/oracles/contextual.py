"""Order from the content."""

import importlib.util
import math
import sys
import types
from unittest import mock

import torch
import torch.nn.functional as F

from oracles import third_party
from oracles._shared import Ordered, fla, masked


class fox(Ordered):
    """fla-core's naive forgetting attention for the causal output, x-transformers'
    DataDependentAlibi for the bias.
    """

    CASES = [{}]

    def parameter_count(shape, options):
        return shape.n_layers * shape.n_heads * (shape.d_model + 1)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        weight = parameters["weight"][layer]
        bias = parameters["gate_bias"][layer]
        module = third_party("x_transformers.x_transformers").DataDependentAlibi
        module = module(shape.d_model, shape.n_heads, causal=True)
        named = {
            name: weight if name.endswith("weight") else bias
            for name, _ in module.named_parameters()
        }
        assert len(named) == 2, named
        out = {"bias": torch.func.functional_call(module, named, (x,))}
        if causal:
            gates = F.logsigmoid(torch.einsum("btd,hd->bht", x, weight) + bias[:, None])
            out["output"] = fla("forgetting_attn", "naive_forgetting_attn")(
                q, k, v, gates
            )
        return out


class cable(fox):
    """Plain loops from the paper's equation for the bias, fox with turned signs for the
    causal output.
    """

    CASES = [{}, {"gate_bias": -2.0}]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        weight = parameters["weight"][layer]
        offset = parameters["gate_bias"][layer]
        lengths = torch.log(
            1 + torch.exp(torch.einsum("btd,hd->bht", x, weight) + offset[:, None])
        )
        rows = []
        for i in range(x.shape[1]):
            # Keys after the query, visible only without a mask, are brought nearer by
            # what lies between.
            row = [
                lengths[..., i + 1 : j + 1].sum(-1)
                - lengths[..., j + 1 : i + 1].sum(-1)
                for j in range(x.shape[1])
            ]
            rows.append(torch.stack(row, dim=-1))
        turned = {name: -value for name, value in parameters.items()}
        of_fox = fox.reference(
            turned, shape, options, q, k, v, x, positions, layer, causal
        )
        return of_fox | {"bias": torch.stack(rows, 2)}


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
        heads = shape.n_heads
        kv_heads = shape.n_kv_heads
        width = shape.head_dim
        model = shape.d_model
        gates = heads * (model + 1) + options["output_gate"] * heads * width * model
        norms = (
            options["qk_norm"] * (heads + kv_heads) * width
            + options["output_norm"] * heads * width
        )
        return shape.n_layers * (
            gates + norms + options["kv_shift"] * 2 * kv_heads * model
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        def shifted(name, a):
            rows = []
            for t in range(a.shape[2]):
                share = torch.sigmoid(x[:, t] @ parameters[f"shifts.{name}"][layer].T)[
                    ..., None
                ]
                before = a[:, :, t - 1] if t else torch.zeros_like(a[:, :, 0])
                rows.append(share * before + (1 - share) * a[:, :, t])
            return torch.stack(rows, 2)

        def normed(name, a, epsilon):
            return (
                a
                / (a.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
                * parameters[f"norms.{name}"][layer]
            )

        if options["kv_shift"]:
            k = shifted("k", k)
            v = shifted("v", v)
        if options["qk_norm"]:
            q = normed("q", q, 1e-5)
            k = normed("k", k, 1e-5)
        gates = (
            torch.einsum("btd,hd->bht", x, parameters["weight"][layer])
            + parameters["gate_bias"][layer][:, None]
        )
        out = fla("forgetting_attn", "naive_forgetting_attn")(
            q, k, v, F.logsigmoid(gates)
        )
        if options["output_norm"]:
            out = normed("output", out, 1e-6)
        if options["output_gate"]:
            opened = torch.sigmoid(x @ parameters["output_gate"][layer].T)
            out = out * torch.stack(opened.split(shape.head_dim, dim=-1), 1)
        return {"output": out}


class wall(Ordered):
    """The plain form in fla, whose two helpers are stood in for, since their package
    wants triton.
    """

    CASES = [{}, {"gate_bias": 0.0}]
    CAUSAL = (True,)

    def parameter_count(shape, options):
        return shape.n_layers * shape.n_heads * shape.head_dim * (shape.d_model + 1)

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        names = (
            "fla",
            "fla.ops",
            "fla.ops.utils",
            "fla.ops.utils.constant",
            "fla.ops.utils.cumsum",
        )
        stand_ins = {name: types.ModuleType(name) for name in names}
        # where the file is looked for
        stand_ins["fla"].__spec__ = importlib.util.find_spec("fla")
        stand_ins["fla.ops.utils.constant"].RCP_LN2 = 1 / math.log(2)
        stand_ins["fla.ops.utils.cumsum"].chunk_global_cumsum = (
            lambda g, scale, cu_seqlens=None: g.cumsum(1) * scale
        )
        with mock.patch.dict(sys.modules, stand_ins):
            naive = fla("wall_attn", "naive_wall_attn")
        gates = (
            torch.einsum("btd,ed->bte", x, parameters["weight"][layer])
            + parameters["gate_bias"][layer]
        )
        gates = (
            F.logsigmoid(gates)
            .unflatten(2, (shape.n_heads, shape.head_dim))
            .transpose(1, 2)
        )
        return {"output": naive(q, k, v, gates, scale=shape.head_dim**-0.5)}


class cope(Ordered):
    """x-transformers' CoPE module, on the scaled and masked logits."""

    CASES = [{"max_position": 4}, {}]
    PARTLY_UNUSED = "counts beyond the input"

    def parameter_count(shape, options):
        return shape.n_layers * options["max_position"] * shape.head_dim

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        logits = masked(q @ k.mT * shape.head_dim**-0.5, causal).clamp(
            min=-torch.finfo(q.dtype).max
        )
        module = third_party("x_transformers.x_transformers").CoPE(
            shape.head_dim, shape.n_heads, options["max_position"]
        )
        bias = torch.func.functional_call(
            module, {"pos_emb": parameters["table"][layer]}, (q, logits)
        )
        return {"probabilities": (logits + bias).softmax(-1)}


class stick_breaking(Ordered):
    """The plain form in fla."""

    CASES = [
        {},
        {"attend_current": True},
        {"remainder": False},
        {"attend_current": True, "remainder": False},
    ]

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        naive = fla("stickbreaking_attn", "naive_stickbreaking_attn")
        output, rest = naive(q, k, v, attend_current=options["attend_current"])
        return {
            "output": output + rest[..., None] * v if options["remainder"] else output
        }


class path(Ordered):
    """The authors' plain form in fla, fed with reflections made token by token."""

    CASES = [{}, {"rank": 4, "silu": False}]
    CAUSAL = (True,)

    def parameter_count(shape, options):
        low_rank = 2 * options["rank"] * shape.d_model
        convolution = 3 * shape.d_model
        return shape.n_layers * (
            low_rank + convolution + shape.n_heads * (shape.d_model + 1)
        )

    def reference(
        parameters, shape, options, q, k, v, x, positions, layer, causal, gates=None
    ):
        low = (
            x
            @ parameters[f"down.{layer}.weight"].T
            @ parameters[f"up.{layer}.weight"].T
        )
        # (D, 3), the last for the token itself
        taps = parameters[f"convolution.{layer}.weight"][:, 0]
        w = []
        for t in range(x.shape[1]):
            mixed = sum(
                low[:, t - back] * taps[:, 2 - back] for back in range(3) if t >= back
            )
            mixed = mixed * torch.sigmoid(mixed) if options["silu"] else mixed
            heads = mixed.view(-1, shape.n_heads, shape.head_dim)
            w.append(heads / heads.norm(dim=-1, keepdim=True))
        beta = (
            2
            * torch.sigmoid(
                x @ parameters[f"beta.{layer}.weight"].T
                + parameters[f"beta.{layer}.bias"]
            ).mT
        )
        given = (
            q,
            k,
            v,
            torch.stack(w, dim=2),
            beta,
            torch.zeros_like(beta) if gates is None else gates,
        )
        return {
            "output": fla("path_attn", "naive_path_attn")(
                *given, scale=shape.head_dim**-0.5
            )
        }


class path_fox(path):
    """The authors' plain form with forget gates."""

    CASES = [{}, {"rank": 4, "silu": False, "gate_bias": 2.0}]

    def parameter_count(shape, options):
        return path.parameter_count(shape, options) + fox.parameter_count(
            shape, options
        )

    def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
        gates = (
            torch.einsum("btd,hd->bht", x, parameters["gate"][layer])
            + parameters["gate_bias"][layer][:, None]
        )
        given = (q, k, v, x, positions, layer, causal, F.logsigmoid(gates))
        return path.reference(parameters, shape, options, *given)
