"""The registry of encodings. Each family is a module of this folder, and each scheme is
a class in one.

Encodings from elsewhere join by `register`.
"""

import ast
import contextlib
import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import annotated_types

import posbench.options
from posbench import registry
from posbench.errors import UserError, unknown
from posbench.options import checked

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding, Shape

# Modules of this folder with several encodings, or none. Any other module holds one
# encoding, of the module's name.
_FAMILIES = dict.fromkeys(("base", "extend", "own", "wrapper"), "") | {
    "absolute": "none sinusoidal learned index minmax binary sine",
    "contextual": (
        "fox cable fox_pro wall cope tapa stick_breaking path path_fox gated_delta kda"
    ),
    "distance": (
        "alibi bam kerple_log kerple_power t5 sandwich dynamic_bias fire grape_a"
    ),
    "layered": "layered heads",
    "mixing": "canon cca dape dape_v2 learned_sinks",
    "positions": "randomized shape pose cape abacus coupling bipe",
    "relative": "shaw transformer_xl deberta tupe projected_bias",
    "rope": (
        "rope partial_rope p_rope hope lerope grape_m drope pi ntk dynamic_ntk"
        " ntk_by_parts yarn llama3 longrope"
    ),
    "rotary": (
        "xpos pope rope_pp fope decoupled_rope rope_2d carope selective_rope repo"
    ),
    "skew": "liere comrope algebraic spe",
    "temperature": "temperature entmax scale_invariant",
}
# the base that the extension `abf` gives to RoPE (Xiong et al. 2023, arXiv:2309.16039)
ABF_BASE = 500_000
EXTENSIONS = (  # methods of `extend`
    "pi",
    "ntk",
    "dynamic_ntk",
    "ntk_by_parts",
    "yarn",
    "llama3",
    "longrope",
    "abf",
    "clipped_rope",
    "misread",
    "rerope",
    "string",
    "leaky_rerope",
    "self_extend",
    "dual_chunk",
    "jet_long",
    "lampe",
    "alibi_pi",
    "interpolate",
)
# what RoPE keeps of the encoding that it takes the place of in a trained model
KEPT = ("base", "layout", "frequencies")
_modules = [
    module.name
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
]
# the module of each of posbench's own encodings, by name
MODULE_OF: dict[str, str] = {}
for _module in _modules:
    MODULE_OF |= dict.fromkeys(_FAMILIES.get(_module, _module).split(), _module)
_STOCK = (
    "none rope partial_rope p_rope pi ntk ntk_by_parts yarn llama3 longrope dynamic_ntk"
    " lerope"
)
# what the user's own code has registered: class and sha256 of its source, by name
REGISTERED: "dict[str, tuple[type[Encoding], str]]" = {}

# The places in the forward pass where an encoding may act, each with its hooks. They
# define an encoding's family.
_ACTS = {
    "positions": {"positions"},
    "input": {"token_dim", "embed"},
    "queries and keys": {"rotate"},
    "scores": {"logit_scale", "distance_bias", "bias", "scores"},
    "weights or values": {"attend"},
    "values": {"map_values", "map_outputs"},
}
OTHERS = "other encodings"
FAMILIES = ("nowhere", *_ACTS, OTHERS)


def names() -> list[str]:
    """List the names of all encodings, sorted. Imports none of them."""
    return sorted([*MODULE_OF, *REGISTERED])


def register(cls: "type[Encoding]", name: str | None = None) -> "type[Encoding]":
    """Add a user's own class to the encodings of this process. Return the class, so
    that this can be a decorator.

    The name is that of the class in lower case unless `name` is given. A later class of
    the same name replaces it.
    """
    name = name or cls.__name__.lower()
    if name in MODULE_OF:
        raise UserError(
            f"cannot register {cls.__name__} as '{name}': another encoding has that"
            " name"
        )
    named = _named(cls, name)
    # of the file that defines the class, or of its text if it was typed in a notebook
    try:
        file = Path(inspect.getsourcefile(cls) or "")
        if file.is_file():
            source = file.read_bytes()
        else:
            source = inspect.getsource(cls).encode()
        digest = hashlib.sha256(source).hexdigest()
    except (OSError, TypeError):  # it was typed where no text is kept
        digest = ""
    REGISTERED[name] = named, digest
    return cls


def _named(cls: Any, name: str) -> "type[Encoding]":
    from posbench.encodings.base import Encoding

    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise UserError(
            f"'{name}' is {cls!r}: expected a subclass of posbench.Encoding"
        )
    cls.name = name
    return cls


def load(name: str) -> "type[Encoding]":
    """Return the class of an encoding; UserError if no encoding has that name."""
    refuse_name(name)
    if name in REGISTERED:
        return REGISTERED[name][0]
    return _named(_class_of(name), name)


def refuse_name(name: str) -> None:
    """Raise UserError if no encoding has that name."""
    if name not in names():
        raise unknown(
            "encoding",
            name,
            names(),
            "'posbench list' shows all; a class of yours: encoding=FILE.py:CLASS",
        )


def refuse_extension(name: str) -> None:
    """Raise UserError if no extension has that name."""
    if name not in EXTENSIONS:
        raise unknown(
            "extension",
            name,
            EXTENSIONS,
            "'posbench list' shows all; 'posbench evaluate RUN extension=search'"
            " compares several",
        )


