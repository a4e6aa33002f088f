"""List all choices: `posbench list`, `posbench show NAME --text`, and settings with
their meanings.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posbench import encodings, registry
from posbench.config.schema import Config, meanings, to_container
from posbench.config.shipped import EVERY, NESTED, choices
from posbench.errors import UserError, unknown
from posbench.options import as_typed
from posbench.typed import PLACE, Typed

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding

_COLUMNS = ("name", "paper", "title")  # what is printed; JSON has all
# The labels of paragraphs at the end of a docstring.
_LABELS = {
    "beyond": "Beyond training length",
    "source": "Source",
    "checked_against": "Checked against",
    "deviates": "Deviates",
}
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
# the title of a claim above its name
_CLAIM = re.compile(r"^# (.+)\n(\w+):$", re.MULTILINE)
# the shape of experiment=demo
DEMO: dict[str, Any] = {"d_model": 128, "n_heads": 4, "n_layers": 4, "train_length": 64}
# By encoding, the model types of transformers that have it. Any rotary model has RoPE's
# scalings, by its `rope_type`.
MODELS = {
    "rope": "llama, mistral, qwen3, olmo2, gemma2",
    "partial_rope": "gpt_neox, phi, stablelm, nemotron, glm4",
    "p_rope": "gemma4",
    "decoupled_rope": "deepseek_v2, deepseek_v3",
    "learned_sinks": "gpt_oss",
    "pi": "rope_type linear",
    "dynamic_ntk": "rope_type dynamic",
    "llama3": "rope_type llama3",
    "yarn": "rope_type yarn: gpt_oss, ministral3",
    "longrope": "rope_type longrope: phi3",
    "temperature": "llama4, ministral3",
    "layered": "gemma3, cohere2, olmo3, smollm3, llama4",
    "gated_delta": "qwen3_next, qwen3_5, olmo_hybrid",
    "kda": "kimi_linear, glm5_next",
    "alibi": "bloom, mpt, falcon",
    "t5": "t5, mt5, umt5, switch_transformers",
    "transformer_xl": "xlnet",
    "deberta": "deberta, deberta-v2",
    "learned": "gpt2, opt, gpt_neo, bert",
    "sinusoidal": "marian, m2m_100, xglm",
}

# `decision_card` of each encoding, as scripts/cards.py writes it
CARDS = registry.folder("encodings") / "cards.json"


def comments_by_key(path: Path) -> dict[str, str]:
    """Return a YAML file's comments by key (`section.key` if nested): the one beside a
    key, else the lines above it.
    """
    texts: dict[str, str] = {}
    above: list[str] = []
    parents: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if line.lstrip().startswith("#"):
            # the first line is about the file
            if number > 0:
                above.append(line.strip("# "))
            continue
        match = re.match(r"( *)(\w+):", line)
        if match:
            parents = [*parents[: len(match[1]) // 2], match[2]]
            _, mark, comment = line.partition(" # ")
            texts[".".join(parents)] = comment if mark else " ".join(above)
        above = []
    return texts


def explained_yaml(config: Config) -> str:
    """Return a configuration as YAML, each key with its meaning."""
    texts = meanings()
    of_encoding = choices("encoding").get(config.encoding.name)
    if of_encoding:
        for key, text in comments_by_key(of_encoding).items():
            texts[f"encoding.{key}"] = text
    return "\n".join(_lines(to_container(config), texts, "")) + "\n"


def _lines(container: dict[str, Any], texts: dict[str, str], prefix: str) -> list[str]:
    lines = []
    indent = "  " * prefix.count(".")
    for key, value in container.items():
        path = f"{prefix}{key}"
        has_comments_inside = any(name.startswith(f"{path}.") for name in texts)
        is_section = not prefix or has_comments_inside
        if value and isinstance(value, dict) and is_section:
            lines += [f"{indent}{key}:", *_lines(value, texts, f"{path}.")]
            continue
        text = yaml.safe_dump(
            [value], default_flow_style=True, width=float("inf"), allow_unicode=True
        ).strip()[1:-1]
        line = f"{indent}{key}: {text}"
        if texts.get(path):
            line += f"  # {texts[path]}"
        lines.append(line)
    return lines


def print_rows(sections: list[str], as_json: bool) -> None:
    """Print the rows of sections such as `encodings` or `tasks`, or of all: JSON, or
    aligned lines of some columns.
    """
    rows = listing_rows(sections, is_brief=not as_json)
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for group, entries in rows.items():
        print(f"{group}:")
        shown = [key for key in _COLUMNS if key in entries[0]]
        lines = []
        for row in entries:
            lines.append([str(row[key] or "-") for key in shown])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for cells in lines:
            padded = map(str.ljust, cells, widths)
            print("  " + "  ".join(padded).rstrip())


def listing_rows(
    sections: list[str], is_brief: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each section; of all if none is named. Brief rows are read
    from files alone, so that torch is not imported. Raises UserError if there is no
    such section.
    """
    claims = []
    for path in choices("claim").values():
        titles = _CLAIM.findall(path.read_text(encoding="utf-8"))
        claims += [{"name": name, "title": title} for title, name in titles]

    tasks = [Path(name).name for name in choices("data", (), NESTED)]
    kinds: dict[str, tuple[Callable[..., dict[str, Any]], Iterable[Any]]] = {
        "encodings": (encoding_row, sorted(encodings.MODULE_OF)),
        "patterns": (_choice_row, choices("encoding", (), NESTED).items()),
        "extensions": (extension_row, encodings.EXTENSIONS),
        "probes": (probe_row, registry.names(registry.PROBES)),
        "tasks": (task_row, tasks),
        "experiments": (_choice_row, choices("experiment", (), EVERY).items()),
        "models": (_choice_row, choices("model", (), EVERY).items()),
        "sweeps": (_choice_row, choices("sweep", (), EVERY).items()),
        # tasks have a section of their own
        "data": (_choice_row, choices("data").items()),
        "claims": (dict, claims),
    }
    for name in sections:
        if name not in kinds:
            raise unknown("section", name, kinds)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in sections or kinds:
        row_of, choices_of_kind = kinds[name]
        rows[name] = []
        for choice in choices_of_kind:
            row = row_of(choice)
            if not is_brief and name in _FACTS:
                row |= _FACTS[name](choice)
            rows[name].append(row)
    return rows


