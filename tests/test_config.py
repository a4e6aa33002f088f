"""Configurations: every YAML composes, a run is its configuration, wrong values and hostile files end in one line."""

import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from posbench.config import compose, history, overrides, schema, sources
from posbench.config.identity import run_id
from posbench.config.schema import Config, TrainingConfig, from_container, load_saved, to_container
from posbench.config.shipped import choices, configs_dir
from posbench.errors import UserError

NO_GROUPS = ("tuned", "sweep", "claim")
GROUPS = sorted(path.name for path in configs_dir().iterdir() if path.is_dir() and path.name not in NO_GROUPS)
STORED = Path(__file__).parent / "data" / "rope-s0-1775196f.yaml"
CHOICES = [f"{group}={name}" for group in GROUPS for name in choices(group)]


def refused(*overrides: str, config_dir: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        compose.single(list(overrides), config_dir)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def composed(*overrides: str) -> Config:
    return compose.single(list(overrides))


@pytest.mark.sample(20)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_composes(choice: str) -> None:
    beside = {"evaluation=problems": ["data=task/copy"]}.get(choice, [])
    assert isinstance(composed(choice, *beside), Config)


def test_every_key_is_explained() -> None:
    for path in configs_dir().rglob("*.yaml"):
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line for line in lines if line.startswith("# ") and "@package" not in line]
        assert comments, f"{path} has no first comment"
        if path.parent.name in ("experiment", "demo", "claim") or "tuned" in path.parts:
            continue  # their keys are explained where they are declared
        for above, line in zip(["", *lines], lines, strict=False):
            key = re.match(r"\s*(\w+):(.*)", line)
            if key and key[1] != "name" and key[2].strip():
                assert " # " in line or above.startswith("#"), f"{path}: {key[1]} is not explained"


def test_the_default_is_the_demo_with_rope() -> None:
    config = composed()
    assert (config.study, config.encoding.name, config.model.d_model) == ("demo", "rope", 128)
    assert config == composed("experiment=demo", "encoding=rope")
    assert 450 <= config.training.tokens // config.training.tokens_per_step <= 500


def test_command_line_choices_win_over_the_experiment() -> None:
    config = composed("experiment=small", "model=llama", "data=wikitext-2", "training.train_length=96")
    assert (config.model.norm, config.model.mlp) == ("rmsnorm", "swiglu")  # the block is the model's
    assert config.model.d_model == composed("experiment=small").model.d_model  # the size is the experiment's
    assert config.data.name == "wikitext-2"
    assert config.training.train_length == 96


def test_an_experiment_may_tune_a_scheme_and_the_command_line_wins() -> None:
    assert composed("encoding=t5").encoding.options["max_distance"] == 64  # the demo's training length
    assert composed("encoding=t5", "experiment=small").encoding.options["max_distance"] == 128  # the default
    assert composed("encoding=t5", "encoding.max_distance=40").encoding.options["max_distance"] == 40


@pytest.mark.sample(3)
@pytest.mark.parametrize("experiment", sorted(path.stem for path in (configs_dir() / "experiment").glob("*.yaml")))
def test_experiments_name_their_study_and_compose_with_every_model(experiment: str) -> None:
    for model in sorted(path.stem for path in (configs_dir() / "model").glob("*.yaml")):
        assert composed(f"experiment={experiment}", f"model={model}").study == experiment


# -- identity ----------------------------------------------------------------------------------------------------------


def test_run_id_ignores_what_does_not_shape_the_weights(tiny_config: Config) -> None:
    assert re.fullmatch(r"rope-s0-[0-9a-f]{8}", run_id(tiny_config))
    moved = dataclasses.replace(tiny_config.runtime, outputs="elsewhere", threads=7)
    assert run_id(dataclasses.replace(tiny_config, runtime=moved)) == run_id(tiny_config)
    assert run_id(composed("tracking=none", "evaluation.blocks=9", "study=other")) == run_id(composed())


@pytest.mark.parametrize("change", ["encoding.base=9999", "seed=1", "training.clip=2", "data.vocab_size=999"])
def test_run_id_changes_with_what_shapes_the_weights(change: str) -> None:
    assert run_id(composed(change)) != run_id(composed())


