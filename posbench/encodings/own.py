"""A user's own encodings: loaded from a file, with one-line errors that name the
encoding, the hook, file and line.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posbench import files, machine
from posbench.encodings.base import Encoding
from posbench.errors import PosbenchError, UserError
from posbench.typed import PLACE, Typed

# The shape that a hook must return, from its arguments.
_EXPECTED: dict[str, Callable[..., tuple[int, ...]]] = {
    **dict.fromkeys(
        ("map_values", "map_outputs", "scores", "rotate"),
        lambda _, x, *__: tuple(x.shape),
    ),
    "positions": lambda _, ids, __: tuple(ids.shape),
    "embed": lambda self, x, *_: (*x.shape[:2], self.shape.d_model),
    "distance_bias": lambda self, distance, _: (self.shape.n_heads, *distance.shape),
    "bias": lambda _, q, k, __: (*q.shape[:3], k.shape[2]),
    "attend": lambda _, logits, v, __: (*logits.shape[:3], v.shape[3]),
}
# hooks whose first argument nobody else reads
_OWNERS = ("embed", "distance_bias", "scores", "attend", "map_outputs")


class HookError(UserError):
    """What is wrong in a hook of an encoding. The message begins with its place."""

    def __init__(self, text: str, hook: str) -> None:
        super().__init__(text)
        self.hook = hook


# `posbench check` collects here what a pass survives; None: it is raised
_collected: contextvars.ContextVar[list[HookError] | None] = contextvars.ContextVar(
    "collected", default=None
)


@contextlib.contextmanager
def collected() -> Iterator[list[HookError]]:
    """Yield the list to which hooks add mistakes that they survive within the block: an
    input that they have changed, a result in another precision.
    """
    errors: list[HookError] = []
    token = _collected.set(errors)
    try:
        yield errors
    finally:
        _collected.reset(token)


def _survived(error: HookError) -> None:
    """Raise a mistake, unless such mistakes are collected."""
    errors = _collected.get()
    if errors is None:
        raise error
    errors.append(error)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Code that a file asks for: that of a run, or a YAML file. It may be a
    stranger's.
    """

    place: str  # path/to/file.py:Class
    sha256: str | None  # of the file, when the run was made


