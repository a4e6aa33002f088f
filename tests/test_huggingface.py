"""Models of HuggingFace: our numbers are the library's own, and what is wrong with a
folder is said in one line.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_models import (
    LENGTH,
    MODELS,
    UNTESTED,
    VOCABULARY,
    changed,
    configuration,
    save,
    write_text,
)
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support import change_record, nll_of, posbench, without_room_beyond

from posbench import machine
from posbench.errors import Undefined, UserError
from posbench.evaluation.subjects import Variant
from posbench.huggingface import evaluate, load
from posbench.huggingface.subject import HuggingFaceModel
from posbench.rope.extension import extension, turns_as
from posbench.run.rows import read_rows

transformers = pytest.importorskip("transformers")
Folders = Callable[[str], Path]
Floats = NDArray[np.floating]

LONG = 2 * LENGTH
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LONG + 1))
SHORT_IDS = IDS[:, : LENGTH + 1]
EVERY_KIND = MODELS | UNTESTED
TABLES = ("gpt2", "opt")  # kinds that end at their trained length
ROPE = [kind for kind in MODELS if load.TESTED[kind] == "rope"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Folders:
    """Return a function that makes the model of a kind once and returns its folder."""
    shelf = tmp_path_factory.mktemp("shelf")

    def folder_of(kind: str) -> Path:
        folder = shelf / kind
        if not folder.exists():
            torch.manual_seed(0)
            save(kind, folder)
        return folder

    return folder_of


def subject(folder: Path) -> HuggingFaceModel:
    source = load.find(str(folder))
    model = load.load(folder, source.config, "fp32")
    return HuggingFaceModel(model, source.kind, LENGTH, "fp32")


def extended(model: HuggingFaceModel, text: str, length: int = LONG) -> Any:
    variant = Variant(extension=text)
    changed, _ = model.in_variant(variant, length)
    return changed


def ids_for(kind):
    return SHORT_IDS if kind in TABLES else IDS


def every_nll(model, ids):
    length = ids.shape[1] - 1
    return nll_of(model, ids, length, 0)


def theirs(folder: Path, ids: Any, masks: Any = None, **changes: Any) -> Floats:
    """Return losses by the library's own loading and logits, with masks and with
    changes of the configuration.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    config.get_text_config().update(changes)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, config=config, dtype=torch.float32)
    model.eval()

    tokens = torch.from_numpy(ids)
    read = tokens[:, :-1]
    targets = tokens[:, 1:]
    with torch.no_grad():
        output = model(read, use_cache=False, attention_mask=masks)
    logits = output.logits.transpose(1, 2)  # (B, V, T)
    nll = F.cross_entropy(logits, targets, reduction="none")
    return nll.numpy()


def assert_close(ours, wanted):
    np.testing.assert_allclose(ours, wanted, atol=1e-5, rtol=0)


def assert_differ(ours, other):
    difference = np.abs(ours - other)
    assert difference.mean() > 1e-3


def test_the_models_here_are_all_that_are_called_tested():
    assert MODELS.keys() == load.TESTED.keys()


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("scored", ["all", 7])
def test_nll_is_that_of_the_librarys_own_logits(folder_of, kind, scored):
    folder = folder_of(kind)
    ids = ids_for(kind)
    length = ids.shape[1] - 1
    count = length if scored == "all" else scored

    ours = nll_of(subject(folder), ids, count, 0)

    changes = {"max_seq_len": length} if kind == "mpt" else {}
    wanted = theirs(folder, ids, **changes)
    np.testing.assert_allclose(ours, wanted[:, -count:], atol=1e-6, rtol=1e-6)
    assert wanted.std() > 0.3  # the weights do something


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_causal_model_is_accepted(folder_of, kind):
    subject(folder_of(kind)).refuse_not_causal()


WINDOW = 12
# the library takes no masks of these, or counts positions by them
NO_MASKS = ("bloom", "mpt", "opt")
NARROWING = [kind for kind in EVERY_KIND if kind != "mamba"]


