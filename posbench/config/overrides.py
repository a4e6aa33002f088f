"""What is typed at the command line: key=value words, read the same way by train,
sweep, evaluate and bench.

A value is read by the type of its key: text stays as it is typed, a comma list is one
value if the key holds a list, and only mappings and options of encodings are YAML.
Settings of evaluation and runtime may leave out their section: `protocol=nonoverlap`,
`device=cpu`. `length=128,256` is in tokens, `ratio=2,4` in training lengths.
"""

import contextlib
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from posbench import registry
from posbench.config import schema
from posbench.config.schema import Config, EvaluationConfig, ValueType
from posbench.config.shipped import EVERY, GROUPS, choices
from posbench.errors import UserError, nearest
from posbench.options import refuse_unknown
from posbench.typed import rewritten

# the first is no key: it sets the second
LENGTH, RATIOS = "evaluation.length", "evaluation.ratios"
KEYS = schema.keys()
# words for `posbench sweep` itself, not for its runs
OF_A_SWEEP = ("sweep", "tune", "tune_grid")
# Short words that may be typed, and the keys they stand for: those of evaluation and
# runtime without the section. `precision` is none: training has one, too.
WORDS: dict[str, str] = {}
# The words of `posbench evaluate`. `at_tokens` is not among them: it asks for
# evaluations during training.
OF_A_FINISHED_RUN: dict[str, str] = {}
for _key in KEYS:
    _section, _, _word = _key.partition(".")
    if _section in ("evaluation", "runtime") and _word != "precision":
        WORDS[_word] = _key
        if _section == "evaluation" and _word != "at_tokens":
            OF_A_FINISHED_RUN[_word] = _key
_OTHER_SPELLINGS = {
    "protocol": "evaluation.protocols",
    "ratio": RATIOS,
    "extension": "evaluation.extensions",
    "probe": "evaluation.probes",
    "length": LENGTH,
}
WORDS |= _OTHER_SPELLINGS
OF_A_FINISHED_RUN |= _OTHER_SPELLINGS
OF_A_FINISHED_RUN |= {
    "data.path": "data.path",
    "precision": "evaluation.precision",
    "device": "runtime.device",
    "threads": "runtime.threads",
    "processes": "runtime.processes",
}
# What two different words may say.
_SAID = {
    RATIOS: "which lengths to evaluate, in tokens or in training lengths",
    "encoding": "the encoding of the run that begins",
}
_THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
# What a setting is in posbench, and the names that other trainers give it.
ALIASES = {
    "training.tokens: a step has training.batch_size x training.train_length of them": (
        "steps max_steps num_steps "
        "train_steps iterations iters max_iters epochs num_epochs budget"
    ),
    "training.train_length": (
        "context context_length ctx n_ctx block_size seq_len seq_length sequence_length"
        " max_length max_len max_seq_len max_seq_length max_position_embeddings"
        " n_positions"
    ),
    "training.learning_rate": "lr",
    "training.batch_size": "batch bs",
    "model.n_layers": "layers n_layer num_layers depth",
    "model.n_heads": "heads n_head num_heads",
    "model.d_model": "dim width n_embd hidden_size embed_dim",
    "encoding.base": "theta rope_theta",
    "training.optimizer: adamw or muon, with learning_rate and weight_decay": (
        "optimizer optim adam adamw muon"
    ),
    "tracking: tracking=none, tracking.mode=offline, tracking.project": (
        "wandb logger logging tensorboard"
    ),
    "not in these models, which see each text about once": "dropout",
    "encoding": (
        "pe pos positional_encoding position_encoding position_embedding pos_emb"
    ),
    "study, the folder that runs share": "run_name experiment_name",
    "runtime.outputs, the folder of the studies": "output_dir out_dir",
    "for posbench sweep": "sweep tune tune_grid",
    "posbench sweep: --n-jobs=N runs at a time, --slurm=OPTIONS on a cluster": (
        "hydra hydra/launcher hydra/sweeper"
    ),
    "chosen with its options: encoding=alibi, data=text": (
        "encoding.name data.source data.task data.task.name"
    ),
    "data=task/copy to train on a task, probe=passkey to evaluate with a probe": (
        "task tasks"
    ),
    "a list: posbench sweep seed=0,1,2,3,4": ("seeds n_seeds num_seeds"),
}


