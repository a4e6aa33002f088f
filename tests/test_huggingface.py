"""Models of HuggingFace: our numbers are the library's own, and what is wrong with a
folder is said in one line.
"""

import dataclasses
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
from safetensors.torch import load_file, save_file
from support import posbench

from posbench import machine
from posbench.errors import Undefined, UserError
from posbench.evaluation.models import Variant, nll_of, predicted
from posbench.huggingface import evaluate, load
from posbench.huggingface.subject import HuggingFaceModel
from posbench.rope import extension as rope
from posbench.run.rows import read_rows

transformers = pytest.importorskip("transformers")
LONG = 2 * LENGTH
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LONG + 1))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Return a folder of models, which are made when tests need them."""
    return tmp_path_factory.mktemp("shelf")


def on(shelf: Path, kind: str) -> Path:
    if not (shelf / kind).exists():
        torch.manual_seed(0)
        save(kind, shelf / kind)
    return shelf / kind


def subject(folder: Path) -> HuggingFaceModel:
    source = load.find(str(folder))
    return HuggingFaceModel(
        load.load(folder, source.config, "fp32"), source.kind, LENGTH, "fp32"
    )


def theirs(
    folder: Path, ids: np.ndarray, masks: Any = None, **changes: Any
) -> np.ndarray:
    """Return losses by the library's own loading and logits, with masks and with
    changes of the configuration.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    config.get_text_config().update(changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32
    ).eval()
    x = torch.from_numpy(ids)
    with torch.no_grad():
        logits = model(x[:, :-1], use_cache=False, attention_mask=masks).logits
    return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none").numpy()


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", MODELS | UNTESTED)
def test_nll_is_that_of_the_librarys_own_logits(shelf, kind):
    assert MODELS.keys() == load.TESTED.keys()
    folder = on(shelf, kind)
    ids = IDS[:, : LENGTH + 1] if kind in ("gpt2", "opt") else IDS
    wanted = theirs(folder, ids, **({"max_seq_len": LONG} if kind == "mpt" else {}))
    ours = subject(folder)
    for scored in (ids.shape[1] - 1, 7):
        np.testing.assert_allclose(
            nll_of(ours, ids, scored, 0), wanted[:, -scored:], atol=1e-6, rtol=1e-6
        )
    assert wanted.std() > 0.3  # the weights do something
    ours.refuse_not_causal()
    # of two candidates the first is the text's own
    other = ids[:, -1:] + np.array([[0, -1]]) * (ids[:, -1:] > 0)
    last = np.arange(ids.shape[1] - 1) == np.full((2, 1), ids.shape[1] - 2)
    np.testing.assert_allclose(
        predicted(ours, ids, last, 0, other).nll[:, 0],
        wanted[:, -1],
        atol=1e-6,
        rtol=1e-6,
    )


def masks_of(config: Any, length: int, window: int, sinks: int) -> Any:
    """Return masks with a window and sinks, beside a layer's own window: one mask, or
    one for each type of layer.
    """
    places = torch.arange(length)
    distance = places[:, None] - places
    near = (distance >= 0) & ((distance < window) | (places < sinks))
    of_kind = {"full_attention": near}
    if sliding := getattr(config, "sliding_window", None):
        of_kind["sliding_attention"] = near & (distance < sliding)
    lowest = torch.finfo(torch.float32).min
    masks = {
        kind: torch.zeros(2, 1, length, length).masked_fill(~seen, lowest)
        for kind, seen in of_kind.items()
    }
    if len(set(getattr(config, "layer_types", None) or ())) > 1 and len(masks) > 1:
        return masks
    return (
        masks.get("sliding_attention")
        if config.model_type == "mistral"
        else masks["full_attention"]
    )


