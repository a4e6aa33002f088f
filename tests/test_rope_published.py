"""What published models do with positions, in facts typed by hand, beside what is read
from their configurations. The facts are in data/rope_published.yaml.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from posbench.encodings.rope import frequencies
from posbench.errors import Undefined, UserError
from posbench.rope.command import Read, describe, of_settings
from posbench.rope.keys import changes, of_positions, with_value
from posbench.rope.reading import Rope, configuration, reading, ropes

pytest.importorskip("transformers")
from support import EVERY
from test_rope import COMPLETED, WITH_ROPE, number_in

TABLE = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("rope_published.yaml").read_text()
)
MODELS = TABLE["models"]
# what the table does not say of a RoPE
PLAIN = {"window": 0, "chunk": 0, "factor": 1.0, "slowed": 1.0, "scaled": False}
# what an expression of the table may name
NAMES = {
    "ln": math.log,
    "sqrt": math.sqrt,
    "full": "full_attention",
    "sliding": "sliding_attention",
    "linear": "linear_attention",
    "hybrid": "hybrid",
    "mamba": "mamba",
}


def evaluated(value: Any) -> Any:
    """Return a part of the table with the values of its expressions."""
    if isinstance(value, dict):
        return {key: evaluated(part) for key, part in value.items()}
    if isinstance(value, str) and value.startswith("="):
        return eval(value[1:], dict(NAMES))
    return value


def typed(model: str) -> list[dict[str, Any]]:
    """Return what the table says of each RoPE of a model."""
    return [{**PLAIN, **evaluated(rope)} for rope in MODELS[model]["ropes"]]


def read(rope: Rope) -> dict[str, Any]:
    """Return the same of a RoPE that was read, for its longest inputs."""
    f, factor = rope.at(rope.longest)
    turning = f > 0
    slower = frequencies(rope.width, rope.base)[turning] / f[turning]
    facts = {
        **PLAIN,
        "layers": number_in(rope.share),
        "base": rope.base,
        "channels": 2 * int(turning.sum()),
        "factor": factor,
        "slowed": float(slower.max()),
        "scaled": rope.scale != 1,
    }
    if rope.window:
        tokens, is_chunk = rope.window
        facts["chunk" if is_chunk else "window"] = tokens
    return facts


# Models whose layers are alike, of which two are enough, and the others.
ALIKE = []
LAYERED = []
for model, entry in MODELS.items():
    n_layers = entry["config"].get("num_hidden_layers")
    is_alike = n_layers == entry["ropes"][0]["layers"]
    (ALIKE if is_alike else LAYERED).append(model)


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", ALIKE)
def test_the_rope_of_a_published_model_is_read_as_it_is(model):
    settings = evaluated(MODELS[model]["config"])
    settings["num_hidden_layers"] = 2

    found = reading(configuration(settings))

    (rope,) = found.ropes
    (expected,) = typed(model)
    assert read(rope) == pytest.approx({**expected, "layers": 2}, rel=1e-4)
    assert found.others == []


@pytest.mark.slow
@pytest.mark.parametrize("model", LAYERED)
def test_the_kinds_of_layers_of_a_published_model_are_read_as_they_are(model):
    entry = MODELS[model]

    found = reading(configuration(evaluated(entry["config"])))

    for rope, expected in zip(found.ropes, typed(model), strict=True):
        assert read(rope) == pytest.approx(expected, rel=1e-4)
    without_rope = [number_in(line) for line in found.others if "no RoPE" in line]
    without_attention = [
        number_in(line) for line in found.others if "no attention" in line
    ]
    assert sum(without_rope) == entry.get("without_rope", 0)
    assert sum(without_attention) == entry.get("without_attention", 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", TABLE["no_rope"])
def test_a_published_model_without_rope_is_not_believed_to_have_it(model):
    settings = TABLE["no_rope"][model]
    with pytest.raises(Undefined, match=f"'{settings['model_type']}' has no RoPE"):
        ropes(configuration(settings))


@pytest.mark.parametrize("model", TABLE["unknown"])
def test_a_published_model_of_a_kind_that_the_library_lacks_is_refused(model):
    kind = TABLE["unknown"][model]
    with pytest.raises(UserError, match=f"unknown model_type '{kind}'"):
        configuration({"model_type": kind})


def test_factors_of_a_file_are_not_computed_anew():
    """Phi-3.5-MoE's config.json has them: 1.2432, where LongRoPE's rule gives 1.19."""
    section = {
        "type": "longrope",
        "short_factor": 64 * [1.0],
        "long_factor": 64 * [2.0],
        "short_mscale": 1.2431,
        "long_mscale": 1.2432,
        "original_max_position_embeddings": 4096,
    }
    settings = {"model_type": "phimoe", "num_hidden_layers": 2, "rope_scaling": section}
    (rope,) = ropes(configuration({**settings, "max_position_embeddings": 8192}))
    _, short = rope.at(4096)
    _, long = rope.at(4097)
    assert short == pytest.approx(1.2431)
    assert long == pytest.approx(1.2432)


def test_the_base_of_a_layer_is_the_one_that_turns_it():
    settings = {
        "model_type": "granite_swa",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "layer_rope_theta": [5e4, 5e4, 5e4, 1e6],
    }
    full, sliding = ropes(configuration(settings))
    assert full.base == 1e6
    assert sliding.base == 5e4


# The defaults of the library's classes: what a file that leaves out all keys means.
DEFAULTS = sorted({*WITH_ROPE} - {"blt", "hrm_text"})


def of_defaults(kind: str) -> dict[str, Any]:
    """Return the keys on positions that a class of the library fills in."""
    settings = {"model_type": kind, **COMPLETED.get(kind, {})}
    config = configuration(settings).to_dict()
    keys = {path[0]: config[path[0]] for path, _ in of_positions(config)}
    sections = {"rope_parameters": config["rope_parameters"]}
    return {**settings, **keys, **sections}


def silent_changes(settings: dict[str, Any]) -> list[str]:
    """Return the keys whose change neither changes what is read nor is named, or is
    named as not read and changes a rotation.
    """
    before = of_settings("", settings)
    named = " ".join(line for line in before.lines if line.startswith("! not read"))
    silent = []
    for path, value in of_positions(settings):
        key = ".".join(path)
        is_named = re.search(rf"[ ,]{re.escape(key)}(,|:|$|\s)", named) is not None
        for other in changes(value)[:1]:
            try:
                after = of_settings("", with_value(settings, path, other))
            except UserError:  # a change that is refused is read
                assert not is_named, key
                continue
            if is_named:
                assert turned(after.ropes) == turned(before.ropes), key
            elif printed(after) == printed(before):
                silent.append(key)
    return silent


def printed(read: Read) -> list[str]:
    return [*describe(read.label, read.ropes, []), *read.others, *read.lines]


def turned(every_rope: list[Rope]) -> list[Any]:
    """Return what reaches the layers: which they are, frequencies, factors, windows."""
    found = []
    for rope in every_rope:
        for length in (512, rope.train_length, rope.longest):
            f, factor = rope.at(length)
            found.append((rope.share, rope.window, rope.scale, f.tolist(), factor))
    return found


# Each takes many seconds: one in twelve, or all with POSBENCH_EVERY=1.
STEP = 1 if EVERY else 12


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", list(MODELS)[::STEP])
def test_a_change_of_any_key_of_a_published_model_is_seen_or_the_key_is_named(model):
    settings = evaluated(MODELS[model]["config"])
    if model in ALIKE:
        settings["num_hidden_layers"] = 2
    ratios = settings.get("compress_ratios")  # DeepSeek V4's layers take minutes
    if ratios:
        settings["num_hidden_layers"] = 4
        settings["compress_ratios"] = [*ratios[:4], 0]
    assert silent_changes(settings) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEFAULTS[::STEP])
def test_a_change_of_any_default_of_a_class_is_seen_or_the_key_is_named(kind):
    assert silent_changes(of_defaults(kind)) == []