def class_of(code: Typed | Recorded) -> tuple[type[Encoding], str]:
    """Run a file of code and return the class in it that `path/to/file.py:Class` names,
    and the file's sha256. This is the only way to a class outside of posbench.

    Typing a file's name approves its content on this machine. A file can only ask for
    content that it names by sha256 and that has been approved here.
    """
    place = str(code.place if isinstance(code, Recorded) else code)
    parts = PLACE.fullmatch(place)
    if not parts:
        raise UserError(f"encoding={place}: expected FILE.py:CLASS")
    path = Path(parts[1]).expanduser()
    name = parts[2] or ""
    if not path.is_file():
        raise UserError(f"encoding={place}: there is no file {path}")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    # exists if this content has been approved
    marker = files.user_cache() / "own_encodings" / digest
    if isinstance(code, Typed):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    elif code.sha256 is None:
        raise UserError(
            f"a file names {place} as code without its sha256: expected file_sha256"
            " beside it, as in a run's config.yaml"
        )
    elif code.sha256 != digest:
        raise UserError(
            f"{path} has changed since the run was made: restore it, or train anew: a"
            " new run"
        )
    elif not marker.exists():
        raise UserError(
            f"{path} is code not approved here: 'posbench train --cfg encoding={place}'"
            " approves it"
        )
    module = sys.modules.get(f"posbench_own_{digest}")
    if module is None:
        module = types.ModuleType(f"posbench_own_{digest}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # dataclasses and pickle look there
        try:
            exec(compile(content, path, "exec"), vars(module))  # noqa: S102, the user has named this file
        except Exception as error:
            del sys.modules[module.__name__]
            raise UserError(f"encoding={place}: {fault(error)}") from error
    return _class_in(module, name, place), digest


def _class_in(module: types.ModuleType, name: str, place: str) -> type[Encoding]:
    """Return the encoding of a user's file that has this name, or the only one."""
    classes = {}
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            classes[value.__name__] = value
    encodings = [cls for cls in classes.values() if issubclass(cls, Encoding)]
    matching = [cls for cls in encodings if name in ("", cls.__name__)]
    if len(matching) == 1:
        return matching[0]
    if name in classes and not matching:
        raise UserError(
            f"encoding={place}: {name} is no encoding: derive it from posbench.Encoding"
        )
    if not encodings:
        raise UserError(
            f"encoding={place}: no class in the file derives from posbench.Encoding"
        )
    names = ", ".join(cls.__name__ for cls in encodings)
    raise UserError(f"encoding={place}: expected FILE.py:CLASS, one of {names}")


def construct(cls: type[Encoding], *args: Any, **options: Any) -> Encoding:
    """Return an encoding of a user's class; one-line UserError if it fails, has no hook
    or hides tensors.
    """
    encoding: Encoding = _in_one_line(cls, "__init__", guarded(cls), *args, **options)  # type: ignore[arg-type]
    if not {"shape", "_modules"} <= vars(encoding).keys():
        text = f"{place_of(cls, '__init__')}: expected super().__init__(shape) first"
        raise HookError(text, "__init__")
    _refuse_signatures(cls)
    if not encoding.hooks:
        text = (
            f"'{cls.name}' overrides no hook, so it encodes no position: is a hook"
            " misspelt?"
        )
        raise HookError(text, "__init__")
    for module in encoding.modules():
        for name, value in vars(module).items():
            items = value if isinstance(value, list | tuple) else [value]
            has_tensors = any(isinstance(item, Tensor | nn.Module) for item in items)
            if has_tensors and not name.startswith("_"):
                mistake = f"{name} is neither trained nor moved with the model"
                text = (
                    f"{place_of(cls, '__init__')}: {mistake}: expected nn.Parameter, a"
                    " buffer or a module"
                )
                raise HookError(text, "__init__")
    return encoding


def _refuse_signatures(cls: type[Encoding]) -> None:
    """Raise UserError for a hook that does not take the arguments it is called with."""
    for name in sorted(cls.overridden):
        hook = getattr(cls, name)
        if not callable(hook):
            continue
        expected = [*inspect.signature(getattr(Encoding, name)).parameters]
        signature = inspect.signature(hook)
        try:
            signature.bind(*expected)
        except TypeError:
            given = ", ".join(signature.parameters)
            text = (
                f"{place_of(cls, name)}: expected {name}({', '.join(expected)}), not"
                f" {name}({given})"
            )
            raise HookError(text, name) from None


@functools.cache
def guarded(cls: type[Encoding]) -> type[Encoding]:
    """Return the class with hooks that turn an error, or a result of a wrong shape or
    precision, into a one-line UserError; so is an input that a hook has changed.
    """
    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "name": cls.name,
    }
    members |= {
        name: _guarded(cls, name)
        for name in cls.overridden
        if callable(getattr(cls, name))
    }
    subclass: type[Encoding] = type(cls.__name__, (cls,), members)
    return subclass


