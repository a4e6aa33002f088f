"""Models of HuggingFace: our numbers are the library's own, and what is wrong with a folder is said in one line."""

import dataclasses
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_models import LENGTH, MODELS, UNTESTED, VOCABULARY, changed, configuration, save, write_text
from safetensors.torch import load_file, save_file
from support import posbench

import posbench as library_of_ours
from posbench import machine
from posbench.config.schema import Config
from posbench.errors import RunFailed, Undefined, UserError
from posbench.evaluation import choices
from posbench.evaluation.probes import Choice
from posbench.evaluation.subject import Ranker, Subject
from posbench.evaluation.variants import Variant
from posbench.huggingface import building, evaluate, rope
from posbench.huggingface import folder as folders
from posbench.huggingface.subject import HuggingFaceModel
from posbench.run_folder.jsonl import read_jsonl
from posbench.run_folder.rows import EvaluationRow

transformers = pytest.importorskip("transformers")
LONG = 2 * LENGTH
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LONG + 1))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, made as they are asked for."""
    return tmp_path_factory.mktemp("shelf")


def on(shelf: Path, kind: str) -> Path:
    if not (shelf / kind).exists():
        torch.manual_seed(0)
        save(kind, shelf / kind)
    return shelf / kind


def subject(folder: Path, longest: int = LONG, **more: Any) -> HuggingFaceModel:
    checkpoint = folders.read(folder)
    config = building.configuration(checkpoint, longest)
    model = building.built(checkpoint, config, "fp32")
    return HuggingFaceModel(checkpoint, model, checkpoint.kind, LENGTH, CPU, "fp32", **more)


def theirs(folder: Path, ids: np.ndarray, masks: Any = None, **changes: Any) -> np.ndarray:
    """What the library's own loading and logits come to, with masks and with changes of the configuration."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config.get_text_config(), key, value)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    x = torch.from_numpy(ids)
    with torch.no_grad():
        logits = model(x[:, :-1], use_cache=False, attention_mask=masks).logits
    return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none").numpy()


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", MODELS | UNTESTED)
def test_nll_is_that_of_the_librarys_own_logits(shelf: Path, kind: str) -> None:
    folder = on(shelf, kind)
    ids = IDS[:, : LENGTH + 1] if kind in ("gpt2", "opt") else IDS
    changes = {"max_seq_len": LONG} if kind == "mpt" else {}
    wanted = theirs(folder, ids, **changes)
    ours = subject(folder)
    assert isinstance(ours, Subject)
    assert np.abs(ours.nll(ids, ids.shape[1] - 1, 0) - wanted).max() < 1e-5
    assert np.abs(ours.nll(ids, 7, 0) - wanted[:, -7:]).max() < 1e-5
    assert wanted.std() > 0.3  # the weights do something
    ours.refuse_not_causal()
    assert isinstance(ours, Ranker)
    other = ids[:, -1:] + np.array([[0, -1]]) * (ids[:, -1:] > 0)  # of two candidates the first is the text's own
    assert np.abs(ours.ranked(ids, other[:, None], 0).nll[:, 0, 0] - wanted[:, -1]).max() < 1e-5