def _class_of(name: str) -> "type[Encoding]":
    """Return the class of one of posbench's own encodings: it has the scheme's name
    without underscores, or says `name`.
    """
    from posbench.encodings.base import Encoding

    module = importlib.import_module(f"{__name__}.{MODULE_OF[name]}")
    spelling = name.replace("_", "")
    for cls in vars(module).values():
        if not (isinstance(cls, type) and issubclass(cls, Encoding)):
            continue
        if cls.name == name or cls.__name__.lower() == spelling:
            return cls
    expected = f"a class {spelling} in any case, or one with name = '{name}'"
    raise UserError(f"{module.__file__}: expected {expected}")


def documentation(cls: "type[Encoding]") -> str:
    """Return the docstring of an encoding: that of its class or, if it has none, that
    of its module.
    """
    return vars(cls).get("__doc__") or sys.modules[cls.__module__].__doc__ or ""


def _parameters(cls: "type[Encoding]") -> list[inspect.Parameter]:
    return list(inspect.signature(cls, eval_str=True).parameters.values())[1:]


def options_of(name: str) -> dict[str, Any]:
    """Return an encoding's options with their defaults, as the constructor declares
    them.
    """
    return {parameter.name: parameter.default for parameter in _parameters(load(name))}


def build(
    name: str, shape: "Shape", options: Mapping[str, Any] | None = None
) -> "Encoding":
    """Build an encoding for a model shape; UserError if its name or an option is
    unknown, or a value is wrong.
    """
    cls = load(name)
    hints = {
        p.name: Any if p.annotation is p.empty else p.annotation
        for p in _parameters(cls)
    }
    values = checked(options or {}, hints, options_of(name), name, "encoding.")
    if name in MODULE_OF:
        return cls(shape, **values)
    from posbench.encodings.own import construct

    return construct(cls, shape, **values)


def refuse_values(name: str, options: Mapping[str, Any]) -> None:
    """Refuse values of one of posbench's encodings as `build` does, as far as its
    source says their types. Imports no torch, so that a mistake is answered at once.
    """
    if name not in MODULE_OF or not options:
        return
    path = Path(__file__).with_name(f"{MODULE_OF[name]}.py")
    constructor = registry.constructor(name, path)
    declared = [constructor]
    if constructor is None:  # a rule, whose class `rope.scaling` makes from two parts
        rule = registry.function(name, path)
        declared = [registry.constructor("Scaled", path), rule]

    known = vars(typing) | vars(annotated_types) | vars(posbench.options)
    hints = {}
    defaults = {}
    for part in filter(None, declared):
        arguments = part.args[::-1]  # the first of these have the defaults
        for argument, default in zip(arguments, part.defaults[::-1], strict=False):
            annotation = ast.unparse(argument.annotation or argument)
            # what only the module knows is checked once it is loaded
            with contextlib.suppress(NameError, ValueError):
                hints[argument.arg] = eval(annotation, {**known})  # noqa: S307
                if isinstance(default, ast.Name):
                    defaults[argument.arg] = registry.constant(default.id, path)
                else:
                    defaults[argument.arg] = ast.literal_eval(default)
    typed = {key: value for key, value in options.items() if key in defaults}
    checked(typed, hints, defaults, name, "encoding.")
    refuse_inner_names(options)


def refuse_inner_names(options: Mapping[str, Any]) -> None:
    """Raise UserError if what is to stand inside another is the name of no encoding."""
    entries = [*options.get("layers", []), *options.get("heads", [])]
    inner_names = [entry.get("name") for entry in entries]
    for name in [options.get("inner"), *inner_names]:
        if isinstance(name, str):  # `build` refuses other values
            refuse_name(name)


def acts(hooks: frozenset[str]) -> str:
    """Return the places where these hooks act."""
    return (
        ", ".join(place for place, of_place in _ACTS.items() if hooks & of_place)
        or FAMILIES[0]
    )


def kernels(encoding: "Encoding") -> str:
    """Return which kernels compute an encoding: `any`, those `with a bias`, or
    posbench's `own` for all others.
    """
    if encoding.hooks & {"scores", "attend"}:
        return "own"
    return "with a bias" if encoding.hooks & {"distance_bias", "bias"} else "any"


def cache(encoding: "Encoding") -> str:
    """Return whether a key-value cache works: `yes`, `with x` if it also keeps the
    layer's input, or `no`.
    """
    if encoding.length_dependent or "q" in encoding.history:
        return "no"
    return "with x" if "x" in encoding.history else "yes"


def architectures(encoding: "Encoding") -> list[str]:
    """Return the stock architectures of transformers that can hold an encoding; without
    one, export with code=true.
    """
    name = encoding.name
    is_ours = name in _STOCK.split() and type(encoding) is load(name)
    if is_ours and "rotate" not in vars(encoding):  # altered copies have one
        return ["Llama"]
    return []


def installed_files(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, the sha256 of the source of each registered encoding in use, or
    inside one.
    """
    settings = json.dumps([name, options], default=str)
    return {
        used: digest
        for used, (_, digest) in sorted(REGISTERED.items())
        if digest and json.dumps(used) in settings
    }