def masks_of(config: Any, length: int, sinks: int) -> Any:
    """Return masks with a window and sinks, beside a layer's own window: one mask, or
    one for each type of layer.
    """
    places = torch.arange(length)
    distance = places[:, None] - places
    is_sink = places < sinks
    is_near = distance < WINDOW
    is_seen = (distance >= 0) & (is_near | is_sink)
    full = additive(is_seen)

    own = getattr(config, "sliding_window", None)
    if own is None:
        return full
    sliding = additive(is_seen & (distance < own))
    types = getattr(config, "layer_types", None) or []
    if len(set(types)) > 1:
        return {"full_attention": full, "sliding_attention": sliding}
    if config.model_type == "mistral":
        return sliding
    return full


def additive(is_seen):
    """Return what is added to scores (B, 1, T, T) so that only some keys are seen."""
    lowest = torch.finfo(torch.float32).min
    scores = torch.zeros(2, 1, *is_seen.shape)
    return scores.masked_fill(~is_seen, lowest)


@pytest.mark.sample(6)
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("kind", NARROWING)
def test_a_window_with_sinks_is_the_librarys_own_mask(folder_of, kind, sinks):
    model = subject(folder_of(kind))
    ids = ids_for(kind)
    length = ids.shape[1] - 1
    variant = Variant(window=WINDOW, sinks=sinks)
    narrowed, _ = model.in_variant(variant, length)

    narrow = every_nll(narrowed, ids)

    plain = every_nll(model, ids)
    assert_close(narrow[:, :WINDOW], plain[:, :WINDOW])
    assert_differ(narrow[:, WINDOW:], plain[:, WINDOW:])
    if kind not in NO_MASKS:
        masks = masks_of(model.config, length, sinks)
        wanted = theirs(folder_of(kind), ids, masks)
        assert_close(narrow, wanted)


@pytest.mark.parametrize("kind", NO_MASKS)
@pytest.mark.parametrize(("changed_ids", "moves"), [(slice(3, 20), False), (1, True)])
def test_a_window_hides_all_before_it_but_the_sinks(
    folder_of, kind, changed_ids, moves
):
    model = subject(folder_of(kind))
    variant = Variant(window=8, sinks=3)  # 2 layers see 14 back
    narrowed, _ = model.in_variant(variant, LENGTH)
    ids = SHORT_IDS[:1]
    other = ids.copy()
    other[0, changed_ids] += 1
    other %= VOCABULARY

    before = nll_of(narrowed, ids, 4, 0)
    after = nll_of(narrowed, other, 4, 0)

    largest = np.abs(after - before).max()
    has_moved = bool(largest > 1e-4)
    assert has_moved is moves


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": LENGTH,
}
FULL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
EXTENSIONS = [
    ("llama", "pi", {"rope_type": "linear", "factor": 2.0}),
    ("llama", "dynamic_ntk:factor=2", {"rope_type": "dynamic", "factor": 2.0}),
    ("llama", "yarn:factor=4", YARN),
    ("llama", "llama3", LLAMA3),
    ("llama", "abf:base=500000", {"rope_theta": 500000.0}),
    ("gemma3_text", "pi", {"full_attention": FULL}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "text", "parameters"), EXTENSIONS)
def test_an_extension_is_the_librarys_own_model_of_that_configuration(
    folder_of, kind, text, parameters
):
    folder = folder_of(kind)
    original = transformers.AutoConfig.from_pretrained(folder).rope_parameters
    wanted = theirs(folder, IDS, rope_parameters=original | parameters)

    model = extended(subject(folder), text)

    assert_close(every_nll(model, IDS), wanted)


def test_an_extension_leaves_the_model_itself_as_it_was(folder_of):
    model = subject(folder_of("llama"))
    before = every_nll(model, IDS)

    longer = extended(model, "yarn:factor=4")

    of_longer = every_nll(longer, IDS)
    after = every_nll(model, IDS)
    assert_differ(of_longer, before)
    assert_close(after, before)


def test_pairs_of_neighbours_are_extended_as_pairs_half_a_head_apart(folder_of):
    folder = folder_of("cohere")

    variant = Variant(extension="yarn:factor=4")
    made, facts = subject(folder).in_variant(variant, LONG)

    parameters = facts["rope_parameters"]
    wanted = theirs(folder, IDS, rope_parameters=parameters)
    assert_close(every_nll(made, IDS), wanted)


