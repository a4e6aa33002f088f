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
    if not causal:
        return logits
    pairs = torch.ones(logits.shape[-2:], dtype=torch.bool)
    is_later = pairs.triu(1)
    return logits.masked_fill(is_later, -torch.inf)


def softmax(logits, causal):
    return masked(logits, causal).softmax(-1)


def logits_of(of_layer, q, k):
    """Return logits from an oracle's "q", "k" and "bias"; raw q, raw k, no bias if it
    has none.
    """
    scale = q.shape[-1] ** -0.5
    q = of_layer.get("q", q)
    k = of_layer.get("k", k)
    bias = of_layer.get("bias", 0)
    return q @ k.mT * scale + bias


def output_of(of_layer, q, k, v, causal, window=None, chunk=None):
    """Return the output (B, H, T, Dh) of a layer from what its oracle returns."""
    if "output" in of_layer and window is None and chunk is None:
        return of_layer["output"]
    logits = logits_of(of_layer, q, k)
    keys = torch.arange(v.shape[2])
    queries = keys[:, None]
    if causal and window:
        is_far = queries - keys >= window
        logits = logits.masked_fill(is_far, -torch.inf)
    if chunk:  # transformers' mask of Llama 4
        masks = third_party("transformers.masking_utils")
        no_padding = torch.zeros(1, dtype=torch.long)
        overlay = masks.chunked_overlay(chunk, no_padding)
        is_hidden = ~overlay(0, 0, queries, keys)
        logits = logits.masked_fill(is_hidden, -torch.inf)
    return softmax(logits, causal) @ v


def flat(*tensors):
    """Return heads (B, H, T, Dh) side by side, as another project's projections give
    them: (B, T, all channels).
    """
    by_token = [tensor.transpose(1, 2) for tensor in tensors]  # (B, T, H, Dh)
    wide = [tensor.flatten(2) for tensor in by_token]
    return torch.cat(wide, dim=-1)


def fla(path, name):
    """Return one of fla's plain functions, which have time before heads, as a function
    from and to (B, H, T, ...).
    """
    module = third_party_file("fla", f"ops/{path}/naive.py")
    function = getattr(module, name)

    def call(*tensors, **options):
        given = [tensor.transpose(1, 2) for tensor in tensors]
        made = function(*given, **options)
        if isinstance(made, tuple):
            return [each.transpose(1, 2) for each in made]
        return made.transpose(1, 2)

    return call


class Take(torch.nn.Module):
    """A module in the place of a projection that takes some channels of one wide
    input.
    """

    def __init__(self, start, stop):
        super().__init__()
        self.start = start
        self.stop = stop

    def forward(self, x):
        return x[..., self.start : self.stop].contiguous()


def frequencies(kind, shape, base, train_length=None, length=None, **parameters):
    """Return inv_freq (Dh/2,) and the attention factor of a rope_type of
    transformers.
    """
    train_length = train_length or shape.train_length
    parameters["rope_type"] = kind
    parameters["rope_theta"] = base
    parameters["original_max_position_embeddings"] = train_length
    config = third_party("transformers").LlamaConfig(
        hidden_size=shape.d_model,
        num_attention_heads=shape.n_heads,
        max_position_embeddings=train_length,
        rope_parameters=parameters,
    )
    laws = third_party("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    return laws[kind](config, None, seq_len=length)


def rotated(q, k, positions, layout, inv_freq, attention_factor=1.0):
    """Return q and k turned by Llama's code (half) or GPT-J's (interleaved)."""
    angles = positions[..., None].double() * inv_freq.double()
    sin = (angles.sin() * attention_factor).float()
    cos = (angles.cos() * attention_factor).float()
    if layout == "half":
        llama = third_party("transformers.models.llama.modeling_llama")
        cos = torch.cat((cos, cos), -1)
        sin = torch.cat((sin, sin), -1)
        q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
        return {"q": q, "k": k}
    turn = third_party("transformers.models.gptj.modeling_gptj").apply_rotary_pos_emb
    turned_q = turn(q.transpose(1, 2), sin, cos)
    turned_k = turn(k.transpose(1, 2), sin, cos)
    return {"q": turned_q.transpose(1, 2), "k": turned_k.transpose(1, 2)}


def pairs_of(a, layout):
    """Return the first and the second channel of each pair, (..., Dh/2) each."""
    if layout == "interleaved":
        return a.unflatten(-1, (-1, 2)).unbind(-1)
    return a.chunk(2, dim=-1)


def turned(q, k, cos, sin, layout):
    """Return q and k with pairs of channels turned by the equation; cos and sin: (...,
    Dh/2).
    """
    q = turned_pairs(q, cos, sin, layout)
    k = turned_pairs(k, cos, sin, layout)
    return {"q": q, "k": k}


def turned_by(angles, q, k, layout):
    """Return q and k with pairs of channels turned by angles (..., Dh/2)."""
    return turned(q, k, angles.cos(), angles.sin(), layout)


def turned_pairs(a, cos, sin, layout):
    one, two = pairs_of(a, layout)
    first = one * cos - two * sin
    second = two * cos + one * sin
    if layout == "interleaved":
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def powers(base, width):
    """Return base^(-2p/width) for p = 0 .. width/2-1, in fp64."""
    law = [base ** (-2 * p / width) for p in range(width // 2)]
    return torch.tensor(law, dtype=torch.float64)


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
    "temperature": {
        "rule": "ssmax",
        "inner": "rope",
        "inner_options": {},
        "alpha": 0.1,
        "floor": None,
    },
}


def inner_options(options):
    return _DEFAULTS.get(options["inner"], {}) | options["inner_options"]


def inner_count(shape, options):
    count = getattr(oracles.of(options["inner"]), "parameter_count", None)
    if count is None:
        return 0
    return count(shape, inner_options(options))


def inner(parameters, options, at=0, **others):
    """Return what the oracle of inner encoding number `at` returns for that encoding's
    own parameters.
    """
    prefix = f"inners.{at}."
    own = {}
    for key, value in parameters.items():
        if key.startswith(prefix):
            own[key.removeprefix(prefix)] = value
    oracle = oracles.of(options["inner"])
    return oracle.reference(parameters=own, options=inner_options(options), **others)


def inner_output(q, k, v, causal, **others):
    of_layer = inner(q=q, k=k, v=v, causal=causal, **others)
    return output_of(of_layer, q, k, v, causal)


class Around:
    """For wrappers that build what a layer uses from the encoding inside."""

    TOLERANCE = ROPE_TOLERANCE
    parameter_count = inner_count
