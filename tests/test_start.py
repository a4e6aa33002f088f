"""Training on: runs that begin from the weights of another."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TINY, posbench, snapshot, write_text

from posbench.data.batches import merge_spans
from posbench.data.tokens import prepare
from posbench.errors import UserError
from posbench.evaluation.ngrams import Readers
from posbench.evaluation.protocols import plan, targets_of
from posbench.launch import plans
from posbench.launch.plans import resolve_one
from posbench.model.gpt import build
from posbench.results.frame import read
from posbench.run.rows import evaluation_rows
from posbench.run.run import load_config
from posbench.training.train import train

# 8 updates of 4 sequences of 16 tokens.
SOURCE = [word for word in TINY if "ratios" not in word] + [
    "evaluation.ratios=[1,2,8,16]",
    "training.tokens=512",
]
SOURCE += [
    "study=short",
    "runtime.checkpoint_every_steps=4",
    "data.path=text.txt",
    "runtime.cache=cache",
]
ON = [
    "tracking=none",
    "runtime.device=cpu",
    "runtime.threads=1",
    "training.train_length=64",
    "training.tokens=512",
]
ON += [
    "runtime.checkpoint_every_steps=2",
    "runtime.cache=cache",
    "runtime.validate_every_steps=0",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text()
        for more in ("encoding=rope", "encoding=rope seed=1", "encoding=learned"):
            assert posbench("train", *SOURCE, *more.split()) == 0
    return folder


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """Return the folder for a test's own runs; the current folder has a text and
    finished runs.
    """
    monkeypatch.chdir(place)
    return tmp_path


def source(name: str, seed: int = 0) -> str:
    (found,) = Path("outputs/short").glob(f"{name}-s{seed}-*")
    return str(found)


def on(out: Path, *words: str) -> list[str]:
    return [*ON, f"runtime.outputs={out}", *words]


def nlls(folder: Path, tokens: int | None) -> dict[int, float | None]:
    rows = [
        row
        for row in evaluation_rows(folder)
        if row.curve_name == "fixed_target" and row.tokens == tokens
    ]
    return {row.length: row.nll for row in rows}


def only(folder: Path) -> Path:
    (found,) = (folder / "extend").glob("[!.]*-s*")
    return found


def test_before_the_first_update_it_is_the_run_that_it_began_from(here):
    before = snapshot(Path(source("rope")))
    began = load_config(Path(source("rope")))
    assert (
        posbench("train", f"start={source('rope')}", *on(here, "protocol=fixed_target"))
        == 0
    )
    folder = only(here)
    theirs = nlls(Path(source("rope")), 512)
    assert set(theirs) == {16, 32, 128, 256}
    assert nlls(folder, 0).items() > theirs.items()
    assert set(nlls(folder, 512)) == {16, 32, 64, 128, 256}
    assert nlls(folder, 512) != nlls(folder, 0)
    config = load_config(folder)
    assert config.start is not None
    assert config.original_length == 16
    assert config.training.train_length == 64
    assert config.training.batch_size == 1  # 64 tokens an update, as before
    assert config.training.learning_rate == pytest.approx(
        began.training.learning_rate / 6
    )
    assert config.seed == 0
    assert config.model == began.model
    assert snapshot(Path(source("rope"))) == before


def test_its_name_follows_the_weights_not_the_path_and_what_is_typed_holds(here):
    def begun(*words: str, seed: int = 0) -> Any:
        return resolve_one([f"start={source('rope', seed)}", *on(here, *words)]).config

    one = begun()
    assert (
        one.id
        == resolve_one([f"start={Path(source('rope')).resolve()}", *on(here)]).config.id
    )
    assert one.id != begun("seed=0", seed=1).id
    assert one.encoding.options["base"] == 10000
    assert one.training.warmup_tokens == 25
    stretched = begun("extension=yarn")
    assert stretched.encoding.name == "yarn"
    assert stretched.encoding.options["factor"] == 4
    # from which it stretches, although 64 is trained
    assert build(stretched, 257).encoding.shape.train_length == 16
    assert begun("evaluation=extrapolation").evaluation.ratios != one.evaluation.ratios
    # 256, the longest, is no multiple
    assert {2.0, 4.0} <= {*begun("training.train_length=48").evaluation.ratios}
    assert begun("extension=ntk", "encoding.factor=8").encoding.options["factor"] == 8
    default = resolve_one([f"start={source('rope')}"]).config
    assert default.training.tokens == 64  # a tenth of 512 is less than an update


def test_runs_from_two_bases_are_two_schemes(here):
    other = shutil.copytree(source("rope"), here / Path(source("rope")).name)
    (other / "config.yaml").write_text(
        (other / "config.yaml").read_text().replace("base: 10000", "base: 500")
    )
    for start, out in ((source("rope"), here / "a"), (other, here / "b")):
        assert (
            posbench(
                "train",
                f"start={start}",
                *on(out, "encoding=none", "training.tokens=64"),
            )
            == 0
        )
    assert {*read([here / "a", here / "b"])["label"]} == {
        "none",
        "none start.options.base=500",
    }


@pytest.mark.slow
def test_a_glob_gives_a_run_for_each(here):
    given = ["start=outputs/short/rope-*", "evaluation.at_tokens=[0]", *on(here)]
    configs = [plan.config for plan in plans.resolve(plans.read_sets("extend", given))]
    ways = {
        (
            one.encoding.name,
            one.encoding.options.get("base"),
            one.model.attention.window,
        )
        for one in configs
    }
    assert len(configs) == 20
    assert len(ways) == 10
    assert {one.seed for one in configs} == {0, 1}
    assert {one.study for one in configs} == {"extend"}
    assert all(one.original_length == 16 for one in configs)


# Words beside those of ON | what the line says.
REFUSED = """
start=outputs/nowhere | expected a finished run (a HuggingFace model trains in its
start={rope}0 | did you mean 'rope-s
start={rope} model.n_layers=2 | model.n_layers cannot be set beside start
start={rope} encoding=fox | 'fox' cannot begin from
start={learned} extension=yarn | yarn extends plain rope
start={learned} | training.train_length is 64
start={rope} data.tokenizer=bpe data.vocab_size=300 | data.tokenizer=outputs/short/rope
"""


@pytest.mark.parametrize("line", REFUSED.split("\n")[1:-1])
def test_what_cannot_be_begun_is_one_line(here, capsys, line):
    words, says = line.format(rope=source("rope"), learned=source("learned")).split(
        " | "
    )
    assert posbench("train", *on(here), *words.split()) != 0
    assert says in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(here.glob("*/*/config.yaml"))


def test_a_start_has_the_weights_that_it_had(here):
    config = resolve_one([f"start={source('rope')}", *on(here)]).config
    assert config.start is not None
    other = dataclasses.replace(
        config, start=dataclasses.replace(config.start, weights_sha256="0" * 64)
    )
    with pytest.raises(UserError, match="not those that this run was to begin from"):
        train(other, here / "other", [])


def test_the_gate_is_that_of_the_tokens_of_both_runs_and_there_is_none_if_the_text_is_another(
    here,
):
    parts = [np.array([[0, 5], [9, 12]]), np.array([[4, 10], [20, 22]])]
    assert merge_spans(parts).tolist() == [[0, 12], [20, 22]]
    assert merge_spans(parts[:1]).tolist() == parts[0].tolist()
    began = Path(source("rope", 1))
    words = [
        "seed=0",
        "protocol=fixed_target",
        "evaluation.ratios=[0.25,1]",
        "windowed=false",
    ]
    assert posbench("train", f"start={began}", *on(here, *words)) == 0
    configs = [load_config(folder) for folder in (began, only(here))]
    tokens = prepare(configs[0].data, Path("cache"))
    read = np.zeros(len(tokens.train.ids), bool)  # which tokens were
    for number, config in enumerate(configs):
        for first, end in tokens.batches(config.training, config.seed).spans(
            config.training.steps
        ):
            read[first:end] = True
        spans = np.flatnonzero(np.diff(np.r_[False, read, False])).reshape(-1, 2)
        at = targets_of(
            plan("fixed_target", tokens.test, [16, 64], 8, 8, "auto")[64]
        ).indices
        readers = Readers(
            tokens.train.ids, spans, 257, tokens.test.ids, tokens.validation.ids
        )
        order, nll = readers.ngram(at)
        found = {
            (row.ngram_order, row.ngram_nll)
            for row in evaluation_rows(only(here))
            if row.tokens == 512 * number
        }
        assert found == {(order, float(nll.mean()))}, number
    shutil.copy("text.txt", other := here / "text.txt")
    other.write_text(other.read_text() + " and more")
    assert (
        posbench(
            "train", f"start={began}", *on(here / "other", *words, f"data.path={other}")
        )
        == 0
    )
    assert {row.ngram_nll for row in evaluation_rows(only(here / "other"))} == {None}