def test_a_number_is_the_same_run_however_it_is_spelt() -> None:
    spellings = ["encoding.base=10000", "encoding.base=1e4", "encoding.base=10000.0"]
    assert (
        len({run_id(composed(spelling, "training.tokens=1e6")) for spelling in spellings} | {run_id(composed())}) == 1
    )


def at_the_former_rate(*overrides: str) -> Config:
    """Of the time of the names below: later experiment=demo moved to twice this rate."""
    return composed("training.learning_rate=0.003", *overrides)


# Literals, never computed: whoever changes them takes every run of every user its name.
def test_a_stored_configuration_keeps_its_names() -> None:
    assert run_id(load_saved(STORED)) == "rope-s0-21bc4a21"
    assert run_id(at_the_former_rate("encoding=rope")) == "rope-s0-21bc4a21"


@dataclasses.dataclass(frozen=True)
class LaterTraining(TrainingConfig):
    dropout: float


@dataclasses.dataclass(frozen=True)
class LaterConfig(Config):
    training: LaterTraining
    parallel: dict[str, int]  # a section of which nothing existed


def test_a_later_key_renames_no_run_and_old_files_load_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_saved(STORED)
    monkeypatch.setattr(schema, "Config", LaterConfig)
    with pytest.raises(UserError, match=r"missing key 'training\.dropout'"):
        load_saved(STORED)
    added = {"training.dropout": 0.0, "parallel.size": 1, "encoding/rope.partial": None, "encoding/alibi.partial": 7}
    monkeypatch.setattr(history, "ADDED", added)
    later = load_saved(STORED)
    assert isinstance(later, LaterConfig)
    assert (later.training.dropout, later.parallel) == (0.0, {"size": 1})
    assert later.encoding.options == {**before.encoding.options, "partial": None}
    assert run_id(later) == run_id(before)
    assert from_container(to_container(later)) == later
    dropout = dataclasses.replace(later, training=dataclasses.replace(later.training, dropout=0.1))
    split = dataclasses.replace(later, parallel={"size": 2})
    assert len({run_id(config) for config in (before, later, dropout, split)}) == 3


@pytest.mark.full
def test_another_split_is_another_run_and_a_run_of_before_keeps_its_own(tmp_path: Path) -> None:
    asked = ["data=text", "data.path=a.txt", "training.learning_rate=0.001"]
    now, before = (compose.single([*asked, *more]) for more in ([], ["data.test_pieces=null"]))
    assert (now.data.test_pieces, before.data.test_pieces) == (30, None)
    assert run_id(before) == "rope-s0-5165727c" != run_id(now)
    container = to_container(before)
    del container["data"]["test_pieces"]  # as a run of before has saved it
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(container), encoding="utf-8")
    assert load_saved(tmp_path / "config.yaml") == before
    splits_of_their_own = ("builtin", "wikitext-2", "wikitext-103", "tinystories", "pg19")
    assert {compose.single([f"data={name}"]).data.test_pieces for name in splits_of_their_own} == {None}


NESTED = "encoding.inner_options={layers:[{name:fire},{name:dape,inner:fire,inner_options:{}}]}"
# Overrides, the options whose default changed, at the former one, and the run's name from before: literals, as above.
MOVED = [
    (["encoding=abacus"], "others=random", "abacus-s0-ad0f8de4"),
    (["encoding=temperature", "encoding.inner=abacus"], "inner_options.others=random", "temperature-s0-97d16476"),
    (["encoding=path"], "silu=false start=torch", "path-s0-92e0d9a7"),
    (["encoding=path_fox"], "silu=false start=torch", "path_fox-s0-51fb9274"),
    (
        ["encoding=canon", "encoding.inner=path"],
        "inner_options.silu=false inner_options.start=torch",
        "canon-s0-127c528d",
    ),
    (["encoding=dape"], "per_layer=false", "dape-s0-a4c0961b"),
    (["encoding=dape_v2"], "per_layer=false", "dape_v2-s0-521b47e8"),
    (["encoding=temperature", "encoding.inner=dape_v2"], "inner_options.per_layer=false", "temperature-s0-441b26e7"),
    (["encoding=selective_rope"], "rank=16 start=torch", "selective_rope-s0-e1063963"),
    (
        ["encoding=temperature", "encoding.inner=selective_rope"],
        "inner_options.rank=16 inner_options.start=torch",
        "temperature-s0-70a6b781",
    ),
    (["encoding=fire"], "threshold=null", "fire-s0-14a2df1a"),
    (["encoding=dape", "encoding.inner=fire"], "per_layer=false inner_options.threshold=null", "dape-s0-5e3f2aee"),
    (["encoding=t5"], "rate=1", "t5-s0-e27fce76"),
    (["encoding=temperature", "encoding.inner=t5"], "inner_options.rate=1", "temperature-s0-ef7b668e"),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("overrides", "former", "name"), MOVED)