# the library takes no masks of these, or counts positions by them
NO_MASKS = ("bloom", "mpt", "opt")


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "kind", [kind for kind in MODELS | UNTESTED if kind != "mamba"]
)
def test_windows_and_sinks_are_the_librarys_own_masks(shelf, kind):
    model = subject(on(shelf, kind))
    window = 12
    length = LENGTH if kind in ("gpt2", "opt") else LONG
    ids = IDS[:, : length + 1]
    plain = nll_of(model, ids, length, 0)
    for sinks in (0, 3):
        narrow = nll_of(
            model.varied(Variant(window=window, sinks=sinks), length).subject,
            ids,
            length,
            0,
        )
        assert np.abs(narrow - plain)[:, :window].max() < 1e-5
        assert np.abs(narrow - plain)[:, window:].mean() > 1e-3
        if kind not in NO_MASKS:
            masks = masks_of(model.config, length, window, sinks)
            assert np.abs(narrow - theirs(on(shelf, kind), ids, masks)).max() < 1e-5
    narrowed = model.varied(Variant(window=8, sinks=3), LENGTH).subject
    other = IDS[:1, : LENGTH + 1].copy()
    nll = nll_of(narrowed, other, 4, 0)
    # 2 layers see 14 back
    for change, moves in ((slice(3, 20), False), (1, True)) if kind in NO_MASKS else ():
        other[0, change] = (other[0, change] + 1) % VOCABULARY
        assert bool(np.abs(nll - nll_of(narrowed, other, 4, 0)).max() > 1e-4) is moves


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": LENGTH,
}
EXTENSIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "pi", {"rope_type": "linear", "factor": 2.0}),
    ("llama", "dynamic_ntk:factor=2", {"rope_type": "dynamic", "factor": 2.0}),
    ("llama", "yarn:factor=4", YARN),
    ("llama", "llama3", LLAMA3),
    ("llama", "abf:base=500000", {"rope_theta": 500000.0}),
    (
        "gemma3_text",
        "pi",
        {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "text", "parameters"), EXTENSIONS)
def test_an_extension_is_the_librarys_own_model_of_that_configuration(
    shelf, kind, text, parameters
):
    folder = on(shelf, kind)
    model = subject(folder)
    original = transformers.AutoConfig.from_pretrained(folder).rope_parameters
    nll = nll_of(model.varied(Variant(extension=text), LONG).subject, IDS, LONG, 0)
    assert (
        np.abs(
            nll - theirs(folder, IDS, rope_parameters={**original, **parameters})
        ).max()
        < 1e-5
    )
    # and the model itself is as it was
    assert np.abs(nll - nll_of(model, IDS, LONG, 0)).mean() > 1e-3
    assert np.abs(nll_of(model, IDS, LONG, 0) - theirs(folder, IDS)).max() < 1e-5


# they follow the length
FOLLOWING = ("pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope")
FIXED = (
    "dynamic_ntk:factor=3",
    "yarn:factor=8",
    "yarn:ramp=rotations:beta=2",
    "longrope:factor=4",
    "abf",
)


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "kind",
    [*(k for k in MODELS if load.TESTED[k] == "rope"), "granite", "gemma3", "cohere"],
)
def test_every_method_changes_the_model_beyond_the_trained_length_and_not_up_to_it(
    shelf, kind
):
    """Each extension compares the frequencies of the library's ROPE_INIT_FUNCTIONS with
    those of encodings.extend.
    """
    model = subject(on(shelf, kind))
    short = nll_of(model, IDS[:, : LENGTH + 1], LENGTH, 0)
    long = nll_of(model, IDS, LONG, 0)
    for text in (*FOLLOWING, *FIXED):
        varied = model.varied(Variant(extension=text), LONG)
        parameters = varied.facts["rope_parameters"]
        if "gemma3" in kind:
            parameters = model.config.rope_parameters | {"full_attention": parameters}
        nll = nll_of(varied.subject, IDS, LONG, 0)
        assert (
            np.abs(nll - theirs(on(shelf, kind), IDS, rope_parameters=parameters)).max()
            < 1e-5
        ), text
        assert np.abs(nll - long).mean() > 1e-4, text
        if text in FOLLOWING:
            trained = nll_of(
                model.varied(Variant(extension=text), LENGTH).subject,
                IDS[:, : LENGTH + 1],
                LENGTH,
                0,
            )
            assert np.abs(trained - short).max() < 1e-5, text


def test_frequencies_other_than_requested_are_noticed(shelf):
    """Models with no module, with one that ignores its configuration, and Phi-3, whose
    module follows other rules.
    """
    model = subject(on(shelf, "llama"))
    made = rope.extension(model.config, "pi", LONG, LENGTH, {})
    assert not rope.turns_as(model.model, made.rotations, LONG)
    assert not rope.turns_as(torch.nn.Linear(2, 2), {}, LONG)
    (rotary,) = rope.extension(
        model.config, "abf", LONG, LENGTH, {"base": 1e4}
    ).rotations.values()
    # of the slowest pair
    slower = rotary.rescaled(rotary.inv_freq() * torch.tensor([1, 1, 1, 0.995]), 1.0)
    assert [
        rope.turns_as(model.model, {None: each}, LONG) for each in (rotary, slower)
    ] == [True, False]
    with pytest.raises(Undefined, match="other frequencies"):
        rope.extend_model(
            model.model, dataclasses.replace(made, config=model.config), LONG
        )
    with pytest.raises(Undefined, match="other frequencies"):
        subject(on(shelf, "phi3")).varied(Variant(extension="yarn:factor=4"), LONG)