def _guarded(cls: type[Encoding], name: str) -> Any:
    hook = getattr(cls, name)
    arguments = [*inspect.signature(getattr(Encoding, name)).parameters][1:]
    if name in _OWNERS:
        arguments[0] = ""

    @functools.wraps(hook)
    def call(self: Encoding, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return hook(self, *args)
        shared = _shared(arguments, args)
        versions = [tensor._version for tensor in shared.values()]
        result = _in_one_line(cls, name, hook, self, *args)
        changed = [
            of_caller
            for (of_caller, tensor), version in zip(
                shared.items(), versions, strict=True
            )
            if tensor._version != version
        ]
        if changed:
            # q, k and v are views of one tensor, which counts the changes of all
            of_caller = " or ".join(changed)
            first = changed[0]
            text = (
                f"{place_of(cls, name)}: changes {of_caller} in place, which others"
                f" read: expected a new tensor, as {first} = {first} * 2 makes one"
            )
            _survived(HookError(text, name))
        is_optional = name in ("distance_bias", "bias")
        if name in _EXPECTED and not (is_optional and result is None):
            expected = _EXPECTED[name](self, *args)
            is_double = _has_double(self, args)
            _refuse_result(cls, name, result, expected, is_double)
        return result

    return call


def _has_double(encoding: Encoding, args: Sequence[Any]) -> bool:
    """Return whether a hook was given something in fp64, as in a model in fp64."""
    given = [*args, *encoding.parameters(), *encoding.buffers()]
    return any(getattr(each, "dtype", None) == torch.float64 for each in given)


def _refuse_result(
    cls: type[Encoding],
    name: str,
    result: Any,
    expected: tuple[int, ...],
    is_double: bool,
) -> None:
    """Raise UserError for a hook's result of a wrong shape or precision."""
    parts = result if isinstance(result, tuple) else (result,)
    shapes = [tuple(getattr(part, "shape", ())) for part in parts]
    place = place_of(cls, name)
    if not _fits(name, shapes, expected):
        given = "nothing" if result is None else shapes
        description = str(expected)
        if name == "rotate":
            description = f"two of {expected}"
        raise HookError(f"{place}: gave {given}, expected {description}", name)
    if name == "attend":  # it has the dtype of its values
        return
    for part in parts:
        dtype = getattr(part, "dtype", None)
        cure = ""
        if dtype in (torch.float16, torch.bfloat16):
            cure = "leave out .half(), .bfloat16() or .to()"
        elif dtype == torch.float64 and not is_double:
            cure = "leave out .double(), and begin with torch's tensors, not numpy's"
        if cure:
            text = f"{place}: gave {dtype}, expected torch.float32: {cure}"
            _survived(HookError(text, name))


def _shared(names: Sequence[str], args: Sequence[Any]) -> dict[str, Tensor]:
    """Return the inputs of a hook that others read, too, by name; an empty name marks
    one that the hook may overwrite.
    """
    inputs = dict(zip(names, args, strict=False))
    layer = inputs.get("layer")
    if layer is not None:
        inputs |= {"layer.x": layer.x, "layer.positions": layer.positions}
        for part in ("tables", "state"):
            value = getattr(layer, part)
            if isinstance(value, list | tuple):
                for number, item in enumerate(value):
                    inputs[f"layer.{part}[{number}]"] = item
            inputs[f"layer.{part}"] = value
    shared = {}
    for name, value in inputs.items():
        # inference tensors count no versions
        if name and isinstance(value, Tensor) and not value.is_inference():
            shared[name] = value
    return shared


def _fits(name: str, shapes: list[tuple[int, ...]], expected: tuple[int, ...]) -> bool:
    """Return whether a hook's results have the shapes that its callers expect."""
    if name == "rotate":
        if len(shapes) != 2 or shapes[0] != shapes[1]:
            return False
        return shapes[0][:3] == expected[:3]
    if name == "bias":  # a bias that can be expanded is enough
        from_last = zip(shapes[0][::-1], expected[::-1], strict=False)
        return all(size in (1, full) for size, full in from_last)
    if name == "positions":  # one row serves all
        return shapes[0] in (expected, (1, *expected[1:]))
    return shapes == [expected]


def place_of(cls: type[Encoding], name: str) -> str:
    """Return where a method of a user's class stands: encoding, method, file and
    line.
    """
    code = inspect.unwrap(getattr(cls, name)).__code__
    return (
        f"'{cls.name}', {name}: {Path(code.co_filename).name}, line"
        f" {code.co_firstlineno}"
    )


def _in_one_line(
    cls: type[Encoding],
    name: str,
    function: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    try:
        return function(*args, **options)
    except Exception as error:
        if isinstance(error, PosbenchError) or machine.is_out_of_memory(error):
            raise
        text = f"'{cls.name}', {name}: {fault(error, inspect.getsourcefile(cls))}"
        raise HookError(text, name) from error


def fault(error: BaseException, source: str | None = None) -> str:
    """Return an error in one line, with the file and line it came from; with `source`,
    the last line in that file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last: Any = next(
        (frame for frame in reversed(frames) if frame.filename == source), frames[-1]
    )
    # a syntax error is in no frame
    last = error if isinstance(error, SyntaxError) else last
    return (
        f"{Path(last.filename).name}, line {last.lineno}: {type(error).__name__}:"
        f" {' '.join(str(error).split())}"
    )