@pytest.mark.full
def test_an_exact_match_is_what_the_library_generates_greedily(shelf: Path) -> None:
    """Answers are what `generate` says, with its cache, one token after the other; then with one wrong token each."""
    model = subject(on(shelf, "llama"))
    prompts = torch.from_numpy(IDS[:, :40].reshape(4, 20))
    model.model.generation_config.eos_token_id = None  # it would end an answer there
    told = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    said = model.model.generate(prompts, attention_mask=torch.ones_like(prompts), **told).numpy()
    wrong = said.copy()
    wrong[np.arange(4), -1 - np.arange(4)] += 1
    for ids, exact in ((said, 1.0), (wrong, 0.0)):
        answers = [Choice(one, np.stack([one[-4:], one[-4:] + 1], axis=1), np.array([0, -1, 0, 0])) for one in ids]
        row = EvaluationRow(protocol="task", length=23, length_ratio=1.0, split="test", checkpoint_step=0, status="ok")
        problems = choices.Problems.of(answers)
        measured, blocks = choices.with_numbers(row, problems, model.ranked(problems.ids, problems.candidates, 0))
        assert measured.exact_match == exact and measured.mean_context == 20 + 5 / 3
        assert [block.n_tokens for block in blocks] == [3] * 4


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_past_a_table_a_length_is_undefined_before_any_forward_pass(shelf: Path, kind: str) -> None:
    model = subject(on(shelf, kind))
    model.varied(Variant(), LENGTH)
    with pytest.raises(Undefined, match=f"table of {LENGTH} positions"):
        model.varied(Variant(), LENGTH + 1)


# -- baselines and extensions ------------------------------------------------------------------------------------------


def masks_of(config: Any, length: int, window: int, sinks: int) -> Any:
    """A window and sinks for every layer, beside its own window: as one mask, or as one for each type of layer."""
    places = torch.arange(length)
    distance = places[:, None] - places
    near = (distance >= 0) & ((distance < window) | (places < sinks))
    own = {"full_attention": near}
    if sliding := getattr(config, "sliding_window", None):
        own["sliding_attention"] = near & (distance < sliding)
    lowest = torch.finfo(torch.float32).min
    masks = {kind: torch.zeros(2, 1, length, length).masked_fill(~seen, lowest) for kind, seen in own.items()}
    if len(set(getattr(config, "layer_types", None) or ())) > 1 and len(masks) > 1:
        return masks
    return masks.get("sliding_attention", near) if config.model_type == "mistral" else masks["full_attention"]


NO_MASKS = ("mamba", "bloom", "mpt", "opt")  # the library takes no masks of these, or counts positions by them


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [kind for kind in MODELS | UNTESTED if kind not in NO_MASKS])
@pytest.mark.parametrize(("window", "sinks"), [(12, 0), (12, 3)])
def test_windows_and_sinks_are_the_librarys_own_masks(shelf: Path, kind: str, window: int, sinks: int) -> None:
    model = subject(on(shelf, kind))
    length = LENGTH if kind in ("gpt2", "opt") else LONG
    ids = IDS[:, : length + 1]
    plain = model.nll(ids, length, 0)
    wide = model.varied(Variant(window=length), length).subject.nll(ids, length, 0)
    assert np.abs(wide - plain).max() < 1e-5
    narrow = model.varied(Variant(window=window, sinks=sinks), length).subject.nll(ids, length, 0)
    assert np.abs(narrow - plain)[:, :window].max() < 1e-5 and np.abs(narrow - plain)[:, window:].mean() > 1e-3
    masks = masks_of(model.config, length, window, sinks)
    assert np.abs(narrow - theirs(on(shelf, kind), ids, masks)).max() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "bloom", "mpt"])
def test_sinks_are_the_first_keys_beside_the_window(shelf: Path, kind: str) -> None:
    """A copy of the text whose tokens between sinks and window differ reads the same in a model of one layer."""
    ids = IDS[:1, : LENGTH + 1]
    model = subject(on(shelf, kind)).varied(Variant(window=8, sinks=3), LENGTH).subject
    other = ids.copy()
    other[0, 3:20] = (other[0, 3:20] + 1) % VOCABULARY  # two layers of a window of 8 see 14 tokens back
    nll, without = model.nll(ids, 4, 0), model.nll(other, 4, 0)
    assert np.abs(nll - without).max() < 1e-5
    other[0, 1] = (other[0, 1] + 1) % VOCABULARY
    assert np.abs(nll - model.nll(other, 4, 0)).max() > 1e-4