def test_a_run_from_before_a_default_changed_keeps_its_name_and_is_no_run_of_today(
    overrides: list[str], former: str, name: str
) -> None:
    now = at_the_former_rate(*overrides)
    before = at_the_former_rate(*overrides, *(f"encoding.{each}" for each in former.split()))
    assert run_id(before) == name != run_id(now)
    saved = to_container(before)
    for each in former.split():  # files of before lack what was not given
        saved["encoding"].get("inner_options", {}).pop(each.partition("=")[0].rpartition(".")[2], None)
    assert from_container(saved) == before


def test_inner_encodings_at_any_depth_keep_their_former_defaults_and_their_runs() -> None:
    now = at_the_former_rate("encoding=temperature", "encoding.inner=layered", NESTED)
    first, second = now.encoding.options["inner_options"]["layers"]
    assert first["threshold"] == second["inner_options"]["threshold"] == "quarter"
    saved = to_container(now)
    saved["encoding"]["inner_options"] = {"layers": [{"name": "fire"}, {"name": "dape", "inner": "fire"}]}
    saved["encoding"]["inner_options"]["layers"][1]["inner_options"] = {}
    before = from_container(saved)
    first, second = before.encoding.options["inner_options"]["layers"]
    assert first["threshold"] is None and second["inner_options"]["threshold"] is None
    assert run_id(before) == "temperature-s0-32c64441"


def test_a_later_option_that_changes_nothing_renames_no_run() -> None:
    assert run_id(at_the_former_rate("encoding=liere")) == "liere-s0-ac9984cf"
    assert run_id(at_the_former_rate("encoding=temperature", "encoding.inner=liere")) == "temperature-s0-94108e7a"
    assert run_id(at_the_former_rate("encoding=liere", "encoding.block=8")) != "liere-s0-ac9984cf"


# -- text of one's own -------------------------------------------------------------------------------------------------

UNREAD = {
    ("data=builtin", "data.path=a.txt"): "data.path is 'a.txt', which data=builtin does not read: data=text does",
    ("data.subset=x",): "data.subset is 'x', which data=builtin does not read: data=hub does",
    ("data.path=a.txt", "data.revision=v1"): "data.revision is 'v1', which data=text does not read: data=hub does",
    ("data.path=a.txt", "data.dataset=x/y"): "data.dataset is 'x/y', which data=text does not read: data=hub does",
    ("data=text", "data.path=a.txt", "data.splits={train: x}"): "which data=text does not read: data=hub does",
    ("data=wikitext-2", "data.path=a.txt"): "data.path is 'a.txt', which data=hub does not read: data=text does",
    ("data=wikitext-2", "data.dataset=x/y"): "data.dataset is 'x/y', but 'wikitext-2' is 'Salesforce/wikitext' or a "
    "folder with a copy of it: another data set is data=hub data.dataset=x/y",
    ("data=builtin", "data.source=text", "data.path=a.txt"): "data.source is 'text': a source is chosen with all that",
}


@pytest.mark.parametrize("overrides", UNREAD)
def test_a_key_that_the_chosen_text_does_not_read_is_refused_alone_and_in_sweeps(overrides: tuple[str, ...]) -> None:
    assert UNREAD[overrides] in refused(*overrides)
    with pytest.raises(UserError) as caught:
        compose.combinations([["seed=0,1", *overrides]])
    assert UNREAD[overrides] in str(caught.value)


