"""Configurations: typed values, which run one is, what older runs wrote, and that
nothing in a file is executed.
"""

import math
import operator
import os
import re
from pathlib import Path

import pytest
import yaml
from support import each_once

from posbench import api
from posbench.config import overrides, schema
from posbench.config.overrides import apply
from posbench.config.schema import Config, load_saved, to_container, validate
from posbench.config.shipped import choice_file, configs_dir
from posbench.errors import UserError
from posbench.launch import compose

NO_GROUPS = {"tuned", "sweep", "claim"}
FOLDERS = {path.name for path in configs_dir().iterdir() if path.is_dir()}
GROUPS = FOLDERS - NO_GROUPS


def refused(*words: str, config_dir: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        compose.single(list(words), config_dir)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def composed(*words: str) -> Config:
    return compose.single(list(words))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("group", "name"), [("encoding", "rope"), ("sweep", "six")])
def test_a_file_with_the_name_of_ours_is_refused(tmp_path, group, name):
    """Hydra would read ours."""
    write(tmp_path / group / f"{name}.yaml", "name: rope\nbase: 555\n")
    message = f"{group}/{name}.yaml: posbench has a file of this name"
    with pytest.raises(UserError, match=message):
        choice_file(group, name, [tmp_path])


def test_a_choice_with_the_name_of_ours_is_refused(tmp_path):
    write(tmp_path / "encoding" / "rope.yaml", "name: rope\nbase: 555\n")
    message = refused("encoding=rope", config_dir=tmp_path)
    assert "has a file of this name" in message


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
    heads = {"data": "defaults: [hub]", "experiment": "# @package _global_"}
    text = f"{heads[section]}\n{line}\n"
    write(tmp_path / section / "mine.yaml", text)

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
    text = "# @package _global_\nstudy: '2024_05_01'\nseed: 10\n"
    write(tmp_path / "experiment" / "mine.yaml", text)

    config = compose.single(["experiment=mine"], tmp_path)

    assert config.study == "2024_05_01"
    assert config.seed == 10


def test_an_extension_beside_a_start_is_the_encoding():
    by_key = overrides.by_key(["start=null", "extension=yarn", "start=RUN"])
    assert by_key["encoding"] == "yarn"


def test_an_extension_is_evaluated_where_the_later_word_takes_the_start_away():
    by_key = overrides.by_key(["start=RUN", "extension=yarn", "start=null"])
    assert by_key["evaluation.extensions"] == "yarn"


def test_by_default_the_experiment_is_the_demo_with_rope():
    assert composed() == composed("experiment=demo", "encoding=rope")


def test_a_model_keeps_the_size_that_the_experiment_sets():
    small = composed("experiment=small")
    llama = composed("experiment=small", "model=llama")
    assert llama.model.d_model == small.model.d_model


@pytest.mark.parametrize(
    ("experiment", "data", "tokens"),
    [
        ("mine", "copy", 90_000),
        ("mine", "sort", 1_000_000),
        ("tasks", "copy", 5_376_000),
    ],
)
def test_an_experiment_sets_values_beside_a_choice_in_its_own_name_only(
    tmp_path, experiment, data, tokens
):
    mine = "# @package _global_\ndefaults: [tasks]\n"
    tuned = "data=task/copy:\n  training: {tokens: 9e4}\n"
    write(tmp_path / "experiment" / "mine.yaml", mine)
    write(tmp_path / "tuned" / "mine.yaml", tuned)

    words = [f"experiment={experiment}", f"data=task/{data}"]
    config = compose.single(words, tmp_path)

    assert config.training.tokens == tokens


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ([], 0.01),
        (["encoding=none"], 0.01),
        (["training.optimizer=adamw"], 0.02),
        (["training.optimizer=null"], 0.02),
        (["experiment=lm"], 0.02),
        (["training.optimizer=adamw", "encoding=none"], 0.03),
        (["training.optimizer=adamw", "training.learning_rate=0.04"], 0.04),
    ],
)
def test_an_experiment_sets_values_beside_several_choices(tmp_path, words, rate):
    mine = "# @package _global_\ndefaults: [demo]\ntraining:\n  learning_rate: 0.01\n"
    adamw = "training.optimizer=adamw:\n  training: {learning_rate: 0.02}\n"
    none = (
        "encoding=none training.optimizer=adamw:\n  training: {learning_rate: 0.03}\n"
    )
    write(tmp_path / "experiment" / "mine.yaml", mine + "  optimizer: muon\n")
    write(tmp_path / "tuned" / "mine.yaml", adamw + none)
    write(tmp_path / "experiment" / "lm.yaml", "# @package _global_\n")
    write(tmp_path / "tuned" / "lm.yaml", adamw)

    config = compose.single(each_once(["experiment=mine", *words]), tmp_path)

    assert config.training.learning_rate == rate


