"""Read options from outside, check them against what a function or class declares."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from posbench.errors import OptionError, UserError, did_you_mean
from posbench.typed import rewritten

# Bounds that a constructor declares in its annotations, `base: Above1 = 10000.0`; none
# of these takes inf or NaN.
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Above1 = Annotated[float, Gt(1)]
AtLeast1 = Annotated[float, Ge(1)]
Share = Annotated[float, Ge(0), Lt(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
# The other types of encodings' options are here, too, where no torch is imported.
Combine = Literal["add", "concat"]
Scale = Positive | Literal["token"]
Direction = Literal["first", "ones", "random", "learned"]
Start = Literal["normal", "torch"]
Layout = Literal["half", "interleaved"]
Ramp = Literal["index", "rotations"]
Divisors = list[Positive] | None
Block = Annotated[int, Ge(2)]
Entries = Annotated[list[dict[str, Any]], MinLen(1)]


def checked(
    options: Mapping[str, Any],
    hints: Mapping[str, Any],
    defaults: Mapping[str, Any],
    owner: str,
    section: str = "",
) -> dict[str, Any]:
    """Return an owner's options, each converted to the type of its annotation; messages
    put `section` before its name.

    Raises UserError for an unknown option, OptionError for a value of another type or
    out of range.
    """
    import pydantic

    refuse_unknown(options, defaults, owner)
    values = {}
    for key, value in options.items():
        field = pydantic.TypeAdapter(hints[key], config={"allow_inf_nan": False})
        try:
            values[key] = field.validate_python(value)
        except pydantic.ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            wrong = (
                f"is {value!r} for '{owner}': {message[0].lower()}{message[1:]}"
                f" (default {defaults[key]!r})"
            )
            raise OptionError(f"{section}{key}", wrong) from None
    return values


def refuse_unknown(
    options: Iterable[str], accepted: Collection[str], owner: str
) -> None:
    """Raise UserError for an option that its owner does not accept."""
    for key in options:
        if key not in accepted:
            near = did_you_mean(key, accepted).replace(":", ";", 1)
            every = ", ".join(accepted) or "none"
            raise UserError(
                f"'{owner}' has no option '{key}': it accepts {every}{near}"
            )


def as_typed(value: object) -> str:
    """Return an option's value as it is typed: 10000, not 10000.0."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def by_name(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the names among words, each with the key=value words after it."""
    schemes: list[tuple[str, list[str]]] = []
    for word in words:
        name = word.removeprefix("encoding=")  # as `posbench train` has it
        if "=" not in name:
            schemes.append((rewritten(word, name), []))
        elif schemes:
            option = word.removeprefix("encoding.")
            schemes[-1][1].append(rewritten(word, option))
        else:
            raise UserError(
                f"'{word}': expected the name of an encoding, then its options, as in"
                " rope base=100"
            )
    return schemes