def test_what_no_source_has_is_unset_in_the_base_of_all_data() -> None:
    base = yaml.safe_load((configs_dir() / "data/_base.yaml").read_text(encoding="utf-8"))
    assert {name: base[name] for names in sources._UNREAD.values() for name in names} == {
        name: sources._UNSET.get(name) for names in sources._UNREAD.values() for name in names
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["data.path=a.txt"], ["data=text", "data.path=a.txt"]),
        (["data.source=text", "data.path=a.txt"], ["data=text", "data.path=a.txt"]),
        (["experiment=gpt124m", "data.path=a.txt"], ["experiment=gpt124m", "data=text", "data.path=a.txt"]),
        (["data.dataset=x/y"], ["data=hub", "data.dataset=x/y"]),
        (["data.path=null"], []),
    ],
)
def test_text_of_ones_own_needs_no_word_more(given: list[str], meant: list[str]) -> None:
    assert composed(*given) == composed(*meant)
    (by_sweep,) = compose.combinations([given])
    assert by_sweep[1] == composed(*meant)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", ["notes (1).txt", "a,b.txt", "[draft] one=two.txt", 'say "so".txt', "50%.txt", "ünï.txt"]
)
def test_a_file_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    assert composed(f"data.path={name}").data.path == name
    ((overrides, config),) = compose.combinations([[f"data.path={name}"]])
    assert config.data.path == name and composed(*overrides) == config
    assert composed("data.path=*.txt").data.path == "*.txt"


def test_a_choice_that_reads_the_key_stays_chosen(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text("defaults: [_base]\nname: mine\nsource: text\ncolumn: body\n")
    (tmp_path / "experiment/own.yaml").write_text(
        "# @package _global_\ndefaults: [demo, {override /data: mine}]\nstudy: own\n"
    )
    config = compose.single(["experiment=own", "data.path=a.jsonl"], tmp_path)
    assert (config.data.name, config.data.column) == ("mine", "body")


def test_a_data_set_of_the_hub_is_called_what_it_is_called_there() -> None:
    assert composed("data.dataset='roneneldan/Tiny Stories'").data.name == "Tiny-Stories"
    assert composed("data.dataset=x/y", "data.name=mine").data.name == "mine"


@pytest.mark.full
def test_one_file_is_one_run_however_its_path_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "desk/texts").mkdir(parents=True)
    (tmp_path / "desk/mine.json").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("PWD", str(tmp_path / "linked"))  # as a shell has it
    spellings = ["texts/a.txt", "./texts//a.txt", "texts/../texts/a.txt", f"{tmp_path}/desk/texts/a.txt"]
    spellings.append(f"{tmp_path}/linked/texts/a.txt")
    assert {composed(f"data.path={path}").data.path for path in spellings} == {"texts/a.txt"}
    assert len({run_id(composed(f"data.path={path}")) for path in spellings}) == 1
    outside = ["../a.txt", f"{tmp_path}/a.txt"]
    assert {composed(f"data.path={path}").data.path for path in outside} == {f"{tmp_path}/a.txt"}
    assert composed(f"data.tokenizer={tmp_path}/desk/mine.json").data.tokenizer == "mine.json"
    assert composed(f"data.dataset={tmp_path}/desk/texts").data.dataset == "texts"
    assert composed("data.dataset=x/y", "data.tokenizer=x/z").data.dataset == "x/y"  # a name, there is no such folder


def test_containers_round_trip(tiny_config: Config) -> None:
    assert from_container(to_container(tiny_config)) == tiny_config
    assert from_container(yaml.safe_load(yaml.safe_dump(to_container(tiny_config)))) == tiny_config


# -- one line, with the nearest choice ---------------------------------------------------------------------------------