# their factor is by default that of the length
FOLLOWING = ("pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope")
FIXED = (
    "dynamic_ntk:factor=3",
    "yarn:factor=8",
    "yarn:ramp=rotations:beta=2",
    "longrope:factor=4",
    "abf",
)
ROTARY = [*ROPE, "granite", "gemma3", "cohere"]


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", ROTARY)
def test_every_method_is_the_library_with_the_parameters_that_the_row_records(
    folder_of, kind
):
    """Each extension compares the frequencies of the library's ROPE_INIT_FUNCTIONS with
    those of encodings.extend.
    """
    model = subject(folder_of(kind))
    plain = every_nll(model, IDS)
    for text in (*FOLLOWING, *FIXED):
        made, facts = model.in_variant(Variant(extension=text), LONG)
        parameters = facts["rope_parameters"]
        if "gemma3" in kind:
            changes = {"full_attention": parameters}
            parameters = model.config.rope_parameters | changes
        nll = every_nll(made, IDS)
        wanted = theirs(folder_of(kind), IDS, rope_parameters=parameters)

        from_library = np.abs(nll - wanted)
        from_plain = np.abs(nll - plain)
        assert from_library.max() < 1e-5, text
        assert from_plain.mean() > 1e-4, text


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", ROTARY)
def test_a_method_that_follows_the_length_changes_nothing_up_to_the_trained_one(
    folder_of, kind
):
    model = subject(folder_of(kind))
    plain = every_nll(model, SHORT_IDS)
    for text in FOLLOWING:
        unchanged = extended(model, text, LENGTH)
        nll = every_nll(unchanged, SHORT_IDS)
        difference = np.abs(nll - plain)
        assert difference.max() < 1e-5, text


def test_a_model_without_a_rotary_module_turns_as_nothing():
    model = torch.nn.Linear(2, 2)
    assert not turns_as(model, {}, LONG)


@pytest.mark.parametrize(("slowest", "is_alike"), [(1.0, True), (0.995, False)])
def test_half_a_percent_of_the_slowest_pair_is_noticed(folder_of, slowest, is_alike):
    model = subject(folder_of("llama"))
    made = extension(model.config, "abf", LONG, LENGTH, {"base": 1e4})
    (rotary,) = made.rotations.values()
    factors = torch.tensor([1, 1, 1, slowest])
    frequencies = rotary.inv_freq() * factors
    rescaled = rotary.rescaled(frequencies, 1.0)

    turns_alike = turns_as(model.model, {None: rescaled}, LONG)

    assert turns_alike is is_alike


def test_phi3_is_not_extended_since_its_module_follows_rules_of_its_own(folder_of):
    model = subject(folder_of("phi3"))
    with pytest.raises(Undefined, match="other frequencies"):
        extended(model, "yarn:factor=4")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("llama", "rerope", "no configuration for 'rerope'"),
        ("llama", "misread:layout=half", "no configuration for 'misread'"),
        ("llama", "clipped_rope:pairs=2", "comes to a halt"),
        ("bloom", "yarn", "no rotary encoding"),
        ("gpt2", "pi", f"table of {LENGTH} positions"),
    ],
)
def test_an_extension_that_a_model_does_not_have_is_undefined(
    folder_of, kind, text, message
):
    model = subject(folder_of(kind))
    with pytest.raises(Undefined, match=message):
        extended(model, text)


@pytest.fixture
def stretched(tmp_path) -> Path:
    """The folder of a model that is extended already."""
    folder = tmp_path / "m"
    lengths = {"rope_theta": 1e4, "original_max_position_embeddings": 24}
    save("llama", folder, rope_parameters=LLAMA3 | lengths)
    return folder


def test_a_model_that_is_extended_already_is_not_extended_again(stretched):
    model = subject(stretched)
    with pytest.raises(Undefined, match="llama3"):
        extended(model, "pi")


def test_the_training_length_is_that_before_the_extension(stretched):
    source = load.find(str(stretched))
    assert source.train_length == 24