# Words, a key, and its value.
TYPED = [
    (["seed=012"], "seed", 12),
    (["seed=1_000"], "seed", 1000),
    (["seed=1e3"], "seed", 1000),
    (["training.learning_rate=1e-4"], "training.learning_rate", 0.0001),
    (["training.tokens=2e6"], "training.tokens", 2000000),
    (["training.tokens=${evaluation.blocks}000000"], "training.tokens", 128000000),
    (["seed=1", "device=cpu", "seed=2"], "seed", 2),
    (["experiment=small", "model=llama"], "model.mlp", "swiglu"),
    (["experiment=small", "model=llama"], "model.norm", "rmsnorm"),
    (["experiment=small", "model=llama"], "study", "small"),
    (["experiment=small", "training.train_length=96"], "training.train_length", 96),
    (["experiment=small", "data=wikitext-2"], "data.name", "wikitext-2"),
    (
        ["encoding=t5"],
        "encoding.options",
        {"num_buckets": 32, "max_distance": 64, "rate": 10.0},
    ),
    (
        ["encoding=t5", "experiment=small"],
        "encoding.options",
        {"num_buckets": 32, "max_distance": 128, "rate": 10.0},
    ),
    (
        ["encoding=t5", "encoding.max_distance=40"],
        "encoding.options",
        {"num_buckets": 32, "max_distance": 40, "rate": 10.0},
    ),
    (["model=qwen3"], "model.norm", "rmsnorm"),
    (["model.d_ff=null"], "model.d_ff", None),
    (["model.d_ff=${model.d_model}"], "model.d_ff", 128),
    (["model.tie_embeddings=off"], "model.tie_embeddings", False),
    (["compile=true"], "runtime.compile", True),
    (["study=1e3"], "study", "1e3"),
    (["study=2024-01-01"], "study", "2024-01-01"),
    (["tracking.project=a b"], "tracking.project", "a b"),
    (["tracking.tags=[1e3,012]"], "tracking.tags", ("1e3", "012")),
    (["tracking.entity=null"], "tracking.entity", None),
    (["data.path=notes (1).txt"], "data.path", "notes (1).txt"),
    (["data.path=[draft] one=two.txt"], "data.path", "[draft] one=two.txt"),
    (["data.path='a,b.txt'"], "data.path", "a,b.txt"),
    (["data.path=*.txt"], "data.path", "*.txt"),
    (["data.path=it's.txt"], "data.path", "it's.txt"),
    (["data.dataset='a/Tiny Stories'"], "data.name", "Tiny-Stories"),
    (["data.dataset='a/Tiny Stories'"], "study", "Tiny-Stories"),
    (["data=wikitext-2", "experiment=reader"], "study", "wikitext-2"),
    (["data.path=books/novels/"], "study", "novels"),
    (["data.path=books/novels/*/*.txt"], "study", "novels"),
    (["data.path=books/war and peace.jsonl.gz"], "study", "war-and-peace"),
    (["data=text", "study=mine"], "study", "mine"),
    (["data=text", "data.name=prose"], "study", "prose"),
    (["data.dataset='a/Tiny Stories'"], "data.dataset", "a/Tiny Stories"),
    (
        ["protocol=nonoverlap,fixed_target"],
        "evaluation.protocols",
        ("nonoverlap", "fixed_target"),
    ),
    (["ratio=4,1,2"], "evaluation.ratios", (4, 1, 2)),
    (["length=64,128"], "evaluation.ratios", (1, 2)),
    (["length=128", "training.tokens=1.5M"], "training.tokens", 1_500_000),
    (["length=32k"], "evaluation.ratios", (500,)),
    (["data.path='Bücher über Züge'"], "study", "Bücher-über-Züge"),
    (["data.path=रेलगाड़ी.txt"], "study", "रेलगाड़ी"),
    (
        ["extension=yarn:factor=4,ntk"],
        "evaluation.extensions",
        ("yarn:factor=4", "ntk"),
    ),
    (
        ["extension=longrope:long_factor=[1,2]"],
        "evaluation.extensions",
        ("longrope:long_factor=[1,2]",),
    ),
    (
        ["extension=[longrope:long_factor=[1,2],pi]"],
        "evaluation.extensions",
        ("longrope:long_factor=[1,2]", "pi"),
    ),
    (
        ["encoding.base=1e5"],
        "encoding.options",
        {"base": 100000.0, "layout": "interleaved", "frequencies": "geometric"},
    ),
    (
        ["data=hub", "data.dataset=x/y", "data.splits={train:t}"],
        "data.splits",
        {"train": "t"},
    ),
    (
        ["data=hub", "data.dataset=x/y", "data.splits.train=t"],
        "data.splits",
        {"train": "t"},
    ),
    (
        ["data=hub", "data.dataset=x/y", "data.revision=1234567"],
        "data.revision",
        "1234567",
    ),
    (["training.schedule=wsd"], "training.schedule", "constant"),
    (["training.optimizer=adamw"], "training.optimizer", None),
    (["device=cuda:1"], "runtime.device", "cuda:1"),
]
# Words, a key, and its value in each configuration that a sweep makes of them.
SEVERAL = [
    (["data.path=a.txt,b.txt"], "study", ["a", "b"]),
    (
        ["training.train_length=64,128", "length=256,64"],
        "evaluation.ratios",
        [(1, 4), (0.5, 2)],
    ),
    (["seed=0,1,2"], "seed", [0, 1, 2]),
    (["encoding=rope,alibi"], "encoding.name", ["rope", "alibi"]),
    (
        ["training.betas=[0.9,0.95],[0.9,0.99]"],
        "training.betas",
        [(0.9, 0.95), (0.9, 0.99)],
    ),
    (["data.path='a,b.txt',c.txt"], "data.path", ["a,b.txt", "c.txt"]),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("words", "key", "expected"), TYPED)