def page_text(name: str) -> str:
    """Return the documentation of an encoding, or of a class in a file (FILE.py:CLASS),
    and its options; UserError if there is none.
    """
    from posbench.encodings.own import class_of

    scheme = name
    if isinstance(name, Typed) and PLACE.fullmatch(name):
        scheme = encodings.register(class_of(name)[0]).name
    text = inspect.cleandoc(encodings.documentation(encodings.load(scheme)))
    meanings: dict[str, str] = {}
    path = choices("encoding").get(name)
    if path:  # a user's class has no file
        meanings = comments_by_key(path)

    lines = [f"{name}: {text}", ""]
    for number in dict.fromkeys(_ARXIV.findall(text)):
        lines.append(f"https://arxiv.org/abs/{number}")
    lines.append("Options:")
    for option, value in encodings.options_of(scheme).items():
        line = f"  encoding.{option}={as_typed(value)}"
        if option in meanings:
            line += f"  # {meanings[option]}"
        lines.append(line)
    lines += ["", f"posbench train encoding={name}"]
    return "\n".join(lines)


def encoding_text(name: str) -> str:
    """Return the docstring of one of posbench's encodings, read from its file."""
    path = registry.folder("encodings") / f"{encodings.MODULE_OF[name]}.py"
    return registry.documentation(name, [path])


def encoding_row(name: str) -> dict[str, Any]:
    """Return what the docstring of an encoding says."""
    row = _docstring_row(name, encoding_text(name))
    paper = _ARXIV.search(row["source"] or "")
    return row | {"paper": paper and paper[0]}


