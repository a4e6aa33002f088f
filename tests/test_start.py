"""Training on: runs that begin from the weights of another."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import TINY, posbench, snapshot, write_text

from posbench.api import load, runs
from posbench.config import start
from posbench.data.batches import united
from posbench.data.tokens import prepare
from posbench.encodings.rope import Rotary
from posbench.errors import UserError
from posbench.evaluation.ngrams import NGrams
from posbench.evaluation.protocols import plan, targets_of
from posbench.launch import plans
from posbench.launch.plans import resolve_one
from posbench.run import checkpoint
from posbench.run.rows import evaluation_rows
from posbench.run.run import load_config
from posbench.training import train

# 8 updates of 4 sequences of 16 tokens.
SOURCE = [word for word in TINY if "ratios" not in word] + ["evaluation.ratios=[1,2,8,16]", "training.tokens=512"]
SOURCE += ["study=short", "runtime.checkpoint_every_steps=4", "data.path=text.txt", "runtime.cache=cache"]
ON = ["tracking=none", "runtime.device=cpu", "runtime.threads=1", "training.train_length=64", "training.tokens=512"]
ON += ["runtime.checkpoint_every_steps=2", "runtime.cache=cache"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text()
        for more in ("encoding=rope", "encoding=rope seed=1", "encoding=alibi", "encoding=learned"):
            assert posbench("train", *SOURCE, *more.split()) == 0
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test's own runs go; the current folder has a text and finished runs."""
    monkeypatch.chdir(place)
    return tmp_path


def source(name: str, seed: int = 0) -> str:
    (found,) = Path("outputs/short").glob(f"{name}-s{seed}-*")
    return str(found)


def on(out: Path, *words: str) -> list[str]:
    return [*ON, f"runtime.outputs={out}", *words]


def nlls(folder: Path, tokens: int | None) -> dict[int, float | None]:
    rows = [row for row in evaluation_rows(folder) if row.curve_name == "fixed_target" and row.tokens == tokens]
    return {row.length: row.nll for row in rows}


def only(folder: Path) -> Path:
    (found,) = (folder / "extend").glob("[!.]*-s*")
    return found


@pytest.mark.parametrize("name", ["rope", pytest.param("alibi", marks=pytest.mark.full)])
def test_before_the_first_update_it_is_the_run_that_it_began_from(here: Path, name: str) -> None:
    before, began = snapshot(Path(source(name))), load_config(Path(source(name)))
    assert posbench("train", f"start={source(name)}", *on(here, "protocol=fixed_target")) == 0
    folder, theirs = only(here), nlls(Path(source(name)), 512)
    assert set(theirs) == {16, 32, 128, 256} and nlls(folder, 0).items() > theirs.items()
    assert set(nlls(folder, 512)) == {16, 32, 64, 128, 256} and nlls(folder, 512) != nlls(folder, 0)
    config = load_config(folder)
    assert config.start is not None and config.original_length == 16 and config.training.train_length == 64
    assert config.training.batch_size == 1  # 64 tokens an update, as before
    assert config.training.learning_rate == pytest.approx(began.training.learning_rate / 6)
    assert config.seed == 0 and config.model == began.model and snapshot(Path(source(name))) == before


@pytest.mark.full
def test_a_run_that_goes_on_after_a_failure_ends_with_the_weights_of_an_uninterrupted_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"start={source('rope')}", *on(here, "extension=yarn", "protocol=fixed_target")]
    assert posbench("train", *words, "study=whole") == 0
    plain = train.begin_update

    def failing(learner: Any, batch: Any, at: int, rate: float) -> Any:
        if at == 5:
            raise RuntimeError("the lights went out")
        return plain(learner, batch, at, rate)

    with monkeypatch.context() as patch:
        patch.setattr(train, "begin_update", failing)
        assert posbench("train", *words, "study=cut") != 0
    assert posbench("train", *words, "study=cut") == 0
    (whole,), (cut,) = (list((here / study).glob("yarn-*")) for study in ("whole", "cut"))
    one, other = (checkpoint.trained(folder).weights() for folder in (whole, cut))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert nlls(cut, 0) == nlls(whole, 0) and nlls(cut, 512) == nlls(whole, 512)