def shell_words(text: str, place: str) -> list[str]:
    """Return the words of a text as a shell splits them; UserError for a quotation mark
    without its second. `place` is where the text stands.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{place}: cannot read {text}: {error}") from None


def split(word: str, short: Mapping[str, str] = WORDS) -> tuple[str, str]:
    """Return a key=value word's full key (it may be typed short) and its value as
    typed. UserError for other words.
    """
    key, equals, text = word.partition("=")
    if key.startswith("+"):
        plain = word.lstrip("+")
        raise UserError(f"cannot read '{word}': a key needs no '+', type {plain}")
    if not key or not equals:
        expected = "expected key=value, such as encoding=alibi or seed=1"
        for group in (*GROUPS, "sweep"):
            if word in choices(group, (), EVERY):
                expected = f"did you mean '{group}={word}'?"
                break
        raise UserError(f"cannot read '{word}': {expected}")
    section, _, name = key.rpartition(".")
    full = short.get(name, key)
    if section in ("", full.partition(".")[0]):
        key = full
    return key, rewritten(word, text)


def by_key(words: Collection[str], short: Mapping[str, str] = WORDS) -> dict[str, str]:
    """Return typed values by full key. If a key is given twice, the later value
    holds. UserError for two keys that set the same.
    """
    is_begun = begins(words)
    texts: dict[str, str] = {}
    typed: dict[str, tuple[str, str]] = {}  # by setting: the key and its word
    for word in words:
        key, text = split(word, short)
        setting = setting_of(word, is_begun, short)
        first_key, first = typed.setdefault(setting, (key, word))
        if first_key != key:
            raise UserError(f"{first} and {word} both say {_SAID[setting]}: give one")
        if setting == "encoding":
            key = setting
        texts[key] = text
    return texts


def begins(words: Collection[str]) -> bool:
    """Return whether a run with these words begins from another, `start=RUN`."""
    starts = [word for word in words if word.startswith("start=")]
    return bool(starts) and starts[-1] != "start=null"


def setting_of(word: str, is_begun: bool, short: Mapping[str, str] = WORDS) -> str:
    """Return the full key that a word sets. `length=` sets the ratios; a run that
    begins from another has the extension as its encoding.
    """
    if is_begun and word.startswith("extension="):
        return "encoding"
    key, _ = split(word, short)
    return RATIOS if key == LENGTH else key


def unknown_key(
    key: str, keys: Collection[str], words: Collection[str] = ()
) -> UserError:
    """Return the error about a key that is in neither `keys` nor `words`, which are
    short for some keys.
    """
    name = key.rpartition(".")[2]
    spellings = {key, name, key.partition(".")[0]}
    for hint, names in ALIASES.items():
        if spellings & set(names.split()):
            return UserError(f"unknown key '{key}' (it is {hint})")

    key_of_name: dict[str, str] = {}
    for choice in keys:
        key_of_name.setdefault(choice.rpartition(".")[2], choice)
    for word in words:
        key_of_name[word] = word
    # Below this likeness a suggestion misleads more often than it helps.
    close = nearest(key, [*key_of_name, *keys], 0.75)
    if not close:
        close = nearest(name, key_of_name, 0.75)
    if not close:
        return UserError(f"unknown key '{key}' ('posbench train --cfg' shows all keys)")
    return UserError(
        f"unknown key '{key}': did you mean '{key_of_name.get(close, close)}'?"
    )


def values(key: str, text: str) -> list[str]:
    """Return the values of one override: several for `a,b`, else the one. UserError for
    a range, `0-4`.
    """
    if key in GROUPS and text.startswith("["):
        text = text.removeprefix("[").removesuffix("]")
    # settings of evaluation make no further runs
    if key.startswith("evaluation."):
        return [text]
    items = _items(text)
    type_ = schema.value_type(KEYS.get(key))
    if type_.item == "number" and re.fullmatch(r"\d+(-|:|\.\.)\d+", text):
        raise schema.refused(key, text, "a number, or in a sweep several: 0,1,2")
    # betas=.9,.95 is one list, betas=[.9,.95],[.9,.99] are two
    if type_.is_list and not all(item.startswith("[") for item in items):
        return [text]
    return items


def value(key: str, text: str) -> Any:
    """Return the value of a full key from its typed text."""
    text = str(text)  # a value is plain data
    if key == LENGTH:
        return _value(ValueType("number", is_list=True), text)
    return _value(schema.value_type(KEYS.get(key)), text)


def _value(type_: ValueType, text: str) -> Any:
    """Return the value of a typed text."""
    if type_ != ValueType("yaml") and re.search(r"\$\{|^[-+\d_]+:", text):
        return text  # also 12:30, which YAML takes for a number to base 60
    if type_.is_list:
        items = text.strip()
        if items.startswith("[") and items.endswith("]"):
            items = items[1:-1]
        item_type = ValueType(type_.item)
        return [_value(item_type, item) for item in _items(items) if item]
    if type_.item == "number":
        short = re.fullmatch(r"(\d+\.?\d*|\.\d+)([kKMB])", text)
        if short:  # 1M, 64k, 1.5B
            number = float(short[1]) * _THOUSANDS[short[2]]
            return int(number) if number.is_integer() else number
    if type_.item != "text" or text == "null":
        return read(text)
    quoted = re.fullmatch(r"(['\"])(.*)\1", text, re.DOTALL)
    if quoted:
        return quoted[2]
    return text


def read(text: str) -> Any:
    """Return the value of a key without a type, such as an option: a number, or YAML;
    `{a:1}` needs no space in it.
    """
    import yaml
    from omegaconf import OmegaConf

    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    try:
        spaced = re.sub(r"([{,]\s*[\w.-]+):(?=\S)", r"\1: ", text)
        return OmegaConf.to_container(OmegaConf.create(f"- {spaced}"))[0]  # type: ignore[index] # it is a list
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise UserError(f"cannot read '{text}': {problem}") from None


def parse_choice(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of `yarn:factor=4:beta=16`: an extension, a
    probe, or a variant of a task.
    """
    name, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise UserError(
                f"cannot read '{text}': expected name:option=value, such as"
                " yarn:factor=4"
            )
        if key in options:
            raise UserError(f"'{text}' gives {key} twice: expected each option once")
        options[key] = read(value)
    return name, options


