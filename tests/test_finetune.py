"""Training a HuggingFace model on: what it begins with, what is saved, and what is
refused.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import LENGTH, MODELS, VOCABULARY, changed, save, write_text
from safetensors.torch import load_file
from support import posbench, snapshot
from torch.nn.functional import cross_entropy

from posbench.huggingface import finetune, load
from posbench.huggingface.finetune import Learning
from posbench.run.rows import evaluation_rows, training_rows
from posbench.training import train

transformers = pytest.importorskip("transformers")
LONG = 4 * LENGTH
TEXT = ["data.path=text.txt", "runtime.cache=cache"]
FEW = ["evaluation.blocks=8", "protocol=fixed_target", "windowed=false"]
# Six updates of one sequence.
ON = [
    *TEXT,
    *FEW,
    "tracking=none",
    "device=cpu",
    f"training.train_length={LONG}",
    f"training.tokens={6 * LONG}",
    "training.precision=fp32",
    "training.learning_rate=1e-3",
    "runtime.checkpoint_every_steps=2",
    f"length={LENGTH},{LONG}",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text; `model` adds models when tests need them."""
    folder = tmp_path_factory.mktemp("on")
    write_text(folder / "text.txt", 6000)
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for a test's own runs; the current folder has the text and the
    models.
    """
    monkeypatch.chdir(place)
    return tmp_path


def model(kind: str, precision: torch.dtype = torch.float32) -> str:
    """Return the name of a model in the current folder, which is made if it is not
    there.
    """
    name = f"{kind}-{str(precision)[6:]}"
    if not Path(name).exists():
        torch.manual_seed(0)
        save(kind, Path(name), begins=7).to(precision).save_pretrained(name)
    return name


def trained(out: Path, start: str, *words: str) -> Path:
    """Train, and return the run's folder of results."""
    assert (
        posbench("train", f"start={start}", *ON, f"runtime.outputs={out}", *words) == 0
    )
    (tuned_folder,) = (out / "extend").glob("[!.]*")
    return tuned_folder


def nlls(folder: Path, step: int = 0) -> dict[int, float | None]:
    rows = evaluation_rows(folder)
    return {
        row.length: row.nll
        for row in rows
        if row.checkpoint_step == step and row.curve_name[:5] == "fixed"
    }


