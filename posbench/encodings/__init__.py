"""The registry of encodings. A family of them is a module of this folder, and a scheme is a class in it.

Encodings from elsewhere join through the entry point group `posbench.encodings` (see `installed`), or as classes that
the user's own code has registered in this process.
"""

import functools
import hashlib
import importlib
import inspect
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from posbench import files, installed
from posbench.errors import UserError, did_you_mean, unknown
from posbench.options import checked, reject

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding, Shape


# The modules of this folder, each with the names of its encodings.
_MODULES = {
    "abacus": "abacus",
    "absolute": "sinusoidal learned",
    "alibi": "alibi bam",
    "bipe": "bipe",
    "canon": "canon",
    "cape": "cape",
    "cca": "cca",
    "contextual_rope": "carope selective_rope repo",
    "cope": "cope",
    "coupling": "coupling",
    "dape": "dape dape_v2",
    "deberta": "deberta",
    "dynamic_bias": "dynamic_bias",
    "fire": "fire",
    "fox": "fox cable fox_pro",
    "grape_a": "grape_a",
    "kerple": "kerple_log kerple_power",
    "layered": "layered",
    "learned_sinks": "learned_sinks",
    "none": "none",
    "path": "path path_fox",
    "projected_bias": "projected_bias",
    "randomized": "randomized",
    "rope": "rope partial_rope p_rope hope lerope grape_m drope pi ntk dynamic_ntk ntk_by_parts yarn llama3 longrope",
    "rotary": "xpos pope rope_pp fope decoupled_rope",
    "sandwich": "sandwich",
    "shape": "shape",
    "shaw": "shaw",
    "skew": "liere comrope algebraic",
    "spe": "spe",
    "stick_breaking": "stick_breaking",
    "t5": "t5",
    "temperature": "temperature",
    "transformer_xl": "transformer_xl",
    "tupe": "tupe",
    "tutorial": "index minmax binary sine",
    "wall": "wall",
}
_METHODS = {
    "rope": "pi ntk dynamic_ntk ntk_by_parts yarn llama3 longrope",
    "extend": "abf clipped_rope",
    "far_pairs": "rerope leaky_rerope self_extend dual_chunk",
    "squeezed": "alibi_pi interpolate",
}
EXTENSIONS = {name: module for module, listed in _METHODS.items() for name in listed.split()}  # the module of each
_PLACE = re.compile(r"(.+\.py)(?::(\w+))?")
_registered: "dict[str, tuple[type[Encoding], str]]" = {}  # class and sha256 of its source, by name


def names() -> list[str]:
    """List the names of all encodings, sorted. Imports none of them."""
    return sorted(_shipped() | _registered.keys())


def _shipped(installed_too: bool = True) -> set[str]:
    """Return the names of posbench's own encodings, and of installed ones."""
    return set(_module_of()) | ({*installed.points(installed.ENCODINGS)} if installed_too else set())


@functools.cache
def _module_of() -> dict[str, str]:
    """Return the module of each of posbench's own encodings by its name."""
    return {name: module for module, listed in _MODULES.items() for name in listed.split()}


def register(cls: "type[Encoding]", name: str | None = None) -> "type[Encoding]":
    """Add a class of the user's own to the encodings of this process, and return it, so that it may be a decorator.

    Args:
        name: in configurations; the class's own in lower case unless it is given. A later class of the same name, as
            of a notebook cell that runs again, takes the place of the earlier one.

    Raises:
        UserError: it is no subclass of `Encoding`, or posbench or an installed package has an encoding of that name.
    """
    from posbench.encodings.base import Encoding

    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise UserError(f"cannot register {cls!r}: expected a subclass of posbench.Encoding")
    name = name or cls.__name__.lower()
    if name in _shipped():
        raise UserError(f"cannot register {cls.__name__} as '{name}': there is an encoding of that name already")
    cls.name = name
    _registered[name] = cls, _source_digest(cls)
    return cls


def from_file(place: str, sha256: str | None = None) -> "tuple[type[Encoding], str]":
    """Run a file of the user's own, and return the class in it that `path/to/file.py:Class` names, and its sha256.

    Args:
        sha256: of the file that a run was trained with. It may come from a stranger's folder, so it is run only if it
            is unchanged and somebody has typed its name on this machine before.

    Raises:
        UserError: there is no such file or class, it cannot be imported, or it is not the one that was trained with.
    """
    from posbench.encodings.base import Encoding

    match = _PLACE.fullmatch(place)
    path, name = (Path(match[1]).expanduser(), match[2]) if match else (Path(place), None)
    if not path.is_file():
        raise UserError(f"encoding={place}: there is no file {path}")
    content, typed = path.read_bytes(), files.user_cache() / "typed_encodings"
    digest = hashlib.sha256(content).hexdigest()
    known = typed.read_text(encoding="utf-8").split() if typed.is_file() else []
    if sha256 not in (None, digest):
        now = f"has changed since the run was made (sha256 {str(sha256)[:12]}, now {digest[:12]})"
        raise UserError(f"{path} {now}: restore it, or train with encoding={place} anew, which is another run")
    if sha256 and digest not in known:
        raise UserError(f"{path} is code that nobody has named here yet: 'posbench train --cfg encoding={place}' does")
    if digest not in known:
        typed.parent.mkdir(parents=True, exist_ok=True)
        files.write(typed, "\n".join([*known, digest, ""]).encode())
    if (module := sys.modules.get(f"posbench_own_{digest}")) is None:
        module = types.ModuleType(f"posbench_own_{digest}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # where dataclasses and pickle look
        try:
            exec(compile(content, path, "exec"), vars(module))  # noqa: S102, it is the user's, who has named it
        except Exception as error:
            del sys.modules[module.__name__]
            raise UserError(f"encoding={place}: {import_fault(error)}") from error
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Encoding) and value.__module__ == module.__name__
    }
    cls = classes.get(name) if name else next(iter(classes.values()), None) if len(classes) == 1 else None
    if cls is None:
        raise UserError(
            f"encoding={place}: expected FILE.py:CLASS, one of {', '.join(classes) or 'none: it has no Encoding'}"
        )
    return register(cls), digest