def test_extensions_that_do_not_exist_are_told_from_those_that_are_mistyped(
    shelf, tmp_path
):
    llama = subject(on(shelf, "llama"))
    bloom = subject(on(shelf, "bloom"))
    save(
        "llama",
        tmp_path / "m",
        rope_parameters={
            "rope_theta": 1e4,
            **LLAMA3,
            "original_max_position_embeddings": 24,
        },
    )
    before = subject(tmp_path / "m")
    assert load.find(str(tmp_path / "m")).train_length == 24
    for model, text, message in (
        (llama, "rerope", "no configuration for 'rerope'"),
        (llama, "clipped_rope:pairs=2", "comes to a halt"),
        (bloom, "yarn", "no rotary encoding"),
        (before, "pi", "llama3"),
        *(
            (subject(on(shelf, kind)), "pi", f"table of {LENGTH} positions")
            for kind in ("gpt2", "opt")
        ),
        *(
            (model, text, None)
            for model in (llama, bloom, before)
            for text in ("yran", "yarn:factor=0.5")
        ),
    ):
        with pytest.raises(UserError, match=message) as caught:
            model.varied(Variant(extension=text), LONG)
        assert isinstance(caught.value, Undefined) is bool(message)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_row_does_not_follow_from_what_was_read_before(shelf, tmp_path, kind):
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        parameters |= {
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": LENGTH,
        }
    save("llama", tmp_path / "m", rope_parameters=parameters)
    model = subject(tmp_path / "m")
    for ids in (
        IDS,
        IDS[:, : LENGTH + 1],
        IDS[:, : LENGTH + 9],
        np.concatenate([IDS, IDS], axis=1),
        IDS,
    ):
        assert np.array_equal(
            nll_of(model, ids, 8, 0), nll_of(subject(tmp_path / "m"), ids, 8, 0)
        )
    assert (
        np.abs(nll_of(model, IDS, LONG, 0) - theirs(tmp_path / "m", IDS)).max() < 1e-5
    )
    # it has the frequencies of its length
    extension = Variant(extension=kind.replace("dynamic", "dynamic_ntk"))
    first, second = (
        subject(on(shelf, "llama")).varied(extension, LONG).subject for _ in range(2)
    )
    nll_of(first, IDS[:, :20], 8, 0)
    assert np.array_equal(
        nll_of(first, IDS[:, :70], 8, 0), nll_of(second, IDS[:, :70], 8, 0)
    )


