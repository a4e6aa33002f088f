"""Models of HuggingFace: our numbers are the library's own, and what is wrong with a
folder is said in one line.
"""

import json
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
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support import posbench

from posbench import machine
from posbench.errors import Undefined, UserError
from posbench.evaluation.models import Variant, nll_of
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
    return model.varied(Variant(extension=text), length).subject


def ids_for(kind: str) -> NDArray[np.integer]:
    return SHORT_IDS if kind in TABLES else IDS


def every_nll(model: HuggingFaceModel, ids: NDArray[np.integer]) -> Floats:
    return nll_of(model, ids, ids.shape[1] - 1, 0)


def theirs(folder: Path, ids: Any, masks: Any = None, **changes: Any) -> Floats:
    """Return losses by the library's own loading and logits, with masks and with
    changes of the configuration.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    config.get_text_config().update(changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32
    )
    x = torch.from_numpy(ids)
    with torch.no_grad():
        logits = model.eval()(x[:, :-1], use_cache=False, attention_mask=masks).logits
    nll = F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none")
    return nll.numpy()


def assert_close(ours: Floats, wanted: Floats) -> None:
    np.testing.assert_allclose(ours, wanted, atol=1e-5, rtol=0)


def assert_differ(ours: Floats, other: Floats) -> None:
    assert np.abs(ours - other).mean() > 1e-3


def test_the_models_here_are_all_that_are_called_tested() -> None:
    assert MODELS.keys() == load.TESTED.keys()


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("scored", ["all", 7])
def test_nll_is_that_of_the_librarys_own_logits(folder_of, kind, scored):
    ids = ids_for(kind)
    length = ids.shape[1] - 1
    changes = {"max_seq_len": length} if kind == "mpt" else {}
    wanted = theirs(folder_of(kind), ids, **changes)
    count = length if scored == "all" else scored
    ours = nll_of(subject(folder_of(kind)), ids, count, 0)
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
    near = (distance >= 0) & ((distance < WINDOW) | (places < sinks))
    full = additive(near)
    own = getattr(config, "sliding_window", None)
    if own is None:
        return full
    sliding = additive(near & (distance < own))
    if len({*(getattr(config, "layer_types", None) or ())}) > 1:
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding if config.model_type == "mistral" else full


def additive(seen: torch.Tensor) -> torch.Tensor:
    """Return what is added to scores (B, 1, T, T) so that only some keys are seen."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(2, 1, *seen.shape).masked_fill(~seen, lowest)


@pytest.mark.sample(6)
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("kind", NARROWING)
def test_a_window_with_sinks_is_the_librarys_own_mask(folder_of, kind, sinks):
    model = subject(folder_of(kind))
    ids = ids_for(kind)
    length = ids.shape[1] - 1
    variant = Variant(window=WINDOW, sinks=sinks)
    narrow = every_nll(model.varied(variant, length).subject, ids)
    plain = every_nll(model, ids)
    assert_close(narrow[:, :WINDOW], plain[:, :WINDOW])
    assert_differ(narrow[:, WINDOW:], plain[:, WINDOW:])
    if kind not in NO_MASKS:
        masks = masks_of(model.config, length, sinks)
        assert_close(narrow, theirs(folder_of(kind), ids, masks))


