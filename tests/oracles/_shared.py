"""Code that oracles share: softmax attention, rotations of pairs, and the oracle of an
encoding inside a wrapper.
"""

import torch

import oracles
from oracles import third_party, third_party_file

# transformers' angles are fp32: off by 1000 · 2^-24 at position 1000
ROPE_TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}


class Ordered:
    """For schemes that depend only on the order of tokens, not on their position
    numbers.
    """

    def reads_positions(options):
        return False


def masked(logits, causal):
    """Return logits (..., T, T); if causal, those of keys after the query are -inf."""
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf) if causal else logits


def softmax(logits, causal):
    return masked(logits, causal).softmax(-1)


def output_of(of_layer, q, k, v, causal, window=None, chunk=None):
    """Return the output (B, H, T, Dh) from an oracle's "q", "k" and "bias"; raw q, raw
    k, no bias if it has none.
    """
    if "output" in of_layer and window is None and chunk is None:
        return of_layer["output"]
    logits = of_layer.get("q", q) @ of_layer.get("k", k).mT * v.shape[
        -1
    ] ** -0.5 + of_layer.get("bias", 0)
    index = torch.arange(v.shape[2])
    if causal and window:
        logits = logits.masked_fill(index[:, None] - index >= window, -torch.inf)
    if chunk:  # transformers' mask of Llama 4
        overlay = third_party("transformers.masking_utils").chunked_overlay(
            chunk, torch.zeros(1, dtype=torch.long)
        )
        logits = logits.masked_fill(~overlay(0, 0, index[:, None], index), -torch.inf)
    return softmax(logits, causal) @ v


def flat(*tensors):
    """Return heads (B, H, T, Dh) side by side, as another project's projections give
    them: (B, T, all channels).
    """
    return torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in tensors], dim=-1)


def fla(path, name):
    """Return one of fla's plain functions, which have time before heads, as a function
    from and to (B, H, T, ...).
    """
    function = getattr(third_party_file("fla", f"ops/{path}/naive.py"), name)

    def call(*tensors, **options):
        out = function(*(tensor.transpose(1, 2) for tensor in tensors), **options)
        return (
            tuple(each.transpose(1, 2) for each in out)
            if isinstance(out, tuple)
            else out.transpose(1, 2)
        )

    return call


class Take(torch.nn.Module):
    """A module in the place of a projection that takes some channels of one wide
    input.
    """

    def __init__(self, start, stop):
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, x):
        return x[..., self.start : self.stop].contiguous()


def frequencies(kind, shape, base, train_length=None, length=None, **parameters):
    """Return inv_freq (Dh/2,) and the attention factor of a rope_type of
    transformers.
    """
    train_length = train_length or shape.train_length
    parameters |= {
        "rope_type": kind,
        "rope_theta": base,
        "original_max_position_embeddings": train_length,
    }
    config = third_party("transformers").LlamaConfig(
        hidden_size=shape.d_model,
        num_attention_heads=shape.n_heads,
        max_position_embeddings=train_length,
        rope_parameters=parameters,
    )
    return third_party("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS[kind](
        config, None, seq_len=length
    )


def rotated(q, k, positions, layout, inv_freq, attention_factor=1.0):
    """Return q and k turned by Llama's code (half) or GPT-J's (interleaved)."""
    angles = positions[..., None].double() * inv_freq.double()
    sin = (angles.sin() * attention_factor).float()
    cos = (angles.cos() * attention_factor).float()
    if layout == "half":
        llama = third_party("transformers.models.llama.modeling_llama")
        q, k = llama.apply_rotary_pos_emb(
            q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        )
        return {"q": q, "k": k}
    gptj = third_party("transformers.models.gptj.modeling_gptj")
    q, k = (
        gptj.apply_rotary_pos_emb(a.transpose(1, 2), sin, cos).transpose(1, 2)
        for a in (q, k)
    )
    return {"q": q, "k": k}


def turned(q, k, cos, sin, layout):
    """Return q and k with pairs of channels turned by the equation; cos and sin: (...,
    Dh/2).
    """
    out = []
    for a in (q, k):
        one, two = (
            (a[..., 0::2], a[..., 1::2])
            if layout == "interleaved"
            else a.chunk(2, dim=-1)
        )
        pairs = one * cos - two * sin, two * cos + one * sin
        out.append(
            torch.stack(pairs, -1).flatten(-2)
            if layout == "interleaved"
            else torch.cat(pairs, -1)
        )
    return dict(zip("qk", out, strict=True))


def powers(base, width):
    """Return base^(-2p/width) for p = 0 .. width/2-1, in fp64."""
    return torch.tensor(
        [base ** (-2 * p / width) for p in range(width // 2)], dtype=torch.float64
    )


_ROPE = {"base": 10000.0, "layout": "interleaved"}
# Defaults of the options that the oracles read.
_DEFAULTS = {
    "p_rope": {**_ROPE, "fraction": 0.75},
    "rope": _ROPE,
    "sinusoidal": {**_ROPE, "combine": "add", "scale": "token"},
    "alibi": {"slopes": None},
    "t5": {"num_buckets": 32, "max_distance": 128},
    "fire": {"threshold": "quarter"},
    "fox": {"gate_bias": 0.0},
}


def inner_count(shape, options):
    count = getattr(oracles.of(options["inner"]), "parameter_count", None)
    return (
        count(shape, _DEFAULTS.get(options["inner"], {}) | options["inner_options"])
        if count
        else 0
    )


def inner(parameters, shape, options, q, k, v, x, positions, layer, causal, at=0):
    """Return what the oracle of inner encoding number `at` returns for that encoding's
    own parameters.
    """
    prefix = f"inners.{at}."
    of_inner = {
        key.removeprefix(prefix): value
        for key, value in parameters.items()
        if key.startswith(prefix)
    }
    options_inside = _DEFAULTS.get(options["inner"], {}) | options["inner_options"]
    return oracles.of(options["inner"]).reference(
        of_inner, shape, options_inside, q, k, v, x, positions, layer, causal
    )


def inner_output(parameters, shape, options, q, k, v, x, positions, layer, causal):
    of_layer = inner(parameters, shape, options, q, k, v, x, positions, layer, causal)
    return {"output": output_of(of_layer, q, k, v, causal)}


class Around:
    """For wrappers that build what a layer uses from the encoding inside."""

    TOLERANCE = ROPE_TOLERANCE
    parameter_count = inner_count