def evaluated(out: Path, name: str, *words: str) -> dict[int, float | None]:
    asked = [
        *TEXT,
        *FEW,
        "device=cpu",
        f"length={LENGTH},{LONG}",
        f"runtime.outputs={out}",
    ]
    assert posbench("evaluate", name, *asked, *words) == 0
    (tuned_folder,) = (out / "models").glob("[!.]*")
    return nlls(tuned_folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]
)
def test_it_begins_as_the_folder_is_evaluated_and_ends_as_the_saved_one_is(
    here: Path, precision: torch.dtype
) -> None:
    name = model("llama", precision)
    Path(name, "chat_template.jinja").write_text("kept")
    before = snapshot(Path(name))
    folder = trained(here, name, "extension=yarn", "runtime.log_every_steps=1")
    assert (
        snapshot(Path(name)) == before
        and (folder / "model/chat_template.jinja").is_file()
    )
    evaluated(here / "a", name, "extension=yarn:factor=4")
    # at the old length the windows of a longer model are others
    (theirs,) = (here / "a" / "models").glob("[!.]*")
    (began,) = [
        row.nll
        for row in evaluation_rows(theirs)
        if row.extension and row.length == LONG
    ]
    assert nlls(folder)[LONG] == began and nlls(folder).keys() == {LENGTH, LONG}
    assert evaluated(
        here / "b", str(folder / "model"), f"train_length={LONG}", "longest=1"
    ) == nlls(folder, 6)
    losses = [row["train/loss"] for row in training_rows(folder) if "train/loss" in row]
    assert len(losses) == 6 and nlls(folder, 6)[LONG] < nlls(folder)[LONG]  # type: ignore[operator]
    assert {row.tokens for row in evaluation_rows(folder)} == {0, 6 * LONG}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["extension=longrope"], ["extension=yarn", "lora=4"]],
    ids=["all", "adapters"],
)
def test_after_a_failure_it_gets_the_same_bits(
    here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    plain, name = train.begin_update, model("smollm3")

    def failing(trainer: Any, batch: Any, at: int, rate: float) -> Any:
        if at == 5:
            raise RuntimeError("the lights went out")
        return plain(trainer, batch, at, rate)

    whole = trained(here / "whole", name, *words)
    with monkeypatch.context() as patch:
        patch.setattr(train, "begin_update", failing)
        assert (
            posbench(
                "train", f"start={name}", *ON, f"runtime.outputs={here / 'cut'}", *words
            )
            != 0
        )
    cut = trained(here / "cut", name, *words)
    assert (cut / "model/model.safetensors").read_bytes() == (
        whole / "model/model.safetensors"
    ).read_bytes()
    assert [nlls(cut, step) for step in (0, 6)] == [
        nlls(whole, step) for step in (0, 6)
    ]
    assert ('"use_cache": false' in (cut / "model/config.json").read_text()) is (
        "lora=4" not in words
    )


@pytest.mark.sample(17)
@pytest.mark.parametrize("lora", [None, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_each_kind_is_saved_as_it_was_evaluated_under_its_own_names(
    here: Path, kind: str, lora: int | None
) -> None:
    """With adapters, all other weights stay as they were, and matrices change by a
    matrix of the adapters' rank.
    """
    if lora:
        pytest.importorskip("peft")
    name, position = model(kind), load.TESTED[kind]
    length = LENGTH if position == "learned" else LONG
    words = [
        "training.learning_rate=1e-2",
        "training.tokens=1920",
        f"training.train_length={length}",
    ]
    words += ["extension=yarn"] if position == "rope" else []
    words += [f"lora={lora}"] if lora else []
    folder = trained(here, name, *words, f"length={LENGTH},{length}")
    began, ended = (nlls(folder, step) for step in (0, 1920 // length))
    assert ended[length] < began[length]  # type: ignore[operator]
    asked = [f"train_length={length}", "longest=1", f"length={LENGTH},{length}"]
    assert evaluated(here / "b", str(folder / "model"), *asked) == ended
    assert [*(here / "b" / "models").glob(f"{folder.name}-*")], (
        "a model that a run trained has the run's name"
    )
    old, new = (
        load_file(path / "model.safetensors") for path in (Path(name), folder / "model")
    )
    changes = {
        key: (new[key] - old[key]).double()
        for key in old
        if not torch.equal(new[key], old[key])
    }
    assert changes and old.keys() == new.keys()
    for key, change in changes.items() if lora else ():
        largest = torch.linalg.svdvals(change)
        assert (
            "embed" not in key
            and "lm_head" not in key
            and largest[3:].max() < 1e-3 * largest[0]
        ), key


def test_settings_that_are_not_typed_follow_from_those_that_are(here: Path) -> None:
    """Defaults are those of docs/longer.md: 400 updates, a twentieth for the warm-up,
    up to four times the length.
    """
    words = (
        f"start={model('llama')} extension=yarn training.train_length={LONG}"
        f" training.tokens={400 * 6 * LONG}"
    )
    config = finetune._config(load.find(model("llama")), [*TEXT, *words.split()], None)[
        0
    ]
    training = config.training
    assert (training.learning_rate, training.warmup_tokens, config.study) == (
        2e-5,
        400 * 6 * LONG // 20,
        "extend",
    )
    assert (training.batch_size, training.accumulation, training.steps) == (1, 6, 400)
    assert config.encoding.options["parameters"]["factor"] == LONG / LENGTH
    assert [ratio * LONG for ratio in config.evaluation.ratios] == [
        LENGTH,
        LONG,
        2 * LONG,
        4 * LONG,
    ]
    longrope = finetune._config(
        load.find(model("llama")),
        [*TEXT, *words.replace("yarn", "longrope").split()],
        None,
    )[0]
    # up to the trained length a model turns as it did
    parameters = longrope.encoding.options["parameters"]
    assert parameters["short_factor"] == [1.0] * 4 != parameters["long_factor"]


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_those_of_transformers(here: Path, kind: str) -> None:
    """The loss is that of eval mode, without dropout; it is the same if blocks run
    again in the backward pass.
    """
    source, ids = load.find(model(kind)), torch.randint(VOCABULARY, (2, LENGTH + 1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model(kind), dtype=torch.float32
    ).eval()
    logits = theirs(ids[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for recomputed in (False, True):
        learning = Learning(
            load.load(source.folder, source.config, "fp32"), None, recomputed
        ).train()
        ours = learning(ids[:, :-1], ids[:, 1:], n_scored=2 * LENGTH)
        ours.backward()
        torch.testing.assert_close(ours, loss, atol=1e-5, rtol=1e-5)
        grads = dict(theirs.named_parameters())
        for name, parameter in learning.model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, grads[name].grad, atol=1e-5, rtol=1e-3
            )
    begun = ids.clone()
    begun[:, 0] = learning.first_token = 5
    wanted = cross_entropy(
        theirs(begun[:, :-1], use_cache=False).logits.flatten(0, 1),
        ids[:, 1:].flatten(),
    )
    torch.testing.assert_close(
        learning(ids[:, :-1], ids[:, 1:]), wanted, atol=1e-5, rtol=1e-5
    )


def test_what_cannot_be_begun_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama, mamba = model("llama"), here / "mamba"
    shutil.copytree(llama, mamba)
    changed(mamba, model_type="mamba")
    for start, words, message in (
        (llama, ["model.n_layers=3"], "model.n_layers cannot be set beside start="),
        (llama, ["extension=rerope"], "transformers has no configuration for 'rerope'"),
        (llama, ["lora=0"], "expected lora=N, which is 0"),
        (llama, ["data.path=nix.txt"], "no file matches 'nix.txt'"),
        (model("gpt2"), [], "gpt2 has a table of 48 positions"),
        (mamba, [], "mamba models can be evaluated, not trained further"),
    ):
        assert (
            posbench(
                "train", f"start={start}", *ON, f"runtime.outputs={here}/out", *words
            )
            == 2
        ), words
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: ") and message in line, (words, line)
    assert not (here / "out").exists()