def encoding_facts(name: str) -> dict[str, Any]:
    """Return the facts on one encoding, at the demo's size."""
    from posbench.encodings.extend import methods_of

    encoding = at_demo_size(name)
    return {
        "options": encodings.options_of(name),
        "acts": encodings.acts(encoding.hooks),
        "parameters": sum(parameter.numel() for parameter in encoding.parameters()),
        "max_length": encoding.max_length,
        "length_dependent": encoding.length_dependent,
        **decision_card(encoding),
        "extensions": methods_of(encoding),
    }


def at_demo_size(name: str) -> "Encoding":
    """Build an encoding for the model of experiment=demo."""
    from posbench.encodings.base import Shape

    return encodings.build(name, Shape(**DEMO))


def known_card(name: str) -> dict[str, str]:
    """Return what is known of an encoding before any run, with its default options;
    nothing of one that needs an option, or is not known here.

    Those of posbench stand in a file, `CARDS`, so that a report imports no torch.
    """
    if name not in encodings.names():
        return {}
    known: dict[str, dict[str, str]] = json.loads(CARDS.read_text("utf-8"))
    return known[name] if name in known else demo_card(name)


def demo_card(name: str) -> dict[str, str]:
    """Return the card of an encoding with its default options, built at the demo's
    size; nothing of one that needs an option.
    """
    try:
        return decision_card(at_demo_size(name))
    except UserError:
        return {}


def decision_card(encoding: "Encoding") -> dict[str, str]:
    """Return what is known of an encoding before any run."""
    architectures = encodings.architectures(encoding)
    return {
        "kernels": encodings.kernels(encoding),
        "cache": encodings.cache(encoding),
        "architectures": ", ".join(architectures) or "posbench's class",
        "models": MODELS.get(encoding.name, ""),
    }


def extension_row(name: str) -> dict[str, Any]:
    """Return the name and the title of a method of extension."""
    folder = registry.folder("encodings")
    text = registry.documentation(name, [folder / "rope.py", folder / "extend.py"])
    title = _docstring_row(name, text)["title"]
    return {"name": name, "title": title}


def extension_facts(name: str) -> dict[str, Any]:
    """Return the source and the options of a method of extension."""
    from posbench.encodings.extend import methods

    method = methods()[name]
    return {"source": method.source, "options": method.options}


def probe_row(name: str) -> dict[str, Any]:
    """Return what the docstring of a probe of the use of context says."""
    path = registry.folder(registry.PROBES) / f"{name}.py"
    return _docstring_row(name, registry.documentation("", [path]))


def probe_facts(name: str) -> dict[str, Any]:
    """Return the options of a probe."""
    from posbench.evaluation import probes

    return {"options": probes.options_of(name)}


def task_row(name: str) -> dict[str, Any]:
    """Return what the docstring of a synthetic task says, which is chosen as data."""
    paths = registry.folder("tasks").glob("*.py")
    return _docstring_row(f"task/{name}", registry.documentation(name, paths))


def task_facts(name: str) -> dict[str, Any]:
    """Return the options of a synthetic task."""
    from posbench import tasks

    return {"options": tasks.options_of(name)}


# what takes the classes themselves, by section
_FACTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "encodings": encoding_facts,
    "extensions": extension_facts,
    "probes": probe_facts,
    "tasks": task_facts,
}


def _docstring_row(name: str, text: str) -> dict[str, Any]:
    """Return a docstring's title, its text, and its last paragraphs by their label."""
    paragraph, _, document = inspect.cleandoc(text).partition("\n\n")
    title = " ".join(paragraph.split()).rstrip(".")
    row: dict[str, Any] = {"name": name, "title": title}
    for key, label in _LABELS.items():
        match = re.search(
            rf"^{label}:(.*?)(?=^[A-Z][\w ]*:|^\s*$|\Z)",
            document,
            re.DOTALL | re.MULTILINE,
        )
        row[key] = None
        if match:
            row[key] = " ".join(match[1].split()) or None
            document = document.replace(match[0], "")
    return row | {"document": document.strip("\n")}


def _choice_row(choice: tuple[str, Path]) -> dict[str, Any]:
    """Return the name and first comment of a file of a configuration group."""
    name, path = choice
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = (line for line in lines if line.startswith("#"))
    title = next(line for line in comments if "@package" not in line)
    return {"name": name, "title": title[1:].strip()}
