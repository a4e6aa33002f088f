"""Configurations: typed values, which run one is, what older runs wrote, and that
nothing in a file is executed.
"""

import ast
import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from posbench.config import compose, overrides, schema
from posbench.config.overrides import apply
from posbench.config.schema import (
    Config,
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


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("data", "revision: 695e0514", "data.revision is Infinity: expected text"),
        ("data", "path: 2024_05_01", "data.path is 20240501: expected text"),
        ("experiment", "study: 2024_05_01", "study is 20240501: expected text"),
        ("experiment", "seed: 010", "line 2: YAML reads 010 as another number"),
        ("experiment", "seed: 12:30", "line 2: YAML reads 12:30 as another number"),
        (
            "experiment",
            "tracking: {tags: [1e3]}",
            "tracking.tags is 1000.0: expected text",
        ),
    ],
)
def test_what_yaml_guesses_in_a_file_never_becomes_a_setting(
    tmp_path, section, line, message
):
    heads = {
        "data": "defaults: [hub]",
        "experiment": "# @package _global_",
    }
    (tmp_path / section).mkdir()
    path = tmp_path / section / "mine.yaml"
    path.write_text(f"{heads[section]}\n{line}\n", encoding="utf-8")

    said = refused(f"{section}=mine", config_dir=tmp_path)

    assert message in said


def test_a_file_of_data_without_the_defaults_is_told_so(tmp_path):
    path = tmp_path / "data" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("name: mine\nsource: text\npath: novels/\n", encoding="utf-8")

    said = refused("data=mine", config_dir=tmp_path)

    expected = "missing key 'data.dataset': begin your file with 'defaults: [_base]'"
    assert expected in said


def test_text_in_quotation_marks_is_text_as_written(tmp_path):
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    lines = ["# @package _global_", "study: '2024_05_01'", "seed: 10", ""]
    path.write_text("\n".join(lines), encoding="utf-8")

    config = compose.single(["experiment=mine"], tmp_path)

    assert config.study == "2024_05_01"
    assert config.seed == 10


def test_what_is_typed_wins_over_the_experiment_and_the_model_over_its_block():
    # beside a start, which the later word decides, an extension is the encoding
    begun = overrides.by_key(["start=null", "extension=yarn", "start=RUN"])
    from_zero = overrides.by_key(["start=RUN", "extension=yarn", "start=null"])
    assert begun["encoding"] == "yarn"
    assert from_zero["evaluation.extensions"] == "yarn"
    assert composed() == composed("experiment=demo", "encoding=rope")
    small = composed("experiment=small")
    assert (
        composed("experiment=small", "model=llama").model.d_model == small.model.d_model
    )


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
seed=1 device=cpu seed=2 | seed | 2
experiment=small model=llama | model.mlp | 'swiglu'
experiment=small model=llama | study | 'small'
experiment=small training.train_length=96 | training.train_length | 96
experiment=small data=wikitext-2 | data.name | 'wikitext-2'
encoding=t5 | encoding.options | {'num_buckets': 32, 'max_distance': 64, 'rate': 10.0}
encoding=t5 experiment=small | encoding.options | {'num_buckets': 32, 'max_distance': 128, 'rate': 10.0}
encoding=t5 encoding.max_distance=40 | encoding.options | {'num_buckets': 32, 'max_distance': 40, 'rate': 10.0}
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
data.dataset='a/Tiny Stories' | data.name | 'Tiny-Stories'
data.dataset='a/Tiny Stories' | study | 'Tiny-Stories'
data=wikitext-2 experiment=reader | study | 'wikitext-2'
data.path=books/novels/ | study | 'novels'
data.path=books/novels/*/*.txt | study | 'novels'
data.path=books/war and peace.jsonl.gz | study | 'war-and-peace'
data=text study=mine | study | 'mine'
data=text data.name=prose | study | 'prose'
data.path=a.txt,b.txt | study | ['a', 'b']
data.dataset='a/Tiny Stories' | data.dataset | 'a/Tiny Stories'
runtime.outputs=~/runs | runtime.outputs | 'HOME/runs'
protocol=nonoverlap,fixed_target | evaluation.protocols | ('nonoverlap', 'fixed_target')
ratio=4,1,2 | evaluation.ratios | (4, 1, 2)
length=64,128 | evaluation.ratios | (1, 2)
length=128 ratio=1,4 | evaluation.ratios | (1, 4)
ratio=1,4 length=128 | evaluation.ratios | (2,)
training.train_length=64,128 length=256,64 | evaluation.ratios | [(1, 4), (0.5, 2)]
extension=yarn:factor=4,ntk | evaluation.extensions | ('yarn:factor=4', 'ntk')
extension=longrope:long_factor=[1,2] | evaluation.extensions | ('longrope:long_factor=[1,2]',)
extension=[longrope:long_factor=[1,2],pi] | evaluation.extensions | ('longrope:long_factor=[1,2]', 'pi')
encoding.base=1e5 | encoding.options | {'base': 100000.0, 'layout': 'interleaved', 'frequencies': 'geometric'}
encoding={name: rope, base: 5, layout: half} | encoding.options | refused
data=hub data.dataset=x/y data.splits={train:t} | data.splits | {'train': 't'}
data=hub data.dataset=x/y data.splits.train=t | data.splits | {'train': 't'}
data=hub data.dataset=x/y data.revision=1234567 | data.revision | '1234567'
seed=0,1,2 | seed | [0, 1, 2]
seed=range(0,5) | seed | refused
encoding=rope,alibi | encoding.name | ['rope', 'alibi']
encoding=glob(t*) | encoding.name | refused
training.schedule=wsd | training.schedule | 'constant'
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
        [typed] if typed.startswith("data.path") else re.split(r" (?=[a-z_.]+=)", typed)
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


def test_words_are_applied_to_a_configuration_and_none_is_a_key():
    config = composed("ratio=16,1")
    asked = apply(
        config, ["length=128", "extension=ntk", "device=cuda:1", "runtime.threads=3"]
    )
    assert asked.evaluation.ratios == (2,)
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
    assert composed("data.tokenizer=~/texts").data.tokenizer == "texts"


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
    if schema.value_type(hint).startswith(("int", "float"))
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
