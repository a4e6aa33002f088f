"""Encodings of a user's own: a mistake in one is one line that names the encoding, the hook, the file and the line."""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posbench import machine
from posbench.encodings.base import Encoding
from posbench.errors import PosbenchError, UserError

_Expected = Callable[..., tuple[tuple[int, ...], str]]
# The shape that a hook has to give, by its arguments. `rotate` and `distance_bias` are checked for all encodings.
_SHAPES: dict[str, _Expected] = {
    "positions": lambda _, ids, *__: ((1, ids.shape[-1]), "(1|B, T)"),
    "embed": lambda self, x, *_: ((*x.shape[:2], self.shape.d_model), "(B, T, D)"),
    "map_values": lambda _, v, *__: (tuple(v.shape), "(B, H, T, Dh)"),
    "map_outputs": lambda _, out, *__: (tuple(out.shape), "(B, H, Tq, Dh)"),
    "bias": lambda _, q, k, __: ((*q.shape[:3], k.shape[2]), "to broadcast to (B, H, Tq, Tk)"),
    "scores": lambda _, logits, *__: (tuple(logits.shape), "(B, H, Tq, Tk)"),
    "attend": lambda _, logits, v, __: ((*logits.shape[:3], v.shape[3]), "(B, H, Tq, Dh)"),
}


@functools.cache
def guarded(cls: type[Encoding]) -> type[Encoding]:
    """Return the class with hooks whose errors, and results of another shape, are one line."""
    hooks = {name: _guarded(cls, name, hook) for name in cls.overridden if callable(hook := getattr(cls, name))}
    members = {"__module__": cls.__module__, "__doc__": cls.__doc__, "name": cls.name, **hooks}
    made: type[Encoding] = type(cls.__name__, (cls,), members)
    return made


def _guarded(cls: type[Encoding], name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(self: Encoding, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return hook(self, *args, **kwargs)
        try:
            given = hook(self, *args, **kwargs)
        except PosbenchError:
            raise
        except Exception as error:
            if machine.is_out_of_memory(error):
                raise
            raise UserError(fault(error, cls, name)) from error
        if name in _SHAPES and not (given is None and name == "bias"):
            expected, axes = _SHAPES[name](self, *args, **kwargs)
            if not isinstance(given, Tensor) or not _fits(tuple(given.shape), expected, name):
                shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise UserError(f"{_place(cls, name)}: gave {shape}, expected {axes}, here {expected}")
        return given

    return call


def _fits(given: tuple[int, ...], expected: tuple[int, ...], name: str) -> bool:
    if name not in ("bias", "positions"):
        return given == expected
    wide = name == "positions"  # one row, or one for each sequence
    pairs = zip(reversed(given), reversed(expected), strict=False)
    return len(given) <= len(expected) and all(size in (1, of) or (wide and of == 1) for size, of in pairs)


def construct(cls: type[Encoding], *args: Any, **options: Any) -> Encoding:
    """Call a class of a user's own. UserError, of one line, if it raises or holds tensors that no model would see."""
    try:
        encoding = guarded(cls)(*args, **options)  # type: ignore[arg-type]
    except PosbenchError:
        raise
    except Exception as error:
        raise UserError(fault(error, cls, "__init__")) from error
    if "shape" not in vars(encoding):
        raise UserError(f"{_place(cls, '__init__')}: expected super().__init__(shape) first")
    for module in encoding.modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and any(isinstance(each, Tensor | nn.Module) for each in _items(value)):
                wrong = (
                    f"{name} is neither trained nor moved with the model: expected nn.Parameter, a buffer or a module"
                )
                raise UserError(f"{_place(cls, '__init__')}: {wrong}" + (" list" if isinstance(value, list) else ""))
    return encoding


def _items(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _items(each)
    else:
        yield value


def fault(error: BaseException, cls: type[Encoding], name: str) -> str:
    """Return an error of a class's own code in one line, with the last line of its file that it passed through."""
    source = inspect.getsourcefile(cls)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    message = " ".join(str(error).split())
    if "before Module.__init__() call" in message:
        message = "expected super().__init__(shape) first"
    return f"{_place(cls, name, lines[-1] if lines else None)}: {type(error).__name__}: {message}"


def _place(cls: type[Encoding], name: str, line: int | None = None) -> str:
    code = inspect.unwrap(getattr(cls, name)).__code__
    return f"'{cls.name}', {name} ({Path(code.co_filename).name}, line {line or code.co_firstlineno})"
