"""Training on: runs that begin from the weights of another."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import TINY, changed, posbench, snapshot, write_text

from posbench.config.schema import Config, load_saved
from posbench.data.tokens import prepare
from posbench.errors import UserError
from posbench.evaluation.mixture import window_nats
from posbench.evaluation.ngrams import Readers
from posbench.evaluation.protocols import place_windows, targets_of
from posbench.launch import plans
from posbench.launch.compose import axes_of
from posbench.launch.plans import resolve_one
from posbench.model.gpt import build
from posbench.results.frame import read
from posbench.run.folder import load_config
from posbench.run.rows import evaluation_rows
from posbench.run.saved import load_record
from posbench.training.train import train

# 8 updates of 4 sequences of 16 tokens.
SOURCE = [
    *(word for word in TINY if "ratios" not in word),
    "evaluation.ratios=[1,2,8,16]",
    "training.tokens=512",
    "study=short",
    "runtime.checkpoint_every_steps=4",
    "data.path=text.txt",
    "runtime.cache=cache",
]
PATTERN = (
    "encoding=layered model.n_layers=3"
    " encoding.layers=[{name:rope,window:8},{name:rope,base:500},{name:none}]"
)
ON = [
    "tracking=none",
    "runtime.device=cpu",
    "runtime.threads=1",
    "training.train_length=64",
    "training.tokens=512",
    "runtime.checkpoint_every_steps=2",
    "runtime.cache=cache",
    "runtime.validate_every_steps=0",
]


OWN = """import posbench


class Mine(posbench.Encoding):
    def distance_bias(self, distance, layer):
        return -distance.float().expand(self.shape.n_heads, *distance.shape)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text()
        for more in (
            "encoding=rope",
            "encoding=rope seed=1",
            "encoding=learned",
            PATTERN,
        ):
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


def trained_on(out: Path, *words: str) -> Path:
    """Train on with these words; return the folder of the run."""
    command = on(out, *words)
    assert posbench("train", *command) == 0
    (found,) = (out / "extend").glob("[!.]*-s*")
    return found


def begun(out: Path, *words: str) -> Config:
    """Return the configuration of a run that begins from another."""
    return resolve_one(on(out, *words)).config


def nlls(folder: Path, tokens: int | None) -> dict[int, float | None]:
    found = {}
    for row in evaluation_rows(folder):
        if row.curve_name == "fixed_target" and row.tokens == tokens:
            found[row.length] = row.nll
    return found


def test_before_the_first_update_it_is_the_run_that_it_began_from(here):
    source_run = Path(source("rope"))
    theirs = nlls(source_run, 512)
    before = snapshot(source_run)

    folder = trained_on(here, f"start={source_run}", "protocol=fixed_target")

    at_first = nlls(folder, 0)
    at_last = nlls(folder, 512)
    assert set(theirs) == {16, 32, 128, 256}
    assert at_first.items() > theirs.items()
    assert set(at_last) == {16, 32, 64, 128, 256}
    assert at_last != at_first
    assert snapshot(source_run) == before


def test_it_goes_on_with_the_settings_of_that_run_at_a_sixth_of_its_rate(here):
    source_run = Path(source("rope"))
    theirs = load_config(source_run)

    config = begun(here, f"start={source_run}")

    assert config.start is not None
    assert config.original_length == 16
    assert config.seed == 0
    assert config.model == theirs.model
    assert config.encoding == theirs.encoding
    assert config.training.train_length == 64
    assert config.training.batch_size == 1  # 64 tokens an update, as before
    assert config.training.warmup_tokens == 25
    rate = theirs.training.learning_rate / 6
    assert config.training.learning_rate == pytest.approx(rate)


def test_a_tenth_of_the_tokens_is_at_least_an_update(here):
    config = resolve_one([f"start={source('rope')}"]).config
    assert config.training.tokens == 64


def test_its_name_follows_the_weights_not_the_path(here):
    path = Path(source("rope"))
    other_path = source("rope", seed=1)
    one = begun(here, f"start={path}")
    by_full_path = begun(here, f"start={path.resolve()}")
    of_other_weights = begun(here, f"start={other_path}", "seed=0")
    assert by_full_path.id == one.id
    assert of_other_weights.id != one.id


def test_an_extension_stretches_from_the_length_of_that_run(here):
    config = begun(here, f"start={source('rope')}", "extension=yarn")
    assert config.encoding.name == "yarn"
    assert config.encoding.options["factor"] == 4
    assert build(config, 257).encoding.shape.train_length == 16


def test_a_typed_factor_holds(here):
    words = ("extension=ntk", "encoding.factor=8")
    config = begun(here, f"start={source('rope')}", *words)
    assert config.encoding.options["factor"] == 8