@pytest.mark.parametrize("kind", NO_MASKS)
@pytest.mark.parametrize(("changed_ids", "moves"), [(slice(3, 20), False), (1, True)])
def test_a_window_hides_all_before_it_but_the_sinks(
    folder_of, kind, changed_ids, moves
):
    variant = Variant(window=8, sinks=3)  # 2 layers see 14 back
    narrowed = subject(folder_of(kind)).varied(variant, LENGTH).subject
    ids = SHORT_IDS[:1]
    other = ids.copy()
    other[0, changed_ids] = (other[0, changed_ids] + 1) % VOCABULARY
    difference = nll_of(narrowed, ids, 4, 0) - nll_of(narrowed, other, 4, 0)
    assert bool(np.abs(difference).max() > 1e-4) is moves


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": LENGTH,
}
FULL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
EXTENSIONS: list[tuple[str, str, dict[str, Any]]] = [
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
    wanted = theirs(folder, IDS, rope_parameters={**original, **parameters})
    assert_close(every_nll(extended(subject(folder), text), IDS), wanted)


def test_an_extension_leaves_the_model_itself_as_it_was(folder_of):
    model = subject(folder_of("llama"))
    before = every_nll(model, IDS)

    after = every_nll(extended(model, "yarn:factor=4"), IDS)

    assert_differ(after, before)
    assert_close(every_nll(model, IDS), before)


# their factor is by default that of the length
FOLLOWING = ("pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope")
FIXED = (
    "dynamic_ntk:factor=3",
    "yarn:factor=8",
    "yarn:ramp=rotations:beta=2",
    "longrope:factor=4",
    "abf",
)
ROTARY = [*ROPE, "granite", "gemma3"]


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
        varied = model.varied(Variant(extension=text), LONG)
        parameters = varied.facts["rope_parameters"]
        if "gemma3" in kind:
            parameters = model.config.rope_parameters | {"full_attention": parameters}
        nll = every_nll(varied.subject, IDS)
        wanted = theirs(folder_of(kind), IDS, rope_parameters=parameters)
        assert np.abs(nll - wanted).max() < 1e-5, text
        assert np.abs(nll - plain).mean() > 1e-4, text


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", ROTARY)
def test_a_method_that_follows_the_length_changes_nothing_up_to_the_trained_one(
    folder_of, kind
):
    model = subject(folder_of(kind))
    plain = every_nll(model, SHORT_IDS)
    for text in FOLLOWING:
        nll = every_nll(extended(model, text, LENGTH), SHORT_IDS)
        assert np.abs(nll - plain).max() < 1e-5, text


def test_a_model_without_a_rotary_module_turns_as_nothing() -> None:
    assert not turns_as(torch.nn.Linear(2, 2), {}, LONG)


@pytest.mark.parametrize(("slowest", "is_alike"), [(1.0, True), (0.995, False)])
def test_half_a_percent_of_the_slowest_pair_is_noticed(folder_of, slowest, is_alike):
    model = subject(folder_of("llama"))
    made = extension(model.config, "abf", LONG, LENGTH, {"base": 1e4})
    (rotary,) = made.rotations.values()
    factors = torch.tensor([1, 1, 1, slowest])
    rescaled = rotary.rescaled(rotary.inv_freq() * factors, 1.0)
    assert turns_as(model.model, {None: rescaled}, LONG) is is_alike


def test_phi3_is_not_extended_since_its_module_follows_rules_of_its_own(folder_of):
    with pytest.raises(Undefined, match="other frequencies"):
        extended(subject(folder_of("phi3")), "yarn:factor=4")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("llama", "rerope", "no configuration for 'rerope'"),
        ("llama", "clipped_rope:pairs=2", "comes to a halt"),
        ("bloom", "yarn", "no rotary encoding"),
        ("gpt2", "pi", f"table of {LENGTH} positions"),
    ],
)
def test_an_extension_that_a_model_does_not_have_is_undefined(
    folder_of, kind, text, message
):
    with pytest.raises(Undefined, match=message):
        extended(subject(folder_of(kind)), text)


@pytest.fixture
def stretched(tmp_path) -> HuggingFaceModel:
    """A model that is extended already."""
    parameters = LLAMA3 | {
        "rope_theta": 1e4,
        "original_max_position_embeddings": 24,
    }
    save("llama", tmp_path / "m", rope_parameters=parameters)
    return subject(tmp_path / "m")


def test_a_model_that_is_extended_already_is_not_extended_again(stretched):
    with pytest.raises(Undefined, match="llama3"):
        extended(stretched, "pi")


def test_the_training_length_is_that_before_the_extension(stretched, tmp_path):
    assert load.find(str(tmp_path / "m")).train_length == 24


@pytest.mark.parametrize("text", ["yran", "yarn:factor=0.5"])
def test_a_mistyped_extension_is_an_error_also_where_a_model_has_none(
    folder_of, stretched, text
):
    models = [subject(folder_of("llama")), subject(folder_of("bloom")), stretched]
    for model in models:
        with pytest.raises(UserError) as refusal:
            extended(model, text)
        assert not isinstance(refusal.value, Undefined)


LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
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
    save("llama", tmp_path / "m", rope_parameters=LENGTH_DEPENDENT[method])
    model = subject(tmp_path / "m")
    longest = np.concatenate([IDS, IDS], axis=1)
    for ids in (IDS, SHORT_IDS, IDS[:, : LENGTH + 9], longest, IDS):
        fresh = subject(tmp_path / "m")
        assert np.array_equal(nll_of(model, ids, 8, 0), nll_of(fresh, ids, 8, 0))
    assert_close(every_nll(model, IDS), theirs(tmp_path / "m", IDS))


@pytest.mark.parametrize("method", LENGTH_DEPENDENT)
def test_an_extension_has_the_frequencies_of_its_length_for_shorter_inputs_too(
    folder_of, method
):
    used = extended(subject(folder_of("llama")), method)
    fresh = extended(subject(folder_of("llama")), method)
    nll_of(used, IDS[:, :20], 8, 0)
    ids = IDS[:, :70]
    assert np.array_equal(nll_of(used, ids, 8, 0), nll_of(fresh, ids, 8, 0))


def with_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def without_a_tensor(folder: Path) -> None:
    with_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def not_a_number(folder: Path) -> None:
    with_tensors(folder, lambda t: t["model.norm.weight"].fill_(float("nan")))


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def beside_shards(folder: Path) -> None:
    shutil.copy(
        folder / "model.safetensors", folder / "model-00001-of-00002.safetensors"
    )


def high_ids(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace(" 130", " 999"))


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def with_keys(**keys: Any) -> Callable[[Path], None]:
    return lambda folder: changed(folder, **keys)


