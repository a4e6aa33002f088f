"""RoPE and its frequencies."""

import inspect
import math

import torch

from oracles import third_party
from oracles._shared import (
    ROPE_TOLERANCE,
    Ordered,
    frequencies,
    powers,
    rotated,
    turned_by,
)
from oracles.absolute import none


def harmonic(pairs):
    return [1.0 / (1 + pair) for pair in range(pairs)]


class rope:
    """transformers: Llama's frequencies, and its rotation for the half layout, GPT-J's
    for the interleaved one.
    """

    CASES = [
        {},
        {"layout": "half"},
        {"base": 500.0},
        {"frequencies": "resonance"},
        {"frequencies": lambda shape: harmonic(shape.head_dim // 2)},
    ]
    TOLERANCE = ROPE_TOLERANCE

    def reference(shape, options, q, k, positions, **others):
        base = options["base"]
        law = options.get("frequencies", "geometric")
        if law == "geometric":
            law, _ = frequencies("linear", shape, base, factor=1.0)
        elif law == "resonance":
            # the paper's equation: wavelengths rounded to whole numbers
            waves = 2 * math.pi / powers(base, shape.head_dim)
            law = 2 * math.pi / waves.round()
        law = torch.as_tensor(law, dtype=torch.float64)
        return rotated(q, k, positions, options["layout"], law)


class partial_rope(rope):
    """transformers GPT-NeoX for the half layout; GPT-J's rotation, on GPT-NeoX's
    frequencies, for the other.
    """

    CASES = [
        {},
        {"layout": "half", "fraction": 0.5},
        {"fraction": 0.75, "base": 500.0},
        {"fraction": 1.0},
    ]

    def reference(shape, options, q, k, positions, **others):
        neox = third_party("transformers.models.gpt_neox.modeling_gpt_neox")
        config = third_party("transformers").GPTNeoXConfig(
            hidden_size=shape.d_model, num_attention_heads=shape.n_heads
        )
        config.rope_parameters = {
            "rope_type": "default",
            "rope_theta": options["base"],
            "partial_rotary_factor": options["fraction"],
        }
        embedding = neox.GPTNeoXRotaryEmbedding(config)
        if options["layout"] == "half":
            cos, sin = embedding(q, positions)
            q, k = neox.apply_rotary_pos_emb(q, k, cos, sin)
            return {"q": q, "k": k}
        law = embedding.inv_freq
        width = 2 * len(law)
        in_pairs = (q[..., :width], k[..., :width])
        turning = rotated(*in_pairs, positions, "interleaved", law)
        q = torch.cat((turning["q"], q[..., width:]), -1)
        k = torch.cat((turning["k"], k[..., width:]), -1)
        return {"q": q, "k": k}


class p_rope(rope):
    """transformers, rope_type `proportional`."""

    CASES = [
        {},
        {"layout": "half", "fraction": 0.25},
        {"fraction": 0.0},
        {"fraction": 1.0, "base": 500.0},
    ]

    def reads_positions(options):
        return options["fraction"] > 0

    def reference(shape, options, q, k, positions, **others):
        share = {"partial_rotary_factor": options["fraction"]}
        law, scale = frequencies("proportional", shape, options["base"], **share)
        return rotated(q, k, positions, options["layout"], law, scale)


class hope:
    """The equation; no package has it."""

    CASES = [{}, {"layout": "half", "base": 500.0}]
    DTYPE = torch.float64

    def reference(shape, options, q, k, positions, **others):
        law = powers(options["base"], shape.head_dim)
        turns = shape.train_length * law / (2 * math.pi)
        law = law * (turns >= 1)
        angles = positions[:, None, :, None] * law
        return turned_by(angles, q, k, options["layout"])


class lerope(rope):
    """transformers Mistral Large 4: its learned rotary embedding, and its rotation
    (interleaved) or Llama's (half).
    """

    CASES = [{}, {"layout": "half", "base": 500.0}]

    def parameter_count(shape, options):
        return shape.head_dim // 2

    def reference(parameters, shape, options, q, k, positions, **others):
        package = "transformers.models.mistral_large4"
        mistral = third_party(f"{package}.modeling_mistral_large4")
        config = third_party(package).MistralLarge4TextConfig(
            head_dim=shape.head_dim,
            qk_rope_head_dim=shape.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": options["base"]},
        )
        embedding = mistral.MistralLarge4TextRotaryEmbedding(config)
        embedding.alpha = parameters["alpha"]
        # there the fp32 angles, several times the position, are too coarse
        if positions.max() > 100:
            learned = parameters["alpha"].double().exp()
            law = embedding.inv_freq.double() * learned
            return rotated(q, k, positions, options["layout"], law)

        forward = inspect.unwrap(type(embedding).forward)  # outside of no_grad
        cos, sin = forward(embedding, q, positions)
        if options["layout"] == "half":
            llama = third_party("transformers.models.llama.modeling_llama")
            q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
            return {"q": q, "k": k}
        q, k = mistral.apply_rotary_pos_emb_interleave(q, k, cos, sin)
        return {"q": side_by_side(q), "k": side_by_side(k)}


def side_by_side(a):
    """Return channels in halves as pairs side by side."""
    halves = a.unflatten(-1, (2, -1))
    return halves.mT.flatten(-2)


class grape_m:
    """The paper's definition, exp(n L) with torch's matrix exponential of the generator
    L.
    """

    CASES = [{}, {"layout": "half", "base": 500.0, "divisor": 4.0}]
    DTYPE = torch.float64

    def parameter_count(shape, options):
        return shape.n_layers * shape.head_dim // 2

    def reference(parameters, shape, options, q, k, positions, layer, **others):
        width = shape.head_dim
        generator = torch.zeros(width, width, dtype=torch.float64)
        for pair, frequency in enumerate(powers(options["base"], width)):
            one = pair
            two = pair + width // 2
            if options["layout"] == "interleaved":
                one = 2 * pair
                two = one + 1
            plane = torch.zeros(width, width, dtype=torch.float64)
            plane[two, one] = 1
            plane[one, two] = -1
            learned = parameters["alpha"][layer, pair] / options["divisor"]
            generator = generator + plane * frequency * learned.exp()
        turns = positions[..., None, None] * generator
        rotation = torch.linalg.matrix_exp(turns)
        rotation = rotation[:, None]  # (1|B, 1, T, Dh, Dh)
        q = (rotation @ q[..., None])[..., 0]
        k = (rotation @ k[..., None])[..., 0]
        return {"q": q, "k": k}


class drope(Ordered):
    """torch's own attention without any position: what is left after the drop
    (test_wrappers.py has it before).
    """

    CASES = [{}, {"drop_at": 0.0, "layout": "half"}]
    reference = none.reference


class pi(rope):
    """transformers, rope_type `linear`."""

    CASES = [{}, {"layout": "half", "factor": 2.5, "base": 500.0}]

    def reference(shape, options, q, k, positions, **others):
        factor = options["factor"]
        law, scale = frequencies("linear", shape, options["base"], factor=factor)
        return rotated(q, k, positions, options["layout"], law, scale)


class ntk(rope):
    """x-transformers' frequencies (base_rescale_factor), turned by transformers."""

    CASES = [{}, {"layout": "half", "factor": 2.5, "base": 500.0}]

    def reference(shape, options, q, k, positions, **others):
        x_transformers = third_party("x_transformers.x_transformers")
        embedding = x_transformers.RotaryEmbedding(
            shape.head_dim,
            base=options["base"],
            base_rescale_factor=options["factor"],
        )
        return rotated(q, k, positions, options["layout"], embedding.inv_freq)


def lengths(positions):
    """Return the length of each sequence."""
    return [int(last) + 1 for last in positions.amax(-1)]


class dynamic_ntk(rope):
    """transformers, rope_type `dynamic`, given one sequence at a time."""

    CASES = [
        {"original_length": lambda shape: 3 * shape.train_length // 4},
        {"original_length": 16, "layout": "half", "factor": 2.0, "base": 500.0},
    ]

    def reference(shape, options, q, k, positions, **others):
        base = options["base"]
        factor = options["factor"]
        original = options["original_length"] or shape.train_length
        laws = []
        for length in lengths(positions):
            given = (shape, base, original, length)
            law, _ = frequencies("dynamic", *given, factor=factor)
            laws.append(law)
        law = torch.stack(laws)[:, None]  # (1|B, 1, Dh/2)
        return rotated(q, k, positions, options["layout"], law)


class ntk_by_parts(rope):
    """transformers: the frequencies of rope_type `yarn` for the index ramp, of `llama3`
    for the rotations ramp.
    """

    CASES = [
        {},
        {"layout": "half", "factor": 16.0, "base": 500.0, "alpha": 0.5, "beta": 4.0},
        {"ramp": "rotations", "alpha": 1.0, "beta": 5.0},
    ]

    def reference(shape, options, q, k, positions, **others):
        law, _ = by_parts(shape, options)
        return rotated(q, k, positions, options["layout"], law)


def by_parts(shape, options):
    """Frequencies of a ramp, and YaRN's temperature."""
    base = options["base"]
    factor = options["factor"]
    slow = options["alpha"]
    fast = options["beta"]
    parts = {"factor": factor, "beta_slow": slow, "beta_fast": fast}
    law, temperature = frequencies("yarn", shape, base, **parts)
    if options["ramp"] == "rotations":
        parts = {"factor": factor, "low_freq_factor": slow, "high_freq_factor": fast}
        law, _ = frequencies("llama3", shape, base, **parts)
    return law, temperature


class yarn(ntk_by_parts):
    """The same, with YaRN's temperature."""

    def reference(shape, options, q, k, positions, **others):
        law, temperature = by_parts(shape, options)
        return rotated(q, k, positions, options["layout"], law, temperature)


class llama3(rope):
    """transformers, rope_type `llama3`."""

    CASES = [
        {},
        {
            "layout": "half",
            "base": 500.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 3.0,
        },
    ]

    def reference(shape, options, q, k, positions, **others):
        names = ("factor", "low_freq_factor", "high_freq_factor")
        parts = {name: options[name] for name in names}
        law, scale = frequencies("llama3", shape, options["base"], **parts)
        return rotated(q, k, positions, options["layout"], law, scale)


class longrope(rope):
    """transformers, rope_type `longrope`, given the divisors of its rope_type `yarn`
    and one sequence at a time.
    """

    CASES = [
        {"original_length": lambda shape: 3 * shape.train_length // 4},
        {"original_length": 20, "layout": "half", "factor": 8.0, "base": 500.0},
    ]

    def reference(shape, options, q, k, positions, **others):
        base = options["base"]
        factor = options["factor"]
        original = options["original_length"] or shape.train_length
        plain, _ = frequencies("linear", shape, base, factor=1.0)
        yarn, _ = frequencies("yarn", shape, base, original, factor=factor)
        divisors = plain / yarn
        parts = {
            "long_factor": divisors.tolist(),
            "short_factor": [1.0] * len(plain),
            "factor": factor,
        }
        laws = []
        for length in lengths(positions):
            given = (shape, base, original, length)
            law, scale = frequencies("longrope", *given, **parts)
            laws.append(law)
        law = torch.stack(laws)[:, None]  # (1|B, 1, Dh/2)
        return rotated(q, k, positions, options["layout"], law, scale)