LOCAL, GLOBAL, WITHOUT = (
    {"name": "rope", "window": 8},
    {"name": "rope", "base": 500},
    {"name": "none"},
)
LOGN = {"name": "temperature", "rule": "logn", "inner": "rope"}
# What is typed, and the pattern of layers that comes of it.
IN_LAYERS = [
    (
        "extension=yarn:layers=global",
        [LOCAL, {"name": "yarn", "base": 500, "factor": 4}, WITHOUT],
    ),
    (
        "extension=pi:factor=8:layers=local",
        [{"name": "pi", "window": 8, "factor": 8}, GLOBAL, WITHOUT],
    ),
    (
        "extension=abf:layers=global",
        [LOCAL, {"name": "rope", "base": 500_000}, WITHOUT],
    ),
    (
        "extension=abf encoding.base=20000",
        [LOCAL | {"base": 20_000}, GLOBAL | {"base": 20_000}, WITHOUT],
    ),
    ("encoding=none:layers=local", [WITHOUT | {"window": 8}, GLOBAL, WITHOUT]),
    (
        "extension=temperature:rule=logn:layers=local",
        [LOGN | {"inner_options": {}, "window": 8}, GLOBAL, WITHOUT],
    ),
    (
        "extension=temperature:rule=logn:layers=local encoding.inner_options.base=700",
        [LOGN | {"inner_options": {"base": 700}, "window": 8}, GLOBAL, WITHOUT],
    ),
    (
        "extension=temperature:rule=logn:layers=global",
        [
            LOCAL,
            LOGN | {"inner_options": {"base": 500}},
            LOGN | {"inner": "none", "inner_options": {}},
        ],
    ),
]


@pytest.mark.parametrize(("words", "pattern"), IN_LAYERS)
def test_an_extension_is_in_the_named_layers_of_a_pattern(here, words, pattern):
    config = begun(here, f"start={source('layered')}", *words.split())
    assert config.encoding.name == "layered"
    assert config.encoding.options["layers"] == pattern


def test_an_extension_keeps_the_class_of_a_file_in_other_layers(here):
    """The pattern's class is known by its file alone."""
    Path("mine.py").write_text(OWN)
    own = "encoding.layers=[{name:'mine.py:Mine',window:8},{name:rope}]"
    words = ("encoding=layered", own, "model.n_layers=2", "study=own")
    assert posbench("train", *SOURCE, *words) == 0
    (run,) = Path("outputs/own").glob("layered-*")
    theirs = load_config(run).encoding

    config = begun(here, f"start={run}", "extension=yarn:layers=global")

    names = [layer["name"] for layer in config.encoding.options["layers"]]
    assert names == ["mine", "yarn"]
    assert theirs.file == "mine.py:Mine"
    assert config.encoding.file == theirs.file
    assert config.encoding.file_sha256 == theirs.file_sha256


def test_without_layers_another_encoding_replaces_a_pattern(here):
    config = begun(here, f"start={source('layered')}", "encoding=none")
    assert config.encoding.name == "none"


def test_an_extension_in_some_layers_begins_as_it_is_evaluated_without_training(here):
    """The one is an encoding of its own, the other changes a trained one."""
    evaluated = shutil.copytree(source("layered"), here / Path(source("layered")).name)
    extension = "extension=yarn:factor=4:layers=global"
    words = ["ratio=1,4,16", "protocol=fixed_target"]
    assert posbench("evaluate", str(evaluated), extension, *words) == 0

    on_text = ("protocol=fixed_target", "evaluation.ratios=[0.25,1,4]")
    begun_anew = trained_on(here, f"start={source('layered')}", extension, *on_text)

    without_training = {}
    for row in evaluation_rows(evaluated):
        if row.extension == extension.removeprefix("extension="):
            without_training[row.length] = row.nll
    assert set(without_training) == {16, 64, 256}
    assert nlls(begun_anew, 0) == pytest.approx(without_training, rel=1e-6)


def test_typed_lengths_hold_and_else_those_of_that_run_are_among_them(here):
    run = f"start={source('rope')}"
    plain = begun(here, run)
    typed = begun(here, run, "evaluation=extrapolation")
    assert typed.evaluation.ratios != plain.evaluation.ratios
    # 256, the longest, is no multiple
    odd = resolve_one([run, "training.train_length=48"]).config
    assert {2.0, 4.0} <= set(odd.evaluation.ratios)


def rename(folder: Path, new_id: str) -> None:
    """Make a run another one, in all files that have its id."""
    old_id = load_record(folder).id
    for name in ("run.json", "rows.jsonl", "checkpoint/*/manifest.json"):
        for path in folder.glob(name):
            path.write_text(path.read_text().replace(old_id, new_id))


def with_other(out: Path, old: str, new: str) -> Path:
    """Copy the run of RoPE as one with another option; return its folder."""
    one = Path(source("rope"))
    other = shutil.copytree(one, out / one.name)
    path = other / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    rename(other, load_saved(path).id)
    return other


