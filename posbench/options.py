"""Options that come from outside, against what a function or a class declares: the same check for all that has some."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NoReturn

from annotated_types import Ge, Gt, Lt

from posbench.errors import OptionError, UserError, did_you_mean

# Bounds that a constructor declares in its annotations, `base: Above1 = 10000.0`; none of these takes inf or NaN.
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Above1 = Annotated[float, Gt(1)]
AtLeast1 = Annotated[float, Ge(1)]
Share = Annotated[float, Ge(0), Lt(1)]
Count = Annotated[int, Ge(1)]
Offset = Annotated[int, Ge(0)]


def checked(
    given: Mapping[str, Any], hints: Mapping[str, Any], defaults: Mapping[str, Any], owner: str, section: str = ""
) -> dict[str, Any]:
    """Options as the annotations they were declared with. Raises UserError for an unknown one, or of another type.

    Args:
        hints: annotations by option.
        defaults: the options there are, with their defaults.
        owner: the name of what has these options.
        section: what stands before an option's name where a user writes it, such as `encoding.`.
    """
    for key in given.keys() - defaults.keys():
        reject(key, owner, defaults)
    return {key: typed(value, hints[key], f"{section}{key}", owner, defaults[key]) for key, value in given.items()}


def typed(value: Any, hint: Any, option: str, owner: str, default: Any) -> Any:
    """An option's value as the annotation it was declared with. Raises OptionError if it has another type."""
    import pydantic

    try:
        return pydantic.TypeAdapter(hint, config={"allow_inf_nan": False}).validate_python(value)
    except pydantic.ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        wrong = f"{message[0].lower()}{message[1:]}"
        raise OptionError(option, f"is {value!r} for '{owner}': {wrong} (default {default!r})") from None


def reject(option: str, owner: str, accepted: Iterable[str], otherwise: str = "") -> NoReturn:
    """Raise the UserError that there is no such option, which there are, and which one may be meant.

    Args:
        otherwise: what is said where none of those there are is near.
    """
    accepted = list(accepted)
    near = did_you_mean(option, accepted).replace(":", ";", 1) or otherwise
    raise UserError(f"'{owner}' has no option '{option}': it accepts {', '.join(accepted) or 'none'}{near}")


def plain(value: object) -> str:
    """An option's value as it is typed: 10000, not 10000.0."""
    return f"{value:g}" if isinstance(value, float) else str(value)
