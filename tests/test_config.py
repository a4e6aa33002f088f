"""Configurations: typed values, which run one is, what older runs wrote, and that
nothing in a file is executed.
"""

import ast
import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from posbench.config import compose, identity, overrides, schema
from posbench.config.overrides import apply
from posbench.config.schema import (
    Config,
    DataConfig,
    load_saved,
    to_container,
    validate,
)
from posbench.config.shipped import choice_file, configs_dir
from posbench.errors import UserError

NO_GROUPS = ("tuned", "sweep", "claim")
GROUPS = sorted(
    path.name
    for path in configs_dir().iterdir()
    if path.is_dir() and path.name not in NO_GROUPS
)


def refused(*words: str, config_dir: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        compose.single(list(words), config_dir)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def composed(*words: str) -> Config:
    return compose.single(list(words))


def test_a_file_with_the_name_of_ours_is_refused_since_hydra_would_read_ours(tmp_path):
    for group, name in (("encoding", "rope"), ("sweep", "six")):
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_text("name: rope\nbase: 555\n")
        with pytest.raises(
            UserError, match=f"{group}/{name}.yaml: posbench has a file of this name"
        ):
            choice_file(group, name, [tmp_path])
    assert "has a file of this name" in refused("encoding=rope", config_dir=tmp_path)


def test_what_is_typed_wins_over_the_experiment_and_the_model_over_its_block():
    assert (
        overrides.start_of(["start=RUN", "start=null"])
        == ""
        != overrides.start_of(["start=null", "start=RUN"])
    )
    assert composed() == composed("experiment=demo", "encoding=rope")
    config = composed(
        "experiment=small", "model=llama", "data=wikitext-2", "training.train_length=96"
    )
    assert config.study == "small"
    assert config.model.norm == "rmsnorm"
    assert config.model.mlp == "swiglu"
    assert config.model.d_model == composed("experiment=small").model.d_model
    assert config.data.name == "wikitext-2"
    assert config.training.train_length == 96
    distances = {}
    for words in ("", "experiment=small", "encoding.max_distance=40"):
        distances[words] = composed("encoding=t5", *words.split()).encoding.options[
            "max_distance"
        ]
    # tuned for the demo
    assert distances == {
        "": 64,
        "experiment=small": 128,
        "encoding.max_distance=40": 40,
    }


def test_an_experiment_sets_values_beside_a_choice_in_its_own_name_only(tmp_path):
    texts = {
        "experiment": "# @package _global_\ndefaults: [tasks]\n",
        "tuned": "data=task/copy:\n  training: {tokens: 9e4}\n",
    }
    for group, text in texts.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(text)
    for name, data, tokens in (
        ("mine", "copy", 90_000),
        ("mine", "sort", 1_000_000),
        ("tasks", "copy", 5_376_000),
    ):
        assert (
            compose.single(
                [f"experiment={name}", f"data=task/{data}"], tmp_path
            ).training.tokens
            == tokens
        )


# Words | key | its value; "refused" is one line, and a list is what a sweep makes of
# it.
TYPED = r"""
seed=012 | seed | 12
seed=1_000 | seed | 1000
seed=1e3 | seed | 1000
seed=12:30 | seed | refused
seed=true | seed | refused
seed=null | seed | refused
training.learning_rate=1e-4 | training.learning_rate | 0.0001
training.learning_rate=inf | training.learning_rate | refused
training.tokens=2e6 | training.tokens | 2000000
training.tokens=2M | training.tokens | refused
training.tokens=${evaluation.blocks}000000 | training.tokens | 128000000
model=qwen3 | model.norm | 'rmsnorm'
model.d_ff=null | model.d_ff | None
model.d_ff=${model.d_model} | model.d_ff | 128
model.tie_embeddings=off | model.tie_embeddings | False
compile=true | runtime.compile | True
study=1e3 | study | '1e3'
study=2024-01-01 | study | '2024-01-01'
study='a,b' | study | refused
tracking.project=a b | tracking.project | 'a b'
tracking.tags=[1e3,012] | tracking.tags | ('1e3', '012')
tracking.entity=null | tracking.entity | None
data.path=notes (1).txt | data.path | 'notes (1).txt'
data.path=[draft] one=two.txt | data.path | '[draft] one=two.txt'
data.path=~/text#1 | data.path | 'HOME/text#1'
data.path='a,b.txt' | data.path | 'a,b.txt'
data.path=*.txt | data.path | '*.txt'
data.path=it's.txt | data.path | "it's.txt"
protocol=nonoverlap,fixed_target | evaluation.protocols | ('nonoverlap', 'fixed_target')
ratio=4,1,2 | evaluation.ratios | (4, 1, 2)
length=64,128 | evaluation.ratios | (1, 2)
extension=yarn:factor=4,ntk | evaluation.extensions | ('yarn:factor=4', 'ntk')
encoding.base=1e5 | encoding.options | {'base': 100000.0, 'layout': 'interleaved', 'frequencies': 'geometric'}
encoding={name: rope, base: 5, layout: half} | encoding.options | refused
data=hub data.dataset=x/y data.splits={train:t} | data.splits | {'train': 't'}
data=hub data.dataset=x/y data.splits.train=t | data.splits | {'train': 't'}
data=hub data.dataset=x/y data.revision=1234567 | data.revision | '1234567'
seed=0,1,2 | seed | [0, 1, 2]
seed=range(0,5) | seed | [0, 1, 2, 3, 4]
encoding=rope,alibi | encoding.name | ['rope', 'alibi']
encoding=glob(t*) | encoding.name | ['t5', 'temperature', 'transformer_xl', 'tupe']
training.schedule=wsd | training.schedule | 'constant'
training.lengths=[[0,32,32],[0.5,32],[0.75,64]] | training.lengths | ((0, 32, 32), (0.5, 32), (0.75, 64))
training.lengths=[[0,48],[0.5,64]] | training.lengths | refused
training.lengths=[[0,64],[0.5,32]] | training.lengths | refused
training.lengths=[[0.1,32],[0.5,64]] | training.lengths | refused
training.lengths=[[0,32,33],[0.5,64]] | training.lengths | refused
training.lengths=[[0,32],[0.5,64,8]] | training.lengths | refused
experiment=tasks data=task/copy training.lengths=[[0,1]] training.train_length=1024 | training.lengths | refused
training.lengths=[[0,32],[0.5,64]],[] | training.lengths | [((0, 32), (0.5, 64)), ()]
training.betas=[0.9,0.95],[0.9,0.99] | training.betas | [(0.9, 0.95), (0.9, 0.99)]
data.path='a,b.txt',c.txt | data.path | ['a,b.txt', 'c.txt']
device=cuda:1 | runtime.device | 'cuda:1'
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("line", [line for line in TYPED.splitlines() if line])
def test_a_typed_value_is_what_it_says(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    typed, key, expected = line.split(" | ")
    words = (
        [typed] if typed.startswith("data.path") else re.split(r" (?=[a-z.]+=)", typed)
    )
    if expected == "refused":
        refused(*words)
        return
    wanted = ast.literal_eval(expected.replace("HOME", str(tmp_path.parent)))
    configs = [config for _, config in compose.configs(words)]
    values = [functools.reduce(getattr, key.split("."), config) for config in configs]
    assert values == (wanted if isinstance(wanted, list) else [wanted])
    assert all(type(value) is not bool or isinstance(wanted, bool) for value in values)
    if len(configs) > 1:  # the command that a sweep records is the run
        assert [composed(*again) for again, _ in compose.configs(words)] == configs


def test_a_later_value_holds_and_lengths_follow_the_training_length():
    assert composed("seed=1", "device=cpu", "seed=2").seed == 2
    assert composed("length=128", "ratio=1,4").evaluation.ratios == (1, 4)
    assert composed("ratio=1,4", "length=128").evaluation.ratios == (2,)
    pairs = compose.configs(["training.train_length=64,128", "length=256,64"])
    assert [config.evaluation.ratios for _, config in pairs] == [(1, 4), (0.5, 2)]
    config = composed("ratio=16,1")
    asked = apply(
        config, ["length=128", "extension=ntk", "device=cuda:1", "runtime.threads=3"]
    )
    assert asked.evaluation.ratios == (2,)
    assert asked.evaluation.longest == 16
    assert asked.evaluation.extensions == ("ntk",)
    assert asked.runtime.device == "cuda:1"
    assert asked.runtime.threads == 3
    assert not overrides.WORDS.keys() & {*to_container(config), *GROUPS}


def test_one_file_is_one_run_however_its_path_is_spelt(tmp_path, monkeypatch):
    (tmp_path / "desk/texts").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("PWD", str(tmp_path / "linked"))  # as a shell has it
    monkeypatch.setenv("HOME", str(tmp_path / "desk"))
    spellings = [
        "texts/a.txt",
        "./texts//a.txt",
        f"{tmp_path}/desk/texts/a.txt",
        f"{tmp_path}/linked/texts/a.txt",
    ]
    assert {
        composed(f"data.path={path}").data.path
        for path in [*spellings, "~/texts/a.txt"]
    } == {"texts/a.txt"}
    assert {
        composed(f"data.path={path}").data.path for path in ("../a", f"{tmp_path}/a")
    } == {f"{tmp_path}/a"}
    config = composed(
        "data.dataset='a/Tiny Stories'",
        "data.tokenizer=~/texts",
        "runtime.outputs=~/runs",
    )
    assert config.data.dataset == "a/Tiny Stories"
    assert config.data.tokenizer == "texts"
    assert config.data.name == "Tiny-Stories"
    assert config.runtime.outputs == f"{tmp_path}/desk/runs"


def test_text_of_ones_own_needs_no_word_more_and_a_choice_that_reads_the_key_stays(
    tmp_path,
):
    asked = ["experiment=gpt124m", "data.path=a.txt"]
    assert composed(*asked) == composed(*asked, "data=text")
    assert composed("data.dataset=x/y") == composed("data=hub", "data.dataset=x/y")
    assert composed("data.path=null") == composed()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(
        "defaults: [_base]\nname: mine\nsource: text\ncolumn: body\n"
    )
    (tmp_path / "experiment/own.yaml").write_text(
        "# @package _global_\ndefaults: [demo, {override /data: mine}]\n"
    )
    data = compose.single(["experiment=own", "data.path=a.jsonl"], tmp_path).data
    assert data.name == "mine"
    assert data.column == "body"


NUMBERS = [
    key
    for key, hint in schema.keys().items()
    if schema.kind(hint).startswith(("int", "float"))
]


@pytest.mark.parametrize(
    "key", [key for key in NUMBERS if not key.startswith("start.")]
)
def test_every_number_has_bounds_that_its_message_names(tiny_config, key):
    *sections, name = key.split(".")
    for value in (-1, True, float("nan"), float("inf"), -float("inf")):
        plain: Any = to_container(tiny_config)
        section = plain
        for part in sections:
            section = section[part]
        section[name] = (
            [value, 0.9][: 2 if name == "betas" else 1]
            if isinstance(section[name], list)
            else value
        )
        with pytest.raises(UserError) as caught:
            validate(Config, plain)
            pytest.fail(f"{key}={value} is taken")
        assert re.search(rf"{name} .*(\d|number)", str(caught.value))
        assert "\n" not in str(caught.value)


def test_a_run_is_what_shapes_its_weights(tiny_config):
    assert re.fullmatch(r"rope-s0-[0-9a-f]{8}", tiny_config.id)
    assert (
        composed("tracking=none", "evaluation.blocks=9", "study=other", "threads=7").id
        == composed().id
    )
    changes = ["encoding.base=9999", "seed=1", "training.clip=2", "data.vocab_size=999"]
    assert len({composed(change).id for change in changes} | {composed().id}) == 5
    spellings = ["encoding.base=10000", "encoding.base=1e4", "encoding.base=10000.0"]
    assert {composed(spelling, "training.tokens=1e6").id for spelling in spellings} == {
        composed().id
    }


def at_the_former_rate(*words: str) -> Config:
    # of the time of the names below; today it is twice that
    return composed("training.learning_rate=0.003", *words)


TEXT = ["data=text", "data.path=a.txt", "training.learning_rate=0.001"]


class LaterData(DataConfig):
    shuffle: bool = False


class LaterConfig(Config):
    data: LaterData


def test_a_later_key_renames_no_run_and_old_files_load_without_it(monkeypatch):
    before = load_saved(Path(__file__).parent / "data" / "rope-s0-1775196f.yaml")
    # A literal, never computed: whoever changes it takes every run of every user its
    # name.
    assert before.id == at_the_former_rate("encoding=rope").id == "rope-s0-21bc4a21"
    of_before = to_container(composed(*TEXT, "data.test_pieces=null"))
    asked = composed(*TEXT)
    del of_before["data"]["test_pieces"]
    # which splits the text otherwise
    assert validate(Config, of_before).id == "rope-s0-5165727c" != asked.id
    monkeypatch.setitem(identity.LATER["data"], "shuffle", False)
    monkeypatch.setitem(identity.LATER_OPTIONS, "rope", {"partial": None})
    later = validate(LaterConfig, to_container(before))
    assert not later.data.shuffle
    assert later.encoding.options["partial"] is None
    assert later.id == before.id
    assert validate(LaterConfig, to_container(later)) == later
    assert (
        dataclasses.replace(
            later, data=dataclasses.replace(later.data, shuffle=True)
        ).id
        != before.id
    )


# An encoding, its options | those whose default changed, at the former one | its name
# from before, a literal.
MOVED = """
abacus | others=random | abacus-s0-ad0f8de4
temperature inner=abacus | inner_options.others=random | temperature-s0-97d16476
path | silu=false start=torch | path-s0-92e0d9a7
path_fox | silu=false start=torch | path_fox-s0-51fb9274
canon inner=path | inner_options.silu=false inner_options.start=torch | canon-s0-127c528d
dape | per_layer=false | dape-s0-a4c0961b
dape_v2 | per_layer=false | dape_v2-s0-521b47e8
temperature inner=dape_v2 | inner_options.per_layer=false | temperature-s0-441b26e7
selective_rope | rank=16 start=torch | selective_rope-s0-e1063963
temperature inner=selective_rope | inner_options.rank=16 inner_options.start=torch | temperature-s0-70a6b781
fire | threshold=null | fire-s0-14a2df1a
dape inner=fire | per_layer=false inner_options.threshold=null | dape-s0-5e3f2aee
t5 | rate=1 | t5-s0-e27fce76
temperature inner=t5 | inner_options.rate=1 | temperature-s0-ef7b668e
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize("line", [line for line in MOVED.splitlines() if line])
def test_a_run_from_before_a_default_changed_keeps_its_name_and_is_no_run_of_today(
    line,
):
    chosen, former, name = (part.split() for part in line.split(" | "))
    words = [f"encoding={chosen[0]}", *(f"encoding.{option}" for option in chosen[1:])]
    before = at_the_former_rate(*words, *(f"encoding.{option}" for option in former))
    assert [before.id] == name != [at_the_former_rate(*words).id]
    saved = to_container(before)
    for option in former:  # files of before lack what was not given
        saved["encoding"].get("inner_options", {}).pop(
            option.partition("=")[0].rpartition(".")[2], None
        )
    assert validate(Config, saved) == before
    # a Parquet study keeps the settings of its runs flat
    settings = schema.nested(schema.flat(saved))
    assert (
        identity.add_later_keys(settings)["encoding"]
        == to_container(before)["encoding"]
    )


def test_inner_encodings_at_any_depth_keep_their_former_defaults_and_their_runs():
    nested = "encoding.inner_options={layers:[{name:fire},{name:dape,inner:fire,inner_options:{}}]}"
    now = at_the_former_rate("encoding=temperature", "encoding.inner=layered", nested)
    first, second = now.encoding.options["inner_options"]["layers"]
    assert first["threshold"] == second["inner_options"]["threshold"] == "quarter"
    saved = to_container(now)
    layers = [{"name": "fire"}, {"name": "dape", "inner": "fire", "inner_options": {}}]
    saved["encoding"]["inner_options"] = {"layers": layers}
    before = validate(Config, saved)
    first, second = before.encoding.options["inner_options"]["layers"]
    assert first["threshold"] is None
    assert second["inner_options"]["threshold"] is None
    assert before.id == "temperature-s0-32c64441"
    # an option that changes nothing
    assert at_the_former_rate("encoding=liere").id == "liere-s0-ac9984cf"
    assert (
        at_the_former_rate("encoding=liere", "encoding.block=8").id
        != "liere-s0-ac9984cf"
    )


PAYLOAD = "{_target_: os.system, command: touch canary, _args_: [touch canary]}"
PAYLOADS = [
    f"training: {PAYLOAD}",
    (
        f"hydra: {{callbacks: {{x: {PAYLOAD}}}, job_logging: {PAYLOAD}, launcher:"
        f" {PAYLOAD}, sweeper: {PAYLOAD}}}"
    ),
    "hydra: {job: {env_set: {CANARY: x}}, run: {dir: canary}, output_subdir: canary}",
    "study: !!python/object/apply:os.system ['touch canary']",
    "study: ${oc.env:HOME}",
    "study: x\nruntime: {cache: '${${study}:HOME}'}",
    "study: 'x${ oc.create:{} }'",
]


@pytest.mark.parametrize("text", PAYLOADS)
def test_what_a_file_says_is_never_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text(f"# @package _global_\n{text}\n")
    (tmp_path / "config.yaml").write_text(text)
    errors = []
    for read in (
        lambda: compose.single(["experiment=own"], tmp_path),
        lambda: load_saved(tmp_path / "config.yaml"),
    ):
        try:
            config = read()
        except UserError as error:
            errors.append(str(error))
        else:
            assert str(Path.home()) not in str(config)
    assert not any("\n" in error for error in errors)
    assert "${" not in text or "only other keys may be interpolated" in errors[0]
    assert dict(os.environ) == environment
    assert sorted(os.listdir()) == [
        "config.yaml",
        "experiment",
    ]


# What a saved file holds in place of a whole one, or what is changed in it | what the
# line says.
SAVED: list[tuple[str | dict[str, Any], str]] = [
    ({"study": "${oc.env:HOME}"}, "study is '${oc.env:HOME}': expected letters"),
    ({"encoding": {"name": "../../x"}}, "encoding.name is '../../x': expected letters"),
    ({"encoding": None}, "encoding is null: expected a dictionary"),
    ({"sed": 1}, "unknown key 'sed': did you mean 'seed'?"),
    ("- 1", "expected keys with values"),
    ("a: 1\n\tb: 2", "line 2"),
    (
        "study: !!python/object/apply:os.system [true]",
        "could not determine a constructor",
    ),
    ("[" * 500, "config.yaml"),
]


@pytest.mark.parametrize(("content", "message"), SAVED)
def test_a_saved_file_that_is_no_configuration_is_one_line(
    tmp_path, tiny_config, content, message
):
    path = tmp_path / "config.yaml"
    path.write_text(
        content
        if isinstance(content, str)
        else yaml.safe_dump({**to_container(tiny_config), **content})
    )
    with pytest.raises(UserError) as caught:
        load_saved(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