def with_base_500(out: Path) -> Path:
    return with_other(out, "base: 10000", "base: 500")


@pytest.fixture
def resonant(here):
    """A run of RoPE with other frequencies; its folder."""
    return with_other(here, "frequencies: geometric", "frequencies: resonance")


def test_positions_are_dropped_whatever_the_frequencies(here, resonant):
    config = begun(here, f"start={resonant}", "encoding=none")
    assert config.encoding.name == "none"


def test_another_base_keeps_the_other_frequencies(here, resonant):
    words = ("encoding=rope", "encoding.base=500")
    options = begun(here, f"start={resonant}", *words).encoding.options
    assert (options["base"], options["frequencies"]) == (500, "resonance")


def test_an_extension_of_other_frequencies_is_refused(here, resonant):
    with pytest.raises(UserError, match="'rope' with frequencies of its own"):
        begun(here, f"start={resonant}", "extension=yarn")


def test_a_temperature_goes_around_rope_of_the_base_that_it_had(here):
    words = ("extension=temperature", "encoding.rule=logn")
    of_default = begun(here, f"start={source('rope')}", *words)
    of_other = begun(here, f"start={with_base_500(here)}", *words)
    assert of_default.encoding.options["inner_options"] == {}
    assert of_other.encoding.options["inner_options"] == {"base": 500}


def test_a_wrapper_goes_around_the_class_of_a_file(here):
    Path("own.py").write_text(OWN)
    words = [*SOURCE, f"runtime.outputs={here}", "study=own", "encoding=own.py:Mine"]
    assert posbench("train", *words) == 0
    (run,) = here.glob("own/mine-s0-*")

    words = ("extension=temperature", "encoding.rule=logn")
    config = begun(here, f"start={run}", *words)
    assert config.encoding.options["inner"] == "mine"
    assert config.encoding.file == "own.py:Mine"


def test_runs_from_two_bases_are_two_schemes(here):
    one = Path(source("rope"))
    other = with_base_500(here)

    words = ("encoding=none", "training.tokens=64")
    trained_on(here / "a", f"start={one}", *words)
    trained_on(here / "b", f"start={other}", *words)

    rows = read([here / "a", here / "b"])
    assert set(rows["label"]) == {"none", "none start.options.base=500"}


def starts_of(text: str) -> set[str]:
    """Return the ids of the runs that a sweep with `start=TEXT` begins from."""
    return {Path(folder).name for folder in axes_of([f"start={text}"], ())["start"]}


def test_a_comma_list_of_starts_is_a_point_for_each(here):
    rope, learned = Path(source("rope")), Path(source("learned"))
    assert starts_of(f"{rope},{learned}") == {rope.name, learned.name}
    both = {Path(source("rope", seed)).name for seed in (0, 1)}
    assert starts_of("outputs/short/rope-*,short/learned-*") == both | {learned.name}


def test_a_study_as_start_is_a_point_for_each_of_its_runs(here):
    names = {path.name for path in Path("outputs/short").glob("[!.]*-s*")}
    assert starts_of("short") == names


@pytest.mark.slow
def test_a_glob_gives_a_run_for_each(here):
    given = ["start=outputs/short/rope-*", "evaluation.at_tokens=[0]", *on(here)]

    sets = plans.read_sets("extend", given)
    configs = [plan.config for plan in plans.resolve(sets)]

    ways = set()
    for config in configs:
        assert config.study == "extend"
        assert config.original_length == 16
        name = config.encoding.name
        base = config.encoding.options.get("base")
        ways.add((name, base, config.model.attention.window))
    assert len(configs) == 20
    assert len(ways) == 10
    assert {config.seed for config in configs} == {0, 1}


@pytest.mark.slow
def test_a_sweep_has_each_way_to_extend_a_pattern_in_its_global_layers_and_in_all(here):
    given = ["start=outputs/short/layered-*", "evaluation.at_tokens=[0]", *on(here)]

    sets = plans.read_sets("extend_patterns", given)
    configs = [plan.config for plan in plans.resolve(sets)]

    patterns = []
    for config in configs:
        changed = []
        of_layers = config.encoding.options["layers"]
        for layer, trained in zip(of_layers, [LOCAL, GLOBAL, WITHOUT], strict=True):
            changed.append(layer != trained)
        patterns.append(changed)
    global_alone, both = [False, True, False], [True, True, False]
    extended = [global_alone, both] * 3
    sharper = [[False, True, True], [True, True, True]]
    assert patterns == [[False] * 3, *extended, *sharper]