WRONG: list[tuple[Callable[[Path], object], str]] = [
    (not_a_number, "logits are not finite in fp32"),
    (without_a_tensor, "missing_keys model.layers.1."),
    (with_keys(num_hidden_layers=1), "unexpected_keys model.layers.1"),
    (with_keys(intermediate_size=48), "transformers cannot load it"),
    (pickled, "pickled weights may run code"),
    (beside_shards, "two sets of weights, model.safetensors and model-00001-of-00002"),
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
    assert posbench("evaluate", str(model), *EVALUATE) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
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
    assert message in refusal_of(Path("model"), capsys)


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
    blobs = tmp_path / "blobs"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of("llama"))
    model.save_pretrained(blobs, max_shard_size="30kB")
    name = "someone/evil"
    changed(blobs, _attn_implementation=name, attn_implementation=name)
    shutil.copy(folder_of("llama") / "tokenizer.json", blobs)
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    return folder


@pytest.mark.slow
def test_shards_behind_links_are_read_and_a_named_attention_is_not_fetched(
    folder_of, snapshot
):
    ours = every_nll(subject(snapshot), IDS)
    assert np.array_equal(ours, every_nll(subject(folder_of("llama")), IDS))


@pytest.mark.slow
def test_a_byte_of_the_weights_changes_the_digest(snapshot):
    before = load.find(str(snapshot)).sha256()
    last = max(snapshot.glob("model-*.safetensors")).resolve()
    last.write_bytes(last.read_bytes()[:-1] + b"\7")
    assert load.find(str(snapshot)).sha256() != before


def results() -> Path:
    """Return the only folder of results."""
    (folder,) = Path("outputs", "models").glob("[!.]*")
    return folder


def test_an_untested_kind_without_rope_is_undefined_beyond_its_length(folder_of):
    with pytest.raises(Undefined, match="mamba is untested and has no RoPE"):
        subject(folder_of("mamba")).varied(Variant(), LENGTH + 1)


def test_a_recurrent_state_has_no_windows(folder_of):
    with pytest.raises(Undefined, match="do not restrict all layers of mamba"):
        subject(folder_of("mamba")).varied(Variant(window=9), LENGTH)


def test_random_weights_are_called_not_learned(
    folder_of, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_text(Path("text.txt"))
    asked = ["length=48", "protocol=fixed_target"]
    assert posbench("evaluate", str(folder_of("llama")), *EVALUATE, *asked) == 0
    assert "a guess among 131 tokens has 4.875" in capsys.readouterr().out


@pytest.mark.parametrize("kind", MODELS)
def test_the_training_length_comes_from_the_folder(tmp_path, kind):
    made = configuration(kind)
    source = load.Source(tmp_path, "", None, made.to_dict(), made)
    assert source.train_length == LENGTH


@pytest.mark.parametrize(
    ("begins", "bos", "reading"),
    [
        (None, None, (0, False)),
        (None, "document", (0, False)),
        (None, "window", (0, True)),
        (5, None, (5, True)),
        (5, "document", (5, False)),
        (5, "window", (5, True)),
    ],
)
def test_what_stands_before_documents_comes_from_the_folder(
    tmp_path, begins, bos, reading
):
    save("olmo", tmp_path / "m", begins)
    found = evaluate.reading_of(load.find(str(tmp_path / "m")), bos)
    assert (found.separator, found.first) == reading


@pytest.mark.parametrize(("kind", "precision"), [("llama", "bf16"), ("bloom", "fp32")])
def test_weights_in_bf16_are_evaluated_so_where_that_is_fast_and_blooms_never(
    tmp_path, tiny_config, monkeypatch, kind, precision
):
    """Its biases would be rounded, too, and far positions would be one."""
    monkeypatch.setattr(machine, "bf16_is_fast", lambda device: True)
    made = configuration(kind, dtype=torch.bfloat16)
    source = load.Source(tmp_path, "", None, {}, made)
    cpu = torch.device("cpu")
    assert evaluate.precision_of(source, tiny_config.evaluation, cpu) == precision


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
    assert posbench("evaluate", "./model", *asked) == 0

    (row,) = [row for row in read_rows(results()) if "protocol" in row]
    units = row["units"]
    assert row["n_tokens"] == sum(units["tokens"])
    assert row["dtype"] == "fp32"
    assert sum(units["nll"]) / row["n_tokens"] == pytest.approx(row["nll"], abs=1e-5)

    record = json.loads((results() / "run.json").read_text())
    words = Path("text", "test.txt").read_text().split()
    ids = np.array([record["data"]["separator"]["id"], *(int(w[1:]) for w in words)])
    windows = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1).copy()
    if begins is not None:
        windows[:, 0] = begins
    of_window = theirs(Path("model"), windows).astype(float).sum(axis=1)
    for nll, tokens in zip(units["nll"], units["tokens"], strict=True):
        n_windows = tokens // LENGTH
        last_start = len(of_window) - (n_windows - 1) * LENGTH
        sums = [
            of_window[start : start + tokens : LENGTH].sum()
            for start in range(last_start)
        ]
        assert np.abs(np.array(sums) - nll).min() < 1e-3