@pytest.mark.full
@pytest.mark.parametrize("name", ["yarn", "ntk_by_parts"])
def test_frequencies_after_saving_and_loading_are_those_of_transformers(here: Path, name: str) -> None:
    """YaRN stretches from the original length, 16, although the training length is 64."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    words = [f"start={source('rope')}", *on(here, f"extension={name}", "protocol=fixed_target")]
    assert posbench("train", *words, "evaluation.at_tokens=[]") == 0
    encoding = load(only(here)).model().encoding
    assert isinstance(encoding, Rotary) and encoding.shape.train_length == 16
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters=parameters)
    inv_freq, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    for length, most in ((64, 1e-5), (256, 1e-4)):  # theirs are in fp32, so their error grows with the position
        positions = torch.arange(length)[None]
        for turn in (torch.cos, torch.sin):
            ours = turn(encoding.angles(positions))[0].float()
            torch.testing.assert_close(ours, turn(positions[0, :, None] * inv_freq[None]), atol=most, rtol=0)
    if name == "yarn":
        assert encoding.attention_factor == pytest.approx(scale)


def test_its_name_follows_the_weights_not_the_path_and_what_is_typed_holds(here: Path) -> None:
    def begun(*words: str, seed: int = 0) -> Any:
        return resolve_one([f"start={source('rope', seed)}", *on(here, *words)]).config

    one = begun()
    assert one.id == resolve_one([f"start={Path(source('rope')).resolve()}", *on(here)]).config.id
    assert one.id != begun("seed=0", seed=1).id
    assert one.encoding.options["base"] == 10000 and one.training.warmup_tokens == 25
    stretched = begun("extension=ntk").encoding
    assert (stretched.name, stretched.options["factor"]) == ("ntk", 4)
    assert begun("extension=ntk", "encoding.factor=8").encoding.options["factor"] == 8
    assert begun("training.batch_size=2").training.batch_size == 2
    full = resolve_one(["evaluation=full"]).config.evaluation
    assert begun("evaluation=full").evaluation.ratios == full.ratios
    default = resolve_one([f"start={source('rope')}"]).config
    assert default.training.tokens == 64  # a tenth of 512 is less than an update


@pytest.mark.full
def test_a_glob_gives_a_run_for_each_and_they_stand_in_one_table(here: Path) -> None:
    for name in ("rope-s0-1", "rope-s0-1.old-1"):  # the second is what a restart moved aside
        (here / name).mkdir()
        (here / name / "config.yaml").touch()
    assert start.runs(f"{here}/rope*") == [str(here / "rope-s0-1")]
    words = on(here, "protocol=fixed_target", "study=many")
    assert posbench("sweep", "start=outputs/short/rope-*", "encoding=rope", *words) == 0
    assert posbench("train", f"start={source('rope')}", "extension=ntk", *words) == 0
    assert len(runs(here / "many")) == 3
    given = ["start=outputs/short/rope-*", "evaluation.at_tokens=[0]", *on(here)]
    configs = [plan.config for plan in plans.resolve(plans.read_sets("extend", given))]
    ways = {(one.encoding.name, one.encoding.options.get("base"), one.model.attention.window) for one in configs}
    assert len(configs) == 20 and len(ways) == 10 and {one.seed for one in configs} == {0, 1}
    assert {one.study for one in configs} == {"extend"} and all(one.original_length == 16 for one in configs)


# Words beside those of ON | what the line says.
REFUSED = """
start=outputs/nowhere | expected a run folder
start={rope} model.n_layers=2 | model.n_layers: not beside start
start={rope} encoding=fox | 'fox' cannot begin from
start={learned} | training.train_length is 64
start={rope} extension=rerope | unknown encoding 'rerope'
start={rope} data.tokenizer=bpe data.vocab_size=300 | data.tokenizer=outputs/short/rope
"""


@pytest.mark.parametrize("line", REFUSED.split("\n")[1:-1])
def test_what_cannot_be_begun_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    words, says = line.format(rope=source("rope"), learned=source("learned")).split(" | ")
    assert posbench("train", *on(here), *words.split()) != 0
    assert says in capsys.readouterr().err.strip().splitlines()[-1] and not list(here.glob("*/*/config.yaml"))


def test_a_start_is_a_finished_run_whose_weights_are_there_as_they_were(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["training.batch_size=1", "training.tokens=64", "training.warmup_tokens=0", "protocol=fixed_target"]
    assert posbench("train", f"start={source('rope')}", *on(here, *small)) == 0
    (row,) = {row.ngram_nll for row in evaluation_rows(only(here)) if row.tokens == 0}
    assert row is not None  # also with a budget below one update of the run before
    for says in ("that began at random", "not finished"):
        assert posbench("train", f"start={only(here)}", *on(here)) != 0
        assert says in capsys.readouterr().err
        (only(here) / "config.yaml").write_bytes(Path(source("rope"), "config.yaml").read_bytes())
        record = only(here) / "run.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "status": "stopped"}))
    config = resolve_one([f"start={source('rope')}", *on(here)]).config
    assert config.start is not None
    other = dataclasses.replace(config, start=dataclasses.replace(config.start, weights_sha256="0" * 64))
    with pytest.raises(UserError, match="not those that this run was to begin from"):
        train.train(other, here / "other", [])


def test_the_gate_is_that_of_the_tokens_of_both_runs_and_there_is_none_if_the_text_is_another(here: Path) -> None:
    parts = [np.array([[0, 5], [9, 12]]), np.array([[4, 10], [20, 22]])]
    assert united(parts).tolist() == [[0, 12], [20, 22]] and united(parts[:1]).tolist() == parts[0].tolist()
    began = Path(source("rope", 1))
    words = ["seed=0", "protocol=fixed_target", "evaluation.ratios=[0.25,1]", "windowed=false"]
    assert posbench("train", f"start={began}", *on(here, *words)) == 0
    configs = [load_config(folder) for folder in (began, only(here))]
    tokens = prepare(configs[0].data, Path("cache"))
    read = np.zeros(len(tokens.train.ids), bool)  # which tokens were
    for number, config in enumerate(configs):
        for first, end in tokens.batches(config.training, config.seed).spans(config.training.steps):
            read[first:end] = True
        spans = np.flatnonzero(np.diff(np.r_[False, read, False])).reshape(-1, 2)
        at = targets_of(plan("fixed_target", tokens.test, [16, 64], 8, 8, "auto")[64]).indices
        order, nll = NGrams(tokens.train.ids, spans, 257).best(tokens.test.ids, at)
        found = {(row.ngram_order, row.ngram_nll) for row in evaluation_rows(only(here)) if row.tokens == 512 * number}
        assert found == {(order, float(nll.mean()))}, number
    shutil.copy("text.txt", other := here / "text.txt")
    other.write_text(other.read_text() + " and more")
    assert posbench("train", f"start={began}", *on(here / "other", *words, f"data.path={other}")) == 0
    assert {row.ngram_nll for row in evaluation_rows(only(here / "other"))} == {None}


def test_a_finished_run_goes_on_with_a_larger_budget_as_the_refusal_says(here: Path) -> None:
    began = Path(source("rope"))
    config = load_config(began)
    longer = dataclasses.replace(config, training=dataclasses.replace(config.training, tokens=1024))
    with pytest.raises(UserError, match=r"training.tokens 512 -> 1024; .*start=RUN to go on from its weights"):
        train.train(longer, began, [])
    words = ["training.train_length=16", "training.tokens=256", "protocol=fixed_target", "study=on"]
    assert posbench("train", f"start={began}", *on(here, *words)) == 0
    (folder,) = (here / "on").glob("rope-*")
    assert load_config(folder).training.steps == 4 and nlls(folder, 0).keys() >= {16, 32}