MISTAKES = {
    "encoding=rop": "unknown encoding 'rop': did you mean 'rope'? ('posbench list' shows all)",
    "model=gtp": "unknown model 'gtp': did you mean 'gpt'? (choices: gpt, llama)",
    "encoding=null": "unknown encoding 'null'",
    "data=_base": "unknown data '_base' (choices: builtin, ",
    "encodin=rope": "unknown key 'encodin': did you mean 'encoding'?",
    "training.lr=3": "unknown key 'training.lr' (it is training.learning_rate)",
    "training.learning_rat=3": "did you mean 'training.learning_rate'?",
    "optimizer=adam": "unknown key 'optimizer' (the optimizer is AdamW, set by training.learning_rate, betas, ",
    "model.dropout=0.1": "unknown key 'model.dropout' (the models have no dropout",
    "optimizer.name=adam": "unknown key 'optimizer.name' (the optimizer is AdamW, set by ",
    "model.dim=3": "unknown key 'model.dim' (it is model.d_model)",
    "batch=3": "unknown key 'batch' (it is training.batch_size)",
    "epochs=3": "unknown key 'epochs' (a budget is in tokens: training.tokens; a step has ",
    "tune=true": "unknown key 'tune' (it is for posbench sweep)",
    "wandb=offline": "unknown key 'wandb' (it is tracking: ",
    "tracking=offline": "unknown tracking 'offline' (choices: none, ",
    "encoding=RoPE": "unknown encoding 'RoPE': did you mean 'rope'?",
    "data=WikiText_2": "did you mean 'wikitext-2'?",
    "dta.name=x": "did you mean 'data.name'?",
    "nothing.at_all=1": "unknown key 'nothing.at_all' ('posbench train --cfg' shows all keys)",
    "learning_rate=3": "unknown key 'learning_rate': did you mean 'training.learning_rate'?",
    "+training.tokens=3": "unknown key '+training.tokens': did you mean 'training.tokens'?",
    "++seed=3": "unknown key '++seed': did you mean 'seed'?",
    "~encoding": "cannot read '~encoding': ",
    "foo": "cannot read 'foo': expected key=value",
    "seed=[": "seed is '[': expected a whole number",
    "encoding=rope,alibi": "encoding=rope,alibi gives several values: 'posbench sweep' runs each of them",
    "training.betas=0.9,0.95": "(training.betas=[0.9,0.95] is one list)",
    "evaluation.split=test,validation": "evaluation.split is ['test', 'validation']: expected validation or test",
    "protocl=sliding": "unknown key 'protocl': did you mean 'protocol'?",
    "lenght=128": "unknown key 'lenght': did you mean 'length'?",
    "threds=2": "unknown key 'threds': did you mean 'threads'?",
    "protocol=fixed": "evaluation.protocols is 'fixed': expected fixed_target or nonoverlap",
    "length=0": "length is 0: expected lengths in tokens, such as 32,128",
    "length=abc": "length is abc: expected lengths in tokens",
    "evaluation.batch_tokens=1e-4": "evaluation.batch_tokens is 0.0001: expected a whole number",
    "seed=abc": "seed is 'abc': expected a whole number",
    "seed=1.5": "seed is 1.5: expected a whole number",
    "study=null": "study is null: expected text",
    "study=../x": "study is '../x': expected letters",
    "study=/abs": "study is '/abs'",
    "study=..": "study is '..'",
    "study=''": "study is ''",
    "study='a\nb'": "study is 'a\\nb'",
    f"study={'x' * 300}": "at most 128",
    "data.name=a/b": "data.name is 'a/b'",
    "model.norm=layernrm": "expected layernorm or rmsnorm, did you mean 'layernorm'?",
    "training.schedule=cosin": "expected cosine or constant, did you mean 'cosine'?",
    "evaluation.protocols=[fixed]": "evaluation.protocols is 'fixed': expected fixed_target or nonoverlap",
    "runtime.compile=maybe": "runtime.compile is 'maybe': expected true or false or auto",
    "model.n_layers=0": "model.n_layers is 0: expected at least 1",
    "model.d_model=99": "model.d_model is 99: it does not divide into 4 heads, nearest: 96 or 100",
    "model.attention.window=0": "model.attention.window is 0: expected at least 1",
    "training.train_length=1": "training.train_length is 1: expected at least 2",
    "training.tokens=10": "training.tokens is 10: expected at least 2048",
    "training.learning_rate=0": "training.learning_rate is 0.0: expected a number above 0",
    "training.betas=[0.9,1]": "training.betas is [0.9, 1.0]",
    "training.betas=0.9": "training.betas is 0.9: expected a list",
    "evaluation.ratios=[2,1]": "evaluation.ratios is [2.0, 1.0]: expected ascending numbers",
    "evaluation.ratios=[0,1]": "evaluation.ratios is [0.0, 1.0]: expected ascending numbers above 0",
    "evaluation.targets=65": "evaluation.targets is 65: expected at most training.train_length, 64",
    "runtime.threads=0": "runtime.threads is 0: expected at least 1",
    "encoding.name=alibi": "an encoding is chosen with its options, encoding=alibi",
    "encoding.name=rop": "unknown encoding 'rop': did you mean 'rope'?",
    "encoding.base=-1": "encoding.base is -1 for 'rope'",
    "encoding.bse=2": "'rope' has no option 'bse'",
    "encoding=alibi encoding.base=2": "no option 'base': it accepts slopes; did you mean to choose 'rope'?",
    "data.name=???": "data.name has no value",
    "data.path=a.txt,b.txt": "gives several values: 'posbench sweep' runs each of them (several files as one text ",
    "data=wikitext": "unknown data 'wikitext': did you mean 'wikitext-2'?",
    "data.source=txt": "unknown data 'txt': did you mean 'text'?",
    "data.column=body": "data.column is 'body', which data=builtin does not read: data=text and data=hub",
    "data.path=my.txt data.column=body": "data.column is 'body', which 'my.txt' does not have: files with rows do",
    "data.path=books/*.md.gz data.column=body": "data.column is 'body', which 'books/*.md.gz' does not have",
    "data.articles=true": "data.articles is true, which data=builtin does not read",
    "training.tokens=${training.foo}": "training.foo",
    "hydra/launcher=joblib": "unknown key 'hydra/launcher'",
    "hydra.run.dir=x": "unknown key 'hydra.run.dir'",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_named_in_one_line(override: str) -> None:
    assert MISTAKES[override] in refused(*override.split(" "))


NUMBERS = {
    f"{field.name}.{own.name}": own.type
    for field in dataclasses.fields(Config)
    if dataclasses.is_dataclass(field.type)
    for own in dataclasses.fields(field.type)
    if any(kind in str(own.type) for kind in ("int", "float")) and "dict" not in str(own.type)
} | {"seed": int, "model.attention.window": int, "model.attention.sinks": int}


def test_the_table_of_numbers_is_whole() -> None:
    assert len(NUMBERS) == 36 and {"data.offset", "evaluation.ratios", "training.betas"} <= NUMBERS.keys()


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_bounds_that_its_message_names(tiny_config: Config, key: str) -> None:
    *sections, name = key.split(".")
    for value in (-1, float("nan"), float("inf"), -float("inf")):
        plain: Any = to_container(tiny_config)
        section = plain
        for one in sections:
            section = section[one]
        section[name] = [value] if isinstance(section[name], list) else value
        if key == "training.betas":
            section[name] = [value, 0.9]
        began = time.monotonic()
        with pytest.raises(UserError) as caught:
            from_container(plain)
            pytest.fail(f"{key}={value} is taken")
        assert time.monotonic() - began < 1
        said = str(caught.value)
        assert name in said and "\n" not in said and ("finite number" in said or re.search(r"expected .*\d", said)), (
            said
        )


def test_an_uneven_batch_is_refused_at_once(tiny_config: Config) -> None:
    training = dataclasses.replace(tiny_config.training, batch_size=10**12 - 1, tokens=10**15)
    began = time.monotonic()
    with pytest.raises(UserError, match="does not divide among 2 processes, nearest: 1 or 3"):
        training.refuse_uneven(2)
    assert time.monotonic() - began < 2


# -- each key once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "twice",
    [["seed=1", "seed=2"], ["device=cpu", "runtime.device=cpu"], ["encoding=rope", "encoding=alibi"],
     ["targets=16", "evaluation.targets=8"]],
)  # fmt: skip
def test_a_key_that_is_typed_twice_is_refused(twice: list[str]) -> None:
    key = overrides.full_key(twice[-1].partition("=")[0])
    assert refused(*twice) == f"{key} is given twice: give it once"
    with pytest.raises(UserError, match="is given twice: give it once"):
        compose.combinations([twice])