def test_a_typed_value_is_what_it_says(words, key, expected):
    ((_, config),) = compose.configs(words)

    value = operator.attrgetter(key)(config)
    assert value == expected
    assert isinstance(value, bool) is isinstance(expected, bool)


@pytest.mark.parametrize(("words", "key", "expected"), SEVERAL)
def test_a_list_is_a_configuration_for_each_value(words, key, expected):
    made = compose.configs(words)

    value_of = operator.attrgetter(key)
    assert [value_of(config) for _, config in made] == expected
    # the command that a sweep records is the run
    for command, config in made:
        assert composed(*command) == config


@pytest.mark.parametrize(
    "word",
    [
        "seed=12:30",
        "seed=true",
        "seed=null",
        "training.learning_rate=inf",
        "training.tokens=2Q",
        "study='a,b'",
        "encoding={name: rope, base: 5, layout: half}",
        "seed=range(0,5)",
        "encoding=glob(t*)",
        "data.vocab_size=256",
        "data.vocab_size=1e9",
        "data.revision=main",
        "data.offset=5",
    ],
)
def test_a_value_that_a_key_does_not_have_is_refused_in_one_line(word):
    refused(word)


@pytest.mark.parametrize(
    ("word", "key", "below_home"),
    [
        ("data.path=~/text#1", "data.path", "text#1"),
        ("runtime.outputs=~/runs", "runtime.outputs", "runs"),
    ],
)
def test_a_tilde_is_the_home(tmp_path, monkeypatch, word, key, below_home):
    home = tmp_path.parent
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))

    config = composed(word)

    value = operator.attrgetter(key)(config)
    assert value == f"{home}/{below_home}"