EXTENSIONS: dict[str, dict[str, Any]] = {
    "pi": {"rope_type": "linear", "factor": 2.0},
    "dynamic_ntk:factor=2": {"rope_type": "dynamic", "factor": 2.0},
    "yarn:factor=4": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH},
    "llama3": {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    },
    "abf:base=500000": {"rope_theta": 500000.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"), [*(("llama", text) for text in EXTENSIONS), ("gpt_neox", "yarn:factor=4"), ("smollm3", "pi")]
)
def test_an_extension_is_the_librarys_own_model_of_that_configuration(shelf: Path, kind: str, text: str) -> None:
    folder = on(shelf, kind)
    model = subject(folder)
    own = transformers.AutoConfig.from_pretrained(folder).rope_parameters
    wanted = theirs(folder, IDS, rope_parameters={**own, **EXTENSIONS[text]})
    varied = model.varied(Variant(extension=text), LONG)
    assert varied.facts is not None and varied.facts["rope_parameters"]["rope_theta"] > 1
    got = varied.subject.nll(IDS, LONG, 0)
    assert np.abs(got - wanted).max() < 1e-5
    assert np.abs(got - model.nll(IDS, LONG, 0)).mean() > 1e-3  # and the model itself is as it was
    assert np.abs(model.nll(IDS, LONG, 0) - theirs(folder, IDS)).max() < 1e-5
    shared = {p.data_ptr() for p in model.model.parameters()}
    assert {p.data_ptr() for p in varied.subject.reading.parameters()} <= shared  # type: ignore[attr-defined]


FOLLOWING = ("pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope")  # they follow the length
FIXED = ("dynamic_ntk:factor=3", "yarn:factor=8", "longrope:factor=4", "abf")


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", [kind for kind in MODELS if folders.FAMILIES[kind].position == "rope"])
def test_every_method_turns_as_it_is_defined_and_not_at_all_up_to_the_trained_length(shelf: Path, kind: str) -> None:
    model = subject(on(shelf, kind))
    short, long = model.nll(IDS[:, : LENGTH + 1], LENGTH, 0), model.nll(IDS, LONG, 0)
    plain = model.varied(Variant(extension="pi:factor=1"), LONG).subject
    assert isinstance(plain, HuggingFaceModel) and plain.extension is not None
    turned = plain.extension.turns
    assert rope.agrees(model.model, turned, LONG)
    for text in (*FOLLOWING, *FIXED):
        longer = model.varied(Variant(extension=text), LONG).subject
        assert isinstance(longer, HuggingFaceModel) and longer.extension is not None
        assert np.abs(longer.nll(IDS, LONG, 0) - long).mean() > 1e-4, text
        assert rope.agrees(longer.reading, longer.extension.turns, LONG), text
        assert not rope.agrees(longer.reading, turned, LONG), text
        if text in FOLLOWING:
            trained = model.varied(Variant(extension=text), LENGTH).subject.nll(IDS[:, : LENGTH + 1], LENGTH, 0)
            assert np.abs(trained - short).max() < 1e-5, text


def test_the_base_of_layers_with_a_window_is_left_alone(shelf: Path) -> None:
    model = subject(on(shelf, "gemma3_text"))
    made = model.varied(Variant(extension="pi"), LONG).subject.reading.model.rotary_emb  # type: ignore[attr-defined]
    own = model.model.model.rotary_emb
    assert torch.equal(made.sliding_attention_inv_freq, own.sliding_attention_inv_freq)
    assert torch.allclose(made.full_attention_inv_freq, own.full_attention_inv_freq / 2)