def _items(text: str) -> list[str]:
    """Split at commas outside quotation marks and brackets."""
    items = list[str]()
    is_complete = True
    for part in text.split(","):
        if is_complete:
            items.append(part)
        else:
            items[-1] += f",{part}"
        unquoted = re.sub(r"^\s*(['\"]).*?\1", "", items[-1])
        opened = len(re.findall(r"[\[{(]", unquoted))
        closed = len(re.findall(r"[)}\]]", unquoted))
        in_quotes = re.match(r"\s*['\"]", unquoted) is not None
        is_complete = opened <= closed and not in_quotes
    return [item.strip() for item in items]


def apply(config: Config, words: list[str]) -> Config:
    """Return a finished run's configuration with the words of `posbench evaluate`
    applied.
    """
    plain, settings = schema.to_container(config), by_key(words, OF_A_FINISHED_RUN)
    plain["runtime"]["processes"] = None  # the training's, perhaps elsewhere
    for key, text in settings.items():
        if key in (*KEYS, *GROUPS) and key not in OF_A_FINISHED_RUN.values():
            raise UserError(
                f"{key} is set when a run begins, and a finished run keeps its own:"
                f" leave out {key}={text}, or train anew with it"
            )
        if key not in OF_A_FINISHED_RUN.values():
            raise unknown_key(key, OF_A_FINISHED_RUN)
        section, _, name = key.partition(".")
        plain[section][name] = value(key, text)
    evaluation = plain["evaluation"]
    if LENGTH in settings:
        evaluation["ratios"] = ratios(evaluation.pop("length"), config)
    changed = schema.validate(Config, plain)
    refuse_variants(changed.evaluation)
    return changed


def refuse_variants(evaluation: EvaluationConfig) -> None:
    """Raise UserError for an option that an extension or a probe does not have. Imports
    neither.
    """
    encodings = registry.folder("encodings")
    of_extensions = [encodings / "rope.py", encodings / "extend.py"]
    for text in evaluation.extensions:
        name, options = parse_choice(text)
        accepted = registry.keywords(name, of_extensions)
        refuse_unknown(options, [*accepted, "layers"], name)
    for text in evaluation.probes:
        name, options = parse_choice(text)
        file = registry.folder(registry.PROBES) / f"{name}.py"
        refuse_unknown(options, registry.keywords("rows", [file]), name)


def ratios(lengths: list[Any], config: Config) -> list[float]:
    """Return lengths in tokens as multiples of the training length, ascending;
    UserError for other values.
    """
    if config.data.task is not None:
        raise UserError(
            f"length counts tokens of text: for '{config.data.name}' give ratio=2,4, in"
            " trained lengths"
        )
    wrong = [length for length in lengths if type(length) is not int or length < 1]
    if wrong or not lengths:
        typed = ",".join(map(str, lengths))
        raise UserError(
            f"length is {typed}: expected lengths in tokens, such as 128,256"
        )
    return [length / config.training.train_length for length in sorted(set(lengths))]