def spoilt(
    change: Callable[[dict[str, torch.Tensor]], object],
) -> Callable[[Path], None]:
    """Return a function that changes a folder's tensors."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


WRONG: list[tuple[Callable[[Path], object], str]] = [
    (
        spoilt(lambda t: t["model.norm.weight"].fill_(float("nan"))),
        "logits are not finite in fp32",
    ),
    (lambda f: changed(f, num_hidden_layers=1), "unexpected_keys model.layers.1"),
    (
        spoilt(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "missing_keys model.layers.1.",
    ),
    (lambda f: changed(f, intermediate_size=48), "transformers cannot load it"),
    (pickled, "pickled weights may run code"),
    (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "two sets of weights, model.safetensors and model.safetensors.index.json",
    ),
    (lambda f: changed(f, quantization_config={"bits": 4}), "quantised"),
    (lambda f: changed(f, auto_map={"AutoModel": "evil.Evil"}), "auto_map"),
    (
        lambda f: (t := f / "tokenizer.json").write_text(
            t.read_text().replace(" 130", " 999")
        ),
        "it gives id 999, its",
    ),
    (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter"),
    # of gemma3_text
    (
        lambda f: changed(f, use_bidirectional_attention=True),
        "is no causal model: later tokens",
    ),
]
EVALUATE = ["data.path=text.txt", "runtime.cache=cache", "device=cpu", "blocks=16"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_written(
    shelf, tmp_path, monkeypatch, capsys, spoil, message
):
    shutil.copytree(
        on(shelf, "gemma3_text" if "causal" in message else "llama"), tmp_path / "model"
    )
    spoil(tmp_path / "model")
    write_text(tmp_path / "text.txt", 1000)
    monkeypatch.chdir(tmp_path)
    assert posbench("evaluate", "model", *EVALUATE) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert len(line) < 600
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_only_data_of_a_folder_counts_wherever_its_files_lie(shelf, tmp_path):
    """Weights in several files, in the hub's cache of links; an attention that the
    folder names is not fetched.
    """
    snapshot = tmp_path / "snapshots" / "abc"
    blobs = tmp_path / "blobs"
    transformers.AutoModelForCausalLM.from_pretrained(
        on(shelf, "llama")
    ).save_pretrained(blobs, max_shard_size="30kB")
    changed(
        blobs, _attn_implementation="someone/evil", attn_implementation="someone/evil"
    )
    shutil.copy(on(shelf, "llama") / "tokenizer.json", blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    assert np.array_equal(
        nll_of(subject(snapshot), IDS, LONG, 0),
        nll_of(subject(on(shelf, "llama")), IDS, LONG, 0),
    )
    before = load.find(str(snapshot)).sha256()
    last = max(blobs.glob("model-*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1] + b"\7")
    assert load.find(str(snapshot)).sha256() != before


@pytest.mark.slow
def test_an_untested_kind_is_called_so(shelf, tmp_path, monkeypatch):
    write_text(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    asked = [
        *EVALUATE,
        "length=48,96",
        "train_length=48",
        "extension=yarn",
        "protocol=fixed_target",
    ]
    assert posbench("evaluate", str(on(shelf, "mamba")), *asked) == 0
    (folder,) = (tmp_path / "outputs" / "models").glob("[!.]*")
    assert (
        json.loads((folder / "run.json").read_text())["support"]["level"] == "untested"
    )
    rows = {
        (r["length"], r["extension"]): r["status"]
        for r in read_rows(folder)
        if not r.get("window", 1)
    }
    assert [place for place, status in rows.items() if status == "ok"] == [(48, None)]
    assert len(rows) == 4
    with pytest.raises(Undefined, match="do not restrict all layers of mamba"):
        subject(on(shelf, "mamba")).varied(Variant(window=9), LENGTH)


def test_train_length_and_what_stands_before_documents_come_from_the_folder(tmp_path):
    for kind in MODELS:
        made = configuration(kind)
        assert (
            load.Source(tmp_path, "", None, made.to_dict(), made).train_length == LENGTH
        ), kind
    save("olmo", tmp_path / "a")
    save("olmo", tmp_path / "b", begins=5)
    for name, begins in (("a", (0, False)), ("b", (5, True))):
        source = load.find(str(tmp_path / name))
        assert dataclasses.astuple(evaluate.reading_of(source, None)) == begins
        assert [
            evaluate.reading_of(source, bos).first for bos in ("document", "window")
        ] == [False, True]


def test_weights_in_bf16_are_evaluated_so_where_that_is_fast_and_blooms_never(
    tmp_path, tiny_config, monkeypatch
):
    """Its biases would be rounded, too, and far positions would be one."""
    monkeypatch.setattr(machine, "bf16_is_fast", lambda device: True)
    for kind, expected in (("llama", "bf16"), ("bloom", "fp32")):
        source = load.Source(
            tmp_path, "", None, {}, configuration(kind, dtype=torch.bfloat16)
        )
        assert (
            evaluate.precision_of(source, tiny_config.evaluation, torch.device("cpu"))
            == expected
        )


@pytest.mark.parametrize("begins", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_rows_are_what_the_librarys_logits_give_on_the_same_windows(
    tmp_path, monkeypatch, begins
):
    """From the text alone, by the protocol's definition: no code of posbench finds the
    windows or scores them.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for name in ("train", "validation", "test"):
        write_text(tmp_path / "text" / f"{name}.txt", 900)
    folder = tmp_path / "model"
    save("gpt_neox", folder, begins)
    asked = ["data.path=text", *EVALUATE[1:], "length=48", "protocol=nonoverlap"]
    assert posbench("evaluate", str(folder), *asked) == 0
    (results,) = (tmp_path / "outputs" / "models").glob("[!.]*")
    (row,) = [row for row in read_rows(results) if "protocol" in row]
    units = row["units"]
    first = json.loads((results / "run.json").read_text())["data"]["separator"]["id"]
    assert row["n_tokens"] == sum(units["tokens"])
    assert row["dtype"] == "fp32"
    assert sum(units["nll"]) / row["n_tokens"] == pytest.approx(row["nll"], abs=1e-5)
    ids = np.array(
        [
            first,
            *(
                int(word[1:])
                for word in (tmp_path / "text" / "test.txt").read_text().split()
            ),
        ]
    )
    windows = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1).copy()
    windows[:, 0] = windows[:, 0] if begins is None else begins
    every = theirs(folder, windows).astype(float).sum(axis=1)
    for nll, tokens in zip(units["nll"], units["tokens"], strict=True):
        places = [
            range(at, len(every), LENGTH)[: tokens // LENGTH]
            for at in range(len(every) - tokens + LENGTH)
        ]
        assert min(abs(every[list(place)].sum() - nll) for place in places) < 1e-3