def is_place(name: str) -> bool:
    """Return whether a name is that of a class in a file, `path/to/file.py:Class`."""
    return _PLACE.fullmatch(name) is not None


def registered() -> list[str]:
    """List the names of the classes that the user's own code has registered."""
    return list(_registered)


def _source_digest(cls: type) -> str:
    """Return the sha256 of the file that a class was written in; of its own text if it was typed into a notebook."""
    try:
        file = Path(inspect.getsourcefile(cls) or "")
        return (
            files.sha256(file) if file.is_file() else hashlib.sha256(inspect.getsource(cls).encode()).digest()
        ).hex()
    except (OSError, TypeError):  # typed where no text is kept
        return ""


def load(name: str) -> "type[Encoding]":
    """The class of an encoding.

    Raises:
        UserError: no encoding of that name.
    """
    from posbench.encodings.base import Encoding

    if name not in names():
        raise unknown("encoding", name, names(), "'posbench list' shows all")
    if name in _registered:
        return _registered[name][0]
    if point := installed.points(installed.ENCODINGS).get(name):
        try:
            cls = point.load()
        except Exception as error:  # whatever its module raises
            raise UserError(f"the installed encoding '{name}': {import_fault(error)}") from error
        if not (isinstance(cls, type) and issubclass(cls, Encoding)):
            raise UserError(f"the installed encoding '{name}' is {cls!r}: expected a subclass of posbench's Encoding")
        cls.name = name
        return cls
    module = importlib.import_module(f"{__name__}.{_module_of()[name]}")
    classes = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Encoding))
    return next(each for each in classes if each.name == name)


def documentation(cls: "type[Encoding]") -> str:
    """Return the docstring of an encoding: its class's own, or its module's where that is the encoding's alone."""
    return vars(cls).get("__doc__") or sys.modules[cls.__module__].__doc__ or ""


def import_fault(error: Exception) -> str:
    """Return in one line why the module of an encoding cannot be imported: file, line and error."""
    *_, last = traceback.extract_tb(error.__traceback__)
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (last.filename, last.lineno)
    message = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{Path(file or '').name}, line {line}: {type(error).__name__}: {message}"


def options_of(name: str) -> dict[str, Any]:
    """An encoding's options with their defaults, as the constructor declares them."""
    parameters = inspect.signature(load(name)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "shape"}


def reject_option(name: str, option: str) -> NoReturn:
    """Refuse an option that an encoding lacks; the message names the accepted ones and a likely correction.

    Raises:
        UserError: always.
    """
    accepted = list(options_of(name))
    reject(option, name, accepted, "" if did_you_mean(option, accepted) else _owner(option, name))


def build(name: str, shape: "Shape", options: Mapping[str, Any] | None = None) -> "Encoding":
    """Build an encoding for a model shape.

    Raises:
        UserError: unknown encoding, unknown option, or an option of the wrong type or value.
    """
    cls, given, defaults = load(name), dict(options or {}), options_of(name)
    for key in given:
        if key not in defaults:
            reject_option(name, key)
    typed = checked(given, typing.get_type_hints(cls.__init__, include_extras=True), defaults, name, "encoding.")
    if name in _shipped(installed_too=False):
        return cls(shape, **typed)
    from posbench.encodings._own import construct

    return construct(cls, shape, **typed)


def installed_files(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of the source of each encoding in use that is not posbench's own, by its name.

    A wrapper's options name more encodings.
    """
    used = set(_texts_in([name, options]))
    foreign = sorted(used & (installed.points(installed.ENCODINGS).keys() | _registered.keys()))
    digests = {name: _registered[name][1] if name in _registered else _source_digest(load(name)) for name in foreign}
    return {name: digest for name, digest in digests.items() if digest}


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(one)


def _owner(key: str, name: str) -> str:
    """A question that suggests the first other encoding with this option; empty if there is none."""
    owner = next((other for other in ("rope", *names()) if other in names() and key in options_of(other)), None)
    return f"; did you mean to choose '{owner}'?" if owner and owner != name else ""