def test_words_are_applied_to_a_configuration():
    config = composed("ratio=16,1")
    words = ["length=128", "extension=ntk", "device=cuda:1", "runtime.threads=3"]

    asked = apply(config, words)

    assert asked.evaluation.ratios == (2,)
    assert asked.evaluation.extensions == ("ntk",)
    assert asked.runtime.device == "cuda:1"
    assert asked.runtime.threads == 3


def test_a_short_word_stands_alone_or_in_its_own_section():
    for typed in ("ratio=2", "evaluation.ratio=2", "evaluation.ratios=2"):
        assert overrides.split(typed) == ("evaluation.ratios", "2")
    assert overrides.split("runtime.ratio=2") == ("runtime.ratio", "2")


def test_no_short_word_is_a_key_or_a_group():
    taken = GROUPS | to_container(composed()).keys()
    assert not taken & overrides.WORDS.keys()


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """The working folder, which is the home, too, and has a link."""
    folder = tmp_path / "desk"
    (folder / "texts").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(tmp_path / "linked"))  # as a shell has it
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    "spelling",
    [
        "texts/a.txt",
        "./texts//a.txt",
        "TMP/desk/texts/a.txt",
        "TMP/linked/texts/a.txt",
        "~/texts/a.txt",
    ],
)
def test_one_file_is_one_run_however_its_path_is_spelt(desk, tmp_path, spelling):
    spelling = spelling.replace("TMP", str(tmp_path))
    config = composed(f"data.path={spelling}")
    assert config.data.path == "texts/a.txt"


@pytest.mark.parametrize("spelling", ["../a", "TMP/a"])
def test_a_file_elsewhere_has_its_whole_path(desk, tmp_path, spelling):
    spelling = spelling.replace("TMP", str(tmp_path))
    config = composed(f"data.path={spelling}")
    assert config.data.path == f"{tmp_path}/a"


def test_a_tokenizer_at_home_has_the_path_from_here(desk):
    config = composed("data.tokenizer=~/texts")
    assert config.data.tokenizer == "texts"


def test_text_of_ones_own_needs_no_word_more():
    asked = ["experiment=gpt124m", "data.path=a.txt"]
    assert composed(*asked) == composed(*asked, "data=text")


def test_a_dataset_of_the_hub_needs_no_word_more():
    assert composed("data.dataset=x/y") == composed("data=hub", "data.dataset=x/y")


def test_no_path_is_no_text_of_ones_own():
    assert composed("data.path=null") == composed()


def test_a_choice_that_reads_a_path_stays(tmp_path):
    mine = "defaults: [_base]\nname: mine\nsource: text\ncolumn: body\n"
    own = "# @package _global_\ndefaults: [demo, {override /data: mine}]\n"
    write(tmp_path / "data" / "mine.yaml", mine)
    write(tmp_path / "experiment" / "own.yaml", own)

    config = compose.single(["experiment=own", "data.path=a.jsonl"], tmp_path)

    assert config.data.name == "mine"
    assert config.data.column == "body"


def numbers() -> list[str]:
    """Return the keys of numbers, but for those of a start, which few runs have."""
    found = []
    for key, hint in schema.keys().items():
        is_number = schema.value_type(hint).item == "number"
        if is_number and not key.startswith("start."):
            found.append(key)
    return found