@pytest.mark.parametrize("text", ["yran", "yarn:factor=0.5"])
def test_a_mistyped_extension_is_an_error_also_where_a_model_has_none(
    folder_of, stretched, text
):
    for folder in (folder_of("llama"), folder_of("bloom"), stretched):
        model = subject(folder)
        with pytest.raises(UserError) as refusal:
            extended(model, text)
        assert not isinstance(refusal.value, Undefined)


LENGTH_DEPENDENT = {
    "dynamic_ntk": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": LENGTH,
    },
}


@pytest.mark.parametrize("method", LENGTH_DEPENDENT)
def test_a_row_does_not_follow_from_what_was_read_before(tmp_path, method):
    folder = tmp_path / "m"
    save("llama", folder, rope_parameters=LENGTH_DEPENDENT[method])
    model = subject(folder)
    longer = IDS[:, : LENGTH + 9]
    longest = np.concatenate([IDS, IDS], axis=1)

    for ids in (IDS, SHORT_IDS, longer, longest, IDS):
        fresh = subject(folder)
        nll = nll_of(model, ids, 8, 0)
        wanted = nll_of(fresh, ids, 8, 0)
        assert np.array_equal(nll, wanted)

    ours = every_nll(model, IDS)
    assert_close(ours, theirs(folder, IDS))


@pytest.mark.parametrize("method", LENGTH_DEPENDENT)
def test_an_extension_has_the_frequencies_of_its_length_for_shorter_inputs_too(
    folder_of, method
):
    folder = folder_of("llama")
    used = extended(subject(folder), method)
    fresh = extended(subject(folder), method)
    nll_of(used, IDS[:, :20], 8, 0)

    ids = IDS[:, :70]
    nll = nll_of(used, ids, 8, 0)

    wanted = nll_of(fresh, ids, 8, 0)
    assert np.array_equal(nll, wanted)


WEIGHTS = "model.safetensors"