# Words beside those of ON, and what the line says.
REFUSED = [
    ("start=gpt2", "gpt2 does not exist: expected run folders or study folders"),
    ("start={rope}0", "did you mean 'outputs/short/rope-s"),
    ("start={rope} model.n_layers=2", "model.n_layers cannot be set beside start"),
    ("start={rope} training=lm", "training cannot be set beside start"),
    ("start={rope} encoding=fox", "'fox' cannot begin from"),
    ("start={learned} extension=yarn", "yarn extends plain rope"),
    ("start={learned} extension=abf", "abf extends plain rope"),
    ("start={rope} extension=yarn:layers=global", "this run has 'rope' in all"),
    ("start={layered} extension=yarn:layers=globl", "did you mean 'global'?"),
    ("start={layered} extension=yarn:layers=0", "unknown layers '0'"),
    ("start={layered} extension=yarn:faktor=4", "did you mean 'factor'?"),
    ("start={layered} extension=temperature:layers=global", "has other parameters"),
    ("start={rope} encoding=none extension=yarn", "both say the encoding"),
    ("start={rope} extension=rerope", "nothing is trained with rerope: expected pi, "),
    ("start={rope} extension=search", "nothing is trained with search: expected pi, "),
    ("start={rope} extension=yarm", "did you mean 'yarn'?"),
    ("start={rope},{learned}", "gives several values: 'posbench sweep' runs each"),
    ("start=", "start names no run"),
    ("start={learned}", "training.train_length is 64"),
    (
        "start={rope} data.tokenizer=bpe data.vocab_size=300",
        "data.tokenizer=outputs/short/rope",
    ),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_what_cannot_be_begun_is_one_line(here, capsys, words, says):
    runs = {name: source(name) for name in ("rope", "learned", "layered")}
    words = words.format_map(runs)

    settings = on(here)

    code = posbench("train", *settings, *words.split())

    lines = capsys.readouterr().err.splitlines()
    assert code != 0
    assert says in lines[-1]
    assert not list(here.glob("*/*/config.yaml"))


def test_a_start_with_a_damaged_record_is_one_line(here, capsys):
    damaged = shutil.copytree(source("rope"), here / "damaged")
    (damaged / "run.json").write_text("{")

    code = posbench("train", *on(here), f"start={damaged}")

    assert code == 2
    assert "damaged/run.json: " in capsys.readouterr().err


def test_a_start_has_the_weights_that_it_had(here):
    config = begun(here, f"start={source('rope')}")
    assert config.start is not None
    other = dataclasses.replace(config.start, weights_sha256="0" * 64)
    config = changed(config, start=other)
    with pytest.raises(UserError, match="not those that this run was to begin from"):
        train(config, here / "other", [])


GATE = [
    "seed=0",
    "protocol=fixed_target",
    "evaluation.ratios=[0.25,1]",
    "windowed=false",
]


def test_the_gate_is_that_of_the_tokens_of_both_runs(here):
    theirs = Path(source("rope", seed=1))
    ours = trained_on(here, f"start={theirs}", *GATE)
    rows = evaluation_rows(ours)
    data = load_config(theirs).data
    tokens = prepare(data, Path("cache"))
    planned = place_windows("fixed_target", tokens.test, [16, 64], 8, 8, "auto")
    targets = targets_of(planned[64])
    is_read = np.zeros(len(tokens.train.ids), bool)

    for number, folder in enumerate((theirs, ours)):
        config = load_config(folder)
        batches = tokens.batches(config.training, config.seed)
        for first, end in batches.spans(config.training.steps):
            is_read[first:end] = True
        bounded = np.r_[False, is_read, False]
        borders = np.flatnonzero(np.diff(bounded))
        spans = borders.reshape(-1, 2)
        held_out = (tokens.test.ids, tokens.validation.ids)
        breaks = np.arange(257) == ord("\n")
        readers = Readers(tokens.train.ids, spans, 257, *held_out, breaks)
        order, nll = readers.ngram(targets.indices)
        found = [row for row in rows if row.tokens == 512 * number]
        mean = float(nll.mean())
        assert found
        for row in found:
            assert row.ngram_order == order
            assert row.ngram_nll == mean
            # the sum that a paired interval rests on
            total = sum(row.units["ngram"])
            assert total == pytest.approx(nll.sum(), rel=1e-5)
        as_trained = [row for row in found if "mixture" in row.units]
        assert [row.length for row in as_trained] == [64] * number
        for row in as_trained:  # not at the checkpoint on the way
            of_window = window_nats(readers, targets.indices, targets.context)
            total = sum(row.units["mixture"])
            assert total == pytest.approx(of_window.sum(), rel=1e-5)


def test_on_another_text_there_is_no_gate(here):
    other = shutil.copy("text.txt", here / "text.txt")
    other.write_text(other.read_text() + " and more")
    run = source("rope", seed=1)

    folder = trained_on(here, f"start={run}", *GATE, f"data.path={other}")

    of_reader = {row.ngram_nll for row in evaluation_rows(folder)}
    assert of_reader == {None}