def test_frequencies_that_did_not_change_are_noticed(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong override that has no effect: a configuration changed after the model was built."""
    model = subject(on(shelf, "llama"))
    extended = model.varied(Variant(extension="pi"), LONG).subject
    exchanged = rope.exchanged
    monkeypatch.setattr(rope, "exchanged", lambda built, config: exchanged(built, built.config))
    with pytest.raises(RunFailed, match="other frequencies"):
        extended.nll(IDS, LONG, 0)
    monkeypatch.setattr(rope, "rebuilt", lambda built, config: built)
    with pytest.raises(Undefined, match="other frequencies"):
        model.varied(Variant(extension="pi"), LONG)


def test_extensions_that_do_not_exist_are_told_from_those_that_are_mistyped(shelf: Path) -> None:
    llama, bloom = subject(on(shelf, "llama")), subject(on(shelf, "bloom"))
    for model, text, said in (
        (llama, "rerope", "no configuration for 'rerope'"),
        (llama, "yarn:ramp=rotations", "ramp=rotations"),
        (bloom, "yarn", "no rotary encoding"),
    ):
        with pytest.raises(Undefined, match=said):
            model.varied(Variant(extension=text), LONG)
    for model in (llama, bloom):
        for text in ("yran", "yarn:fctor=2", "yarn:factor=0.5" if model is llama else "yarn:factor=x"):
            with pytest.raises(UserError) as caught:
                model.varied(Variant(extension=text), LONG)
            assert not isinstance(caught.value, Undefined)


def test_a_model_that_was_stretched_before_is_not_stretched_again(tmp_path: Path) -> None:
    stretched = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 24}  # fmt: skip
    save("llama", tmp_path / "m", rope_parameters=stretched)
    model = subject(tmp_path / "m")
    assert model.checkpoint.train_length() == 24
    assert np.abs(model.nll(IDS, LONG, 0) - theirs(tmp_path / "m", IDS)).max() < 1e-5
    with pytest.raises(Undefined, match="llama3"):
        model.varied(Variant(extension="pi"), LONG)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_row_does_not_follow_from_what_was_read_before(tmp_path: Path, kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": LENGTH}
    save("llama", tmp_path / "m", rope_parameters=parameters)
    model = subject(tmp_path / "m")
    longer = np.concatenate([IDS, IDS], axis=1)
    for ids in (IDS, IDS[:, : LENGTH + 1], IDS[:, : LENGTH + 9], longer, IDS):
        wanted = subject(tmp_path / "m").nll(ids, 8, 0)
        assert np.array_equal(model.nll(ids, 8, 0), wanted)
    assert np.abs(model.nll(IDS, LONG, 0) - theirs(tmp_path / "m", IDS)).max() < 1e-5


def test_an_extension_has_the_frequencies_of_its_length_whatever_it_read_before(shelf: Path) -> None:
    llama = subject(on(shelf, "llama"))
    model, fresh = (llama.varied(Variant(extension="dynamic_ntk"), LONG).subject for _ in range(2))
    model.nll(IDS[:, :20], 8, 0)
    assert np.array_equal(model.nll(IDS[:, :70], 8, 0), fresh.nll(IDS[:, :70], 8, 0))


# -- what is wrong with a folder ---------------------------------------------------------------------------------------


def dropped(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def added(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.spy": torch.ones(3)}, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def indexed(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def filled(folder: Path, number: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "a dropped tensor": (dropped, "they lack model.layers.1.mlp.up_proj.weight"),
    "an extra tensor": (added, "they have, not used by it, model.layers.0.spy"),
    "fewer layers": (lambda f: changed(f, num_hidden_layers=1), "they have, not used by it, model.layers.1"),
    "another shape": (lambda f: changed(f, intermediate_size=48), "another shape of"),
    "weights as a program": (pickled, "pytorch_model.bin, which may run code"),
    "a program of its own": (lambda f: changed(f, auto_map={"AutoModel": "evil.Evil"}), "auto_map"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "quantised": (lambda f: changed(f, quantization_config={"bits": 4}), "quantised"),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}") and None, "adapter"),
    "an unknown kind": (lambda f: changed(f, model_type="lama"), "did you mean 'llama'"),
    "weights that are not there": (lambda f: indexed(f, "a.safetensors"), "has no a.safetensors"),
    "half a file": (cut, "is not a complete .safetensors file"),
    "weights of NaN": (lambda f: filled(f, float("nan")), "its logits are not finite in fp32"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "nonsense": (lambda f: changed(f, hidden_size="wide"), "transformers refuses its configuration"),
}


def refused(
    model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, spoil: Callable[[Path], None], said: str
) -> None:
    """A spoilt copy of a model ends in one line."""
    shutil.copytree(model, tmp_path / "model")
    spoil(tmp_path / "model")
    write_text(tmp_path / "text.txt", 1000)
    monkeypatch.chdir(tmp_path)
    command = ["data.path=text.txt", "runtime.cache=cache", "device=cpu"]
    assert posbench("evaluate", "model", *command) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ") and said in line and len(line) < 600


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_folder_is_said_in_one_line(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    refused(on(shelf, "llama"), tmp_path, monkeypatch, capsys, *WRONG[what])


def test_what_sees_later_tokens_is_refused(shelf: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    both = (lambda folder: changed(folder, use_bidirectional_attention=True), "is no causal model: later tokens")
    refused(on(shelf, "gemma3_text"), tmp_path, monkeypatch, capsys, *both)


def test_the_attention_that_a_folder_names_is_not_fetched(shelf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(on(shelf, "llama"), folder)
    changed(folder, _attn_implementation="someone/evil", attn_implementation="someone/evil", torch_dtype="float16")
    assert np.abs(subject(folder).nll(IDS, LONG, 0) - subject(on(shelf, "llama")).nll(IDS, LONG, 0)).max() == 0


def test_weights_in_several_files_and_the_hubs_cache_of_links_are_read(shelf: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    model = transformers.AutoModelForCausalLM.from_pretrained(on(shelf, "llama"))
    model.save_pretrained(blobs, max_shard_size="30kB")
    snapshot.mkdir(parents=True)
    (blobs / "tokenizer.json").write_bytes((on(shelf, "llama") / "tokenizer.json").read_bytes())
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    assert len(folders.read(snapshot).weights) > 1
    assert np.abs(subject(snapshot).nll(IDS, LONG, 0) - subject(on(shelf, "llama")).nll(IDS, LONG, 0)).max() == 0


def test_train_length_and_what_stands_before_documents_come_from_the_folder(tmp_path: Path) -> None:
    for kind in MODELS:
        checkpoint = folders.Checkpoint(tmp_path, configuration(kind).to_dict(), ())
        assert checkpoint.train_length() == LENGTH, kind
    save("olmo", tmp_path / "a")
    save("olmo", tmp_path / "b", begins=5)
    for name, begins in (("a", (0, False)), ("b", (5, True))):
        checkpoint = folders.read(tmp_path / name)
        config = building.configuration(checkpoint, LONG)
        assert dataclasses.astuple(evaluate.reading_of(checkpoint, config, None)) == begins
        assert [evaluate.reading_of(checkpoint, config, bos).first for bos in ("document", "window")] == [False, True]
    changed(tmp_path / "a", max_position_embeddings=None)
    with pytest.raises(UserError, match="expected train_length=N"):
        evaluate.asked_of(folders.read(tmp_path / "a"), [])
    short = folders.read(tmp_path / "b")
    with pytest.raises(UserError, match="processes is 2: a HuggingFace model is evaluated in one process"):
        evaluate.asked_of(short, ["train_length=16", "processes=2"])
    for asked, targets in (([], 16), (["targets=8"], 8), (["train_length=48"], 32)):  # the usual 32, or all there are
        asked = asked if "train_length=48" in asked else ["train_length=16", *asked]
        assert evaluate.asked_of(short, asked).settings.targets == targets
    with pytest.raises(UserError, match="targets is 17: expected at most"):
        evaluate.asked_of(short, ["train_length=16", "targets=17"])


def test_an_evaluation_is_in_the_precision_of_the_weights_where_that_is_fast_and_blooms_in_fp32(
    tmp_path: Path, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its biases would be rounded, too, and far positions would be one."""
    for kind, own, fast, asked, found in (
        ("llama", "bf16", True, "auto", "bf16"),
        ("llama", "bf16", False, "auto", "fp32"),
        ("llama", "fp16", True, "auto", "fp32"),  # on a CPU
        ("bloom", "bf16", True, "auto", "fp32"),
        ("bloom", "bf16", True, "bf16", "bf16"),
    ):
        monkeypatch.setattr(machine, "bf16_is_fast", lambda device, fast=fast: fast)
        checkpoint = folders.Checkpoint(tmp_path, configuration(kind).to_dict(), ())
        vars(checkpoint)["precision"] = own
        settings = dataclasses.replace(tiny_config.evaluation, precision=asked)
        assert evaluate.precision_of(checkpoint, settings, CPU) == found, (kind, own, fast, asked)


# -- from the command line ---------------------------------------------------------------------------------------------

EVALUATE = ["data.path=text.txt", "runtime.cache=cache", "device=cpu", "blocks=16"]


@pytest.mark.full
def test_a_model_is_evaluated_into_a_folder_that_reports_and_notebooks_read(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    save("llama", tmp_path / "model", begins=7)
    command = ["evaluate", "model", *EVALUATE, "length=48,96", "protocol=fixed_target,nonoverlap"]
    assert posbench(*command, "extension=yarn,rerope", "task=repeat,induction,passkey") == 0
    told = capsys.readouterr()
    assert "model, rope: trained at 48 tokens" in told.out and "right answers by context" in told.out
    assert "no token of its own for each answer of passkey" in told.err  # of a tokenizer that knows no words
    (folder,) = (tmp_path / "outputs" / "models").iterdir()
    lines = read_jsonl(folder / "evaluation.jsonl")
    rows = {(r["protocol"], r["length"], r["extension"], r["task"]): r for r in lines if r["window"] is None}
    assert rows["fixed_target", 96, "rerope", None]["status"] == "undefined"
    assert rows["fixed_target", 96, "yarn", None]["extension_options"]["rope_parameters"]["rope_type"] == "yarn"
    assert {None, "repeat", "repeat_control", "induction", "passkey"} == {task for _, _, _, task in rows}
    asked = rows["task", 96, "yarn", "induction"]
    right = asked["accuracy"] * asked["n_blocks"]
    assert asked["chance"] == 1 / 8 and right == pytest.approx(round(right))
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "done" and record["tokens"] is None and record["seed"] is None
    assert record["data"]["separator"] == {"id": 7, "text": "w7", "first_in_every_window": True}

    # started again it computes nothing, and with one more length that length only
    before = (folder / "evaluation.jsonl").read_bytes()
    monkeypatch.setattr(HuggingFaceModel, "nll", None)
    monkeypatch.setattr(HuggingFaceModel, "ranked", None)
    assert posbench(*command, "extension=yarn,rerope", "task=repeat,induction,passkey") == 0
    assert (folder / "evaluation.jsonl").read_bytes() == before
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    more = [*EVALUATE, "length=48,144", "protocol=fixed_target", "windowed=false"]
    assert library_of_ours.evaluate("model", more).folder == folder.relative_to(tmp_path)  # from Python
    assert [r["length"] for r in read_jsonl(folder / "evaluation.jsonl")[len(lines) :]] == [144]

    run = library_of_ours.load(folder)
    assert run.headline["nll_1x"] == pytest.approx(rows["fixed_target", 48, None, None]["nll"])
    assert len(run.curve()) == len(lines) + 1 and run.metrics().empty and run.plot()
    capsys.readouterr()
    assert posbench("report", "outputs/models") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "training length 48" in said, said
    assert "Probes: share of right answers" in Path("outputs/models/report/index.html").read_text(encoding="utf-8")
    assert posbench("evaluate", str(folder)) == 2
    assert "'posbench evaluate model' adds to them" in capsys.readouterr().err


def test_rows_and_the_record_of_an_untested_kind_say_so(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    asked = [*EVALUATE, "length=48,96", "train_length=48", "extension=yarn", "protocol=fixed_target"]
    assert posbench("evaluate", str(on(shelf, "mamba")), *asked) == 0
    assert "mamba: untested with transformers" in capsys.readouterr().err
    (folder,) = (tmp_path / "outputs" / "models").iterdir()
    assert json.loads((folder / "run.json").read_text())["support"]["level"] == "untested"
    rows = read_jsonl(folder / "evaluation.jsonl")
    status = {(row["length"], row["window"], row["extension"]): (row["status"], row["reason"]) for row in rows}
    assert status[48, None, None][0] == "ok"
    assert status[96, None, None][0] == "undefined" and "no tested kind" in status[96, None, None][1]
    assert status[96, None, "yarn"][0] == "undefined"
    with pytest.raises(Undefined, match="does not narrow all of mamba"):
        subject(on(shelf, "mamba")).varied(Variant(window=9), LENGTH)
    config = transformers.BertConfig(vocab_size=131, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=64, max_position_embeddings=96, eos_token_id=1)  # fmt: skip
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")  # reads to the left and to the right
    shutil.copy(on(shelf, "mamba") / "tokenizer.json", tmp_path / "bert")
    assert posbench("evaluate", "bert", *asked) == 2
    assert "is no causal model" in capsys.readouterr().err


@pytest.mark.parametrize("begins", [None, 5])
def test_rows_are_what_the_librarys_logits_give_on_the_same_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: int | None
) -> None:
    """From the text alone, by the protocol's definition: no code of posbench finds the windows or scores them.

    A token that the tokenizer puts before every text replaces the first one of every window.
    """
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    folder = tmp_path / "model"
    save("gpt_neox", folder, begins)
    assert (
        posbench("evaluate", str(folder), *EVALUATE, "data.test_pieces=null", "length=48", "protocol=nonoverlap") == 0
    )
    (results,) = (tmp_path / "outputs" / "models").iterdir()
    (row,) = read_jsonl(results / "evaluation.jsonl")
    assert row["n_tokens"] == row["n_blocks"] * LENGTH and row["dtype"] == "fp32"
    blocks = read_jsonl(results / "evaluation_blocks.jsonl")
    assert sum(block["nll_sum"] for block in blocks) / row["n_tokens"] == pytest.approx(row["nll"])
    words = (tmp_path / "text.txt").read_text().split()
    ids = np.array([int(word[1:]) for word in words[-len(words) // 20 :]])
    windows = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1).copy()
    windows[:, 0] = windows[:, 0] if begins is None else begins
    every = theirs(folder, windows).sum(axis=1)
    for block in blocks[2:]:  # the first may begin before these words
        assert np.abs(every - block["nll_sum"]).min() < 1e-3


def test_a_probes_options_and_the_text_are_checked_before_any_work_leaves_a_folder(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    assert posbench("evaluate", str(on(shelf, "llama")), *EVALUATE, "tasks=shuffle:keep=8") == 2
    assert "keep is 8 for 'shuffle': expected at least evaluation.targets, 32" in capsys.readouterr().err
    assert not Path("cache").exists()
    assert posbench("evaluate", str(on(shelf, "llama")), "data.path=txet.txt", *EVALUATE[1:]) == 2
    assert "no file matches 'txet.txt'" in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_name_on_the_hub_without_network_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert posbench("evaluate", "EleutherAI/pythia-14m", "length=4096") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "model 'EleutherAI/pythia-14m' cannot be reached" in line and "not in the local cache" in line
    Path("outputs").mkdir()
    assert posbench("evaluate", "outputs/demo") == 2
    assert "does not exist: expected run folders" in capsys.readouterr().err


def test_without_the_library_one_line_says_how_to_get_it(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = on(shelf, "llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert posbench("evaluate", str(folder)) == 2
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = project["optional-dependencies"]["hf"]
    assert f"pip install '{needed}'" in capsys.readouterr().err