def without_a_tensor(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def not_a_number(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def pickled(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def beside_shards(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    shutil.copy(folder / WEIGHTS, shard)


def beside_an_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def high_ids(folder):
    path = folder / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace(" 130", " 999"))


def adapter(folder):
    (folder / "adapter_config.json").write_text("{}")


def with_keys(**keys):
    return lambda folder: changed(folder, **keys)


WRONG = [
    (not_a_number, "logits are not finite in fp32"),
    (without_a_tensor, "missing_keys model.layers.1."),
    (with_keys(num_hidden_layers=1), "unexpected_keys model.layers.1"),
    (with_keys(intermediate_size=48), "transformers cannot load it"),
    (pickled, "pickled weights may run code"),
    (beside_shards, "two sets of weights, model.safetensors and model-00001-of-00002"),
    (beside_an_index, "two sets of weights, model.safetensors and model.safetensors.i"),
    (with_keys(quantization_config={"bits": 4}), "quantised"),
    (with_keys(auto_map={"AutoModel": "evil.Evil"}), "auto_map"),
    (high_ids, "it gives id 999, its"),
    (adapter, "adapter"),
]
EVALUATE = ["data.path=text.txt", "runtime.cache=cache", "device=cpu", "blocks=16"]


def refusal_of(model: Path, capsys: Any) -> str:
    """Evaluate a model, which is refused before anything is written; return the
    line.
    """
    write_text(Path("text.txt"), 1000)
    code = posbench("evaluate", str(model), *EVALUATE)
    assert code == 2
    printed = capsys.readouterr().err.strip()
    line = printed.splitlines()[-1]
    assert line.startswith("error: ")
    assert len(line) < 600
    assert not Path("outputs").exists()
    return line


@pytest.mark.sample(3)
@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_written(
    folder_of, tmp_path, monkeypatch, capsys, spoil, message
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder_of("llama"), "model")
    spoil(Path("model"))

    line = refusal_of(Path("model"), capsys)

    assert message in line


def test_a_model_that_looks_ahead_is_refused(folder_of, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder_of("gemma3_text"), "model")
    changed(Path("model"), use_bidirectional_attention=True)

    line = refusal_of(Path("model"), capsys)

    assert "is no causal model: later tokens" in line


@pytest.fixture
def snapshot(folder_of, tmp_path) -> Path:
    """A model as the hub's cache has it: weights in several files, all of them links;
    it names an attention on the hub.
    """
    whole = folder_of("llama")
    blobs = tmp_path / "blobs"
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(blobs, max_shard_size="30kB")
    name = "someone/evil"
    changed(blobs, _attn_implementation=name, attn_implementation=name)
    shutil.copy(whole / "tokenizer.json", blobs)

    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        link = folder / file.name
        link.symlink_to(Path("..", "..", "blobs", file.name))
    return folder


@pytest.mark.slow
def test_shards_behind_links_are_read_and_a_named_attention_is_not_fetched(
    folder_of, snapshot
):
    in_shards = subject(snapshot)
    whole = subject(folder_of("llama"))
    nll = every_nll(in_shards, IDS)
    wanted = every_nll(whole, IDS)
    assert np.array_equal(nll, wanted)


@pytest.mark.slow
def test_a_byte_of_the_weights_changes_the_digest(snapshot):
    before = load.find(str(snapshot)).sha256()

    last = max(snapshot.glob("model-*.safetensors")).resolve()
    content = last.read_bytes()
    last.write_bytes(content[:-1] + b"\7")

    after = load.find(str(snapshot)).sha256()
    assert after != before


def results() -> Path:
    """Return the only folder of results."""
    (folder,) = Path("outputs", "models").glob("[!.]*")
    return folder


@pytest.fixture
def results_of_mamba(folder_of, tmp_path, monkeypatch) -> Path:
    """The results of an untested kind without RoPE up to twice its length, by itself
    and with an extension.
    """
    monkeypatch.chdir(tmp_path)
    write_text(Path("text.txt"))
    folder = str(folder_of("mamba"))
    lengths = ["length=48,96", "train_length=48", "protocol=fixed_target"]
    code = posbench("evaluate", folder, *EVALUATE, *lengths, "extension=yarn")
    assert code == 0
    return results()


def test_an_untested_kind_is_recorded_as_such(results_of_mamba):
    record = json.loads((results_of_mamba / "run.json").read_text())
    assert record["support"]["level"] == "untested"


def test_without_rope_an_extension_and_longer_inputs_are_undefined(results_of_mamba):
    statuses = {}
    for row in read_rows(results_of_mamba):
        if row.get("window") is None:
            statuses[row["length"], row["extension"]] = row["status"]

    assert statuses == {
        (48, None): "ok",
        (96, None): "undefined",
        (48, "yarn"): "undefined",
        (96, "yarn"): "undefined",
    }


def test_an_untested_kind_without_rope_is_undefined_beyond_its_length(folder_of):
    model = subject(folder_of("mamba"))
    with pytest.raises(Undefined, match="mamba is untested and has no RoPE"):
        model.in_variant(Variant(), LENGTH + 1)


def test_a_recurrent_state_has_no_windows(folder_of):
    model = subject(folder_of("mamba"))
    with pytest.raises(Undefined, match="do not restrict all layers of mamba"):
        model.in_variant(Variant(window=9), LENGTH)


def test_random_weights_are_called_not_learned(
    folder_of, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_text(Path("text.txt"))
    folder = str(folder_of("llama"))
    asked = [*EVALUATE, "length=48", "protocol=fixed_target"]

    code = posbench("evaluate", folder, *asked)

    assert code == 0
    printed = capsys.readouterr().out
    assert "a guess among 131 tokens has 4.875" in printed


def test_a_length_without_room_costs_no_other_result_of_several_models(
    folder_of, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_text(Path("text.txt"))
    models = [str(folder_of("llama")), str(folder_of("mistral"))]
    asked = [*EVALUATE, "length=48,96", "protocol=fixed_target", "windowed=false"]
    logits = without_room_beyond(LENGTH, HuggingFaceModel)
    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceModel, "logits", logits)
        code = posbench("evaluate", *models, *asked, "--json")

    assert code == 1
    for run in json.loads(capsys.readouterr().out):
        assert run["status"] == "done"
        statuses = {row["length"]: row["status"] for row in run["rows"]}
        assert statuses == {48: "ok", 96: "failed"}
    assert posbench("evaluate", *models, *asked) == 0


def test_a_refused_evaluation_leaves_the_record_as_it_was(
    folder_of, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_text(Path("text.txt"))
    asked = [str(folder_of("llama")), *EVALUATE, "length=48", "protocol=fixed_target"]
    assert posbench("evaluate", *asked) == 0
    record = results() / "run.json"
    change_record(results(), data={"sha256": "another"})
    before = record.read_bytes()

    code = posbench("evaluate", *asked, "windowed=false")

    assert code == 2
    assert "has results on another text" in capsys.readouterr().err
    assert record.read_bytes() == before


@pytest.mark.parametrize("kind", MODELS)
def test_the_training_length_comes_from_the_folder(tmp_path, kind):
    made = configuration(kind)
    source = load.Source(tmp_path, "", None, made.to_dict(), made)
    assert source.train_length == LENGTH


@pytest.mark.parametrize(
    ("begins", "bos", "separator", "first"),
    [
        (None, None, 0, False),
        (None, "document", 0, False),
        (None, "window", 0, True),
        (5, None, 5, True),
        (5, "document", 5, False),
        (5, "window", 5, True),
    ],
)
def test_what_stands_before_documents_comes_from_the_folder(
    tmp_path, begins, bos, separator, first
):
    save("olmo", tmp_path / "m", begins)
    source = load.find(str(tmp_path / "m"))

    reading = evaluate.reading_of(source, bos)

    assert reading.separator == separator
    assert reading.first is first


@pytest.mark.parametrize(("kind", "precision"), [("llama", "bf16"), ("bloom", "fp32")])
def test_weights_in_bf16_are_evaluated_so_where_that_is_fast_and_blooms_never(
    tmp_path, tiny_config, monkeypatch, kind, precision
):
    """Its biases would be rounded, too, and far positions would be one."""
    monkeypatch.setattr(machine, "bf16_is_fast", lambda device: True)
    made = configuration(kind, dtype=torch.bfloat16)
    source = load.Source(tmp_path, "", None, {}, made)
    cpu = torch.device("cpu")

    chosen = evaluate.precision_of(source, tiny_config.evaluation, cpu)

    assert chosen == precision


@pytest.mark.parametrize("begins", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_rows_are_what_the_librarys_logits_give_on_the_same_windows(
    tmp_path, monkeypatch, begins
):
    """From the text alone, by the protocol's definition: no code of posbench finds the
    windows or scores them.
    """
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    for name in ("train", "validation", "test"):
        write_text(Path("text", f"{name}.txt"), 900)
    save("gpt_neox", Path("model"), begins)
    asked = ["data.path=text", *EVALUATE[1:], "length=48", "protocol=nonoverlap"]

    code = posbench("evaluate", "./model", *asked)

    assert code == 0
    (row,) = [row for row in read_rows(results()) if "protocol" in row]
    units = row["units"]
    mean = sum(units["nll"]) / row["n_tokens"]
    assert row["n_tokens"] == sum(units["tokens"])
    assert row["dtype"] == "fp32"
    assert mean == pytest.approx(row["nll"], abs=1e-5)

    record = json.loads((results() / "run.json").read_text())
    ids = [record["data"]["separator"]["id"]]
    for word in Path("text", "test.txt").read_text().split():
        ids.append(int(word[1:]))
    windows = sliding_window_view(np.array(ids), LENGTH + 1).copy()
    if begins is not None:
        windows[:, 0] = begins
    nll_of_tokens = theirs(Path("model"), windows).astype(float)
    nll_of_windows = nll_of_tokens.sum(axis=1)
    for nll, tokens in zip(units["nll"], units["tokens"], strict=True):
        n_windows = tokens // LENGTH
        n_starts = len(windows) - (n_windows - 1) * LENGTH
        differences = []
        for start in range(n_starts):
            its_windows = nll_of_windows[start : start + tokens : LENGTH]
            differences.append(abs(its_windows.sum() - nll))
        assert min(differences) < 1e-3