def test_a_key_that_a_finished_run_is_given_twice_is_refused(plain: Config) -> None:
    with pytest.raises(UserError, match=r"evaluation\.targets is given twice"):
        overrides.apply(plain, ["targets=16", "evaluation.targets=8"])


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text("# @package _global_\nseed: 1\nseed: 2\n")
    assert "line 3" in refused("experiment=own", config_dir=tmp_path)


# -- one vocabulary ----------------------------------------------------------------------------------------------------

SETTINGS = {
    "protocol=sliding": {"protocols": ("sliding",)},
    "evaluation.protocol=sliding,fixed_target": {"protocols": ("sliding", "fixed_target")},
    "protocols=[sliding]": {"protocols": ("sliding",)},
    "length=64,256,128": {"ratios": (1.0, 2.0, 4.0)},
    "lengths=[96]": {"ratios": (1.5,)},
    "evaluation.length=128": {"ratios": (2.0,)},
    "ratio=1,4": {"ratios": (1.0, 4.0)},
    "evaluation.ratios=2": {"ratios": (2.0,)},
    "extension=yarn:factor=4:beta_fast=16,ntk": {"extensions": ("yarn:factor=4:beta_fast=16", "ntk")},
    'extensions=["yarn:factor=4"]': {"extensions": ("yarn:factor=4",)},
    "evaluation.extensions=[]": {"extensions": ()},
    "task=repeat,shuffle": {"tasks": ("repeat", "shuffle")},
    "split=validation": {"split": "validation"},
    "stride=null": {"stride": None},
    "windowed=false": {"windowed": False},
    "targets=1_6": {"targets": 16},
    "batch_tokens=2e4": {"batch_tokens": 20000},
    "precision=fp32": {"precision": "fp32"},
    "evaluation.precision=bf16": {"precision": "bf16"},
}


