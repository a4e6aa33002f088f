"""The words of `posbench rope`. They are read before torch and transformers are
imported: a mistake in typing waits for neither.
"""

from collections.abc import Sequence
from pathlib import Path

from posbench import encodings
from posbench.config import shipped
from posbench.config.overrides import LENGTH, value
from posbench.errors import UserError, did_you_mean, unknown
from posbench.options import by_name
from posbench.rope.overrides import joined_words
from posbench.run import RECORD, find


def schemes_of(words: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[int]]:
    """Return one or two names, each with the options or overrides after it, and the
    lengths in tokens of `length=16384`, none without it.
    """
    words = joined_words(words)
    of_all = [word for word in words if word.startswith("length=")]
    schemes = by_name([word for word in words if word not in of_all])
    if not 1 <= len(schemes) <= 2 or len(of_all) > 1:
        raise UserError(
            "expected a config.json, a model, a run or a rotary encoding, or two to"
            " compare; length= once"
        )
    choices = encoding_choices()
    for name, _ in schemes:
        path = find.of_id(Path(name))
        if path.suffix == ".json":
            if not path.is_file():
                neighbours = [file.name for file in path.parent.glob("*.json")]
                nearest = did_you_mean(path.name, neighbours)
                raise UserError(f"{path}: no such file{nearest}")
            continue
        is_folder = (path / RECORD).is_file() or (path / "config.json").is_file()
        if not (name in choices or is_folder or find.is_model(name)):
            raise unknown(
                "configuration",
                name,
                choices,
                "expected a config.json, a model, a run or an encoding",
            )

    text = "".join(of_all).removeprefix("length=")
    lengths: list[int] = value(LENGTH, text)
    if not all(type(length) is int and length >= 1 for length in lengths):
        raise UserError(
            f"length is {text}: expected lengths in tokens, such as 4096,16384"
        )
    return schemes, lengths


def encoding_choices() -> list[str]:
    """Return the names of encodings and patterns of layers."""
    return [*encodings.names(), *shipped.choices("encoding", (), shipped.EVERY)]