@pytest.mark.parametrize("key", numbers())
def test_every_number_has_bounds_that_its_message_names(tiny_config, key):
    *sections, name = key.split(".")
    for value in (-1, True, math.nan, math.inf, -math.inf):
        plain = to_container(tiny_config)
        section = plain
        for part in sections:
            section = section[part]
        if name == "betas":
            section[name] = [value, 0.9]
        elif isinstance(section[name], list):
            section[name] = [value]
        else:
            section[name] = value

        with pytest.raises(UserError) as caught:
            validate(Config, plain)
            pytest.fail(f"{key}={value} is taken")
        message = str(caught.value)
        assert re.search(rf"{name} .*(\d|number)", message)
        assert "\n" not in message


def test_an_id_is_the_encoding_the_seed_and_a_digest(tiny_config):
    assert re.fullmatch(r"rope-s0-[0-9a-f]{8}", tiny_config.id)


def test_what_does_not_shape_the_weights_leaves_the_id():
    config = composed("tracking=none", "evaluation.blocks=9", "study=other")
    of_threads = composed("threads=7")
    assert config.id == composed().id
    assert of_threads.id == composed().id


def test_a_saved_run_may_have_the_former_name_of_its_probes(tmp_path, tiny_config):
    saved = to_container(tiny_config)
    del saved["evaluation"]["probes"]
    saved["evaluation"]["tasks"] = ["passkey"]
    write(tmp_path / "config.yaml", yaml.safe_dump(saved))

    config = load_saved(tmp_path / "config.yaml")

    assert config.evaluation.probes == ("passkey",)
    assert config.id == tiny_config.id


def test_what_shapes_the_weights_changes_the_id():
    changes = ["encoding.base=9999", "seed=1", "training.clip=2", "data.vocab_size=999"]
    ids = {composed(change).id for change in changes}
    assert len(ids) == 4
    assert composed().id not in ids


@pytest.mark.parametrize("spelling", ["10000", "1e4", "10000.0"])
def test_a_number_in_another_spelling_leaves_the_id(spelling):
    config = composed(f"encoding.base={spelling}", "training.tokens=2e6")
    assert config.id == composed().id


PAYLOAD = "{_target_: os.system, command: touch canary, _args_: [touch canary]}"
PAYLOADS = [
    f"training: {PAYLOAD}",
    f"hydra: {{callbacks: {{x: {PAYLOAD}}}, job_logging: {PAYLOAD}, launcher: {PAYLOAD}, sweeper: {PAYLOAD}}}",
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
    write(tmp_path / "experiment" / "own.yaml", f"# @package _global_\n{text}\n")
    write(tmp_path / "config.yaml", text)

    composing = ""
    try:
        config = compose.single(["experiment=own"], tmp_path)
    except UserError as error:
        composing = str(error)
    else:
        assert str(Path.home()) not in str(config)
    reading = ""
    try:
        config = load_saved(tmp_path / "config.yaml")
    except UserError as error:
        reading = str(error)
    else:
        assert str(Path.home()) not in str(config)

    assert "\n" not in composing
    assert "\n" not in reading
    if "${" in text:
        assert "only other keys may be interpolated" in composing
    assert dict(os.environ) == environment
    assert sorted(os.listdir()) == ["config.yaml", "experiment"]


# What a saved file holds in place of a whole one, or what is changed in it | what the
# line says.
SAVED = [
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
    if isinstance(content, dict):
        changed = to_container(tiny_config) | content
        content = yaml.safe_dump(changed)
    path.write_text(content)

    with pytest.raises(UserError) as caught:
        load_saved(path)

    said = str(caught.value)
    assert str(path) in said
    assert message in said
    assert "\n" not in said


def test_a_comma_of_a_python_call_is_in_the_text_and_a_list_has_several():
    one = api._words((), {"data": {"path": "a,b.txt"}})
    several = api._words((), {"data": {"path": ["a,b.txt", "c"]}}, several=True)

    configs = [config for _, config in compose.configs(several)]
    assert compose.single(one).data.path == "a,b.txt"
    assert [config.data.path for config in configs] == ["a,b.txt", "c"]


def test_lengths_and_ratios_together_are_refused():
    with pytest.raises(UserError, match="length=96 and ratio=5 both say"):
        composed("length=96", "ratio=5")