@pytest.fixture(scope="module")
def plain() -> Config:
    """What no override gives."""
    return composed()


@pytest.mark.sample(6)
@pytest.mark.parametrize("typed", SETTINGS)
def test_evaluation_settings_are_typed_alike_in_every_command(plain: Config, typed: str) -> None:
    ((_, of_sweep),) = compose.combinations([["encoding=rope", typed]])
    for config in (composed(typed), of_sweep):
        assert config.evaluation == dataclasses.replace(plain.evaluation, **SETTINGS[typed])
    of_run = overrides.apply(plain, [typed]).settings
    assert of_run == dataclasses.replace(plain.evaluation, longest=16.0, **SETTINGS[typed])


def test_runtime_settings_need_no_section() -> None:
    runtime = composed("device=cpu", "threads=3", "runtime.cache=a").runtime
    assert (runtime.device, runtime.threads, runtime.cache) == ("cpu", 3, "a")
    assert overrides.apply(composed(), ["device=cuda:1", "runtime.threads=3"])[1:] == ("cuda:1", 3, None)
    assert overrides.apply(composed(), ["processes=2"])[1:] == (None, None, 2)


def test_words_of_the_command_line_hide_no_key() -> None:
    assert not overrides.WORDS.keys() & {*to_container(composed()), *GROUPS}


def test_lengths_in_tokens_follow_the_training_length_of_each_run() -> None:
    found = compose.combinations([["training.train_length=64,128", "length=256"]])
    assert [config.evaluation.ratios for _, config in found] == [(4.0,), (2.0,)]
    assert "length and evaluation.ratios set the same lengths" in refused("length=128", "ratio=2")


@pytest.mark.parametrize(
    "typed",
    ["1", "+3", "-0", "010", "0x10", "1_000", "1__0", "1e-4", "1e5", "5E3", ".5", "1.", "1.5.2", "inf", "-NaN", "null",
     "True", "on", "yes", "12:30", "2024-01-01", "a b", "'a,b'", '"it\\"s"', "[1,a,'b,c']", "[]", "-", "e5",
     "{}", "{a:1,b: [2,{c: d}]}", "[[1,2],[3]]", "${training.tokens}"],
)  # fmt: skip
def test_values_are_read_as_hydra_reads_them(typed: str) -> None:
    hydras = OverridesParser.create().parse_override(f"x={typed}").value()
    assert repr(overrides.value(typed)) == repr(hydras)


def sweep_refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        compose.combinations([list(overrides)])
    return str(caught.value)


def test_each_value_of_a_sweep_is_checked() -> None:
    assert "unknown encoding 'alib'" in sweep_refused("encoding=rope,alib")
    assert "training.clip is 'x'" in sweep_refused("seed=0,1", "training.clip=1,x")
    assert "'alibi' has no option 'base'" in sweep_refused("encoding=rope,alibi", "encoding.base=2")
    assert "matches nothing" in sweep_refused("encoding=glob(zz*)")
    found = [config for _, config in compose.combinations([["encoding=rope,alibi", "seed=range(0,2)"]])]
    assert [(config.encoding.name, config.seed) for config in found] == [
        ("rope", 0),
        ("rope", 1),
        ("alibi", 0),
        ("alibi", 1),
    ]


# -- code in configurations --------------------------------------------------------------------------------------------

PAYLOAD = "{_target_: os.system, command: touch canary, _args_: [touch canary]}"
PAYLOADS = [
    f"training: {PAYLOAD}",
    f"_target_: os.system\n_args_: [touch canary]\nstudy: {PAYLOAD}",
    f"hydra: {{callbacks: {{x: {PAYLOAD}}}, job_logging: {PAYLOAD}, launcher: {PAYLOAD}, sweeper: {PAYLOAD}}}",
    "hydra: {job: {env_set: {CANARY: x}}, run: {dir: canary}, output_subdir: canary}",
    "study: !!python/object/apply:os.system ['touch canary']",
    "study: ${oc.env:HOME}",
    "study: x\nruntime: {cache: '${${study}:HOME}'}",
    "study: ${oc.create:{}}",
    "study: ${hydra:runtime.cwd}",
]


@pytest.mark.parametrize("text", PAYLOADS)
def test_what_a_file_says_is_never_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text(f"# @package _global_\n{text}\n")
    (tmp_path / "config.yaml").write_text(text)
    for read in (lambda: compose.single(["experiment=own"], tmp_path), lambda: load_saved(tmp_path / "config.yaml")):
        try:
            config = read()
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert str(Path.home()) not in str(config)
    assert dict(os.environ) == environment and sorted(os.listdir()) == ["config.yaml", "experiment"]


@pytest.mark.parametrize(
    "resolver", ["${oc.env:HOME}", "${oc.decode:'1'}", "${hydra:runtime.cwd}", "x${ oc.create:{} }"]
)
def test_interpolations_name_keys_only(resolver: str) -> None:
    assert "only other keys may be interpolated" in refused(f'data.path="{resolver}"')


# -- saved configurations, also from strangers -------------------------------------------------------------------------


def saved(tmp_path: Path, config: Config, **changes: Any) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**to_container(config), **changes}))
    return path


def test_a_saved_configuration_is_read_back(tmp_path: Path, tiny_config: Config) -> None:
    path = saved(tmp_path, tiny_config)
    assert load_saved(path) == tiny_config
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    assert load_saved(path) == tiny_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hydra": {"callbacks": {}}}, "unknown key 'hydra'"),
        ({"study": "${oc.env:HOME}"}, "study is '${oc.env:HOME}'"),
        ({"study": "../x"}, "study is '../x'"),
        ({"encoding": {"name": "../../x"}}, "encoding.name is '../../x'"),
        ({"encoding": None}, "missing key 'encoding'"),
        ({"encoding": "rope"}, "encoding is 'rope': expected an encoding"),
        ({"sed": 1}, "unknown key 'sed': did you mean 'seed'?"),
    ],
)
def test_a_hostile_or_wrong_saved_configuration_is_refused(
    tmp_path: Path, tiny_config: Config, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_saved(saved(tmp_path, tiny_config, **changes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1",
        "study: [",
        "study: !!python/object/apply:os.system [true]",
        "study: 2024-01-01",
        "study: 2024-99-99",
        "1: 2",
        "study: !!binary aGVsbG8=",
        "[" * 500,
        "a: 1\n\tb: 2",
        "\x00",
    ],
)
def test_what_is_not_plain_data_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_saved(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nix\.yaml"):
        load_saved(tmp_path / "nix.yaml")


def test_fields_of_the_dataclasses_and_keys_of_the_yaml_are_the_same() -> None:
    for group, name in {"model": "gpt", "training": "lm", "evaluation": "extrapolation", "tracking": "wandb"}.items():
        cls = getattr(schema, f"{group.capitalize()}Config")
        content = yaml.safe_load((configs_dir() / group / f"{name}.yaml").read_text(encoding="utf-8"))
        assert list(content) == [field.name for field in dataclasses.fields(cls)]
