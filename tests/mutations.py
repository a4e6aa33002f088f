"""Files of a run, changed at random as a stranger or a failing disk could change them; from a seed, so repeatable."""

import contextlib
import copy
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from posbench.api import many
from posbench.api.run import LoadedRun
from posbench.data.tokenizer import from_file
from posbench.evaluation import curve, sync
from posbench.report import csv_files, tables
from posbench.report.comparison import load
from posbench.run_folder.folder import Run, load_config
from posbench.run_folder.names import TOKENIZER
from posbench.terminal import exits

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, -(2**63), 2**64, 10**400, 1e308, -1e308, 1e-320, float("nan"), float("inf"),
    -float("inf"), "", "x", "\x1b]0;owned\x07", "\u202eabc", "\ud800", "a" * 100_000, "=1+1", "<script>",
    "../../x", "${oc.env:HOME}", "[/]", "[red]x[/red]", "1e999", "0", [], {}, [[]], [None], {"a": 1}, [1, 2, 3],
    {"": {}}, "\n\n", "\x00", [[[[[[[[[]]]]]]]]], {"x": {"y": {"z": [1]}}}, "ok", "undefined", "failed",
    "fixed_target", 3.7, 16, 32, 2**31, 10**9, 1.5,
]  # fmt: skip
KEYS = ["_target_", "hydra", "x", "\x1b[2J", "a" * 300, "name", "length"]
PIECES = [b"\x00", b"\xff\xfe", b"[[[[", b"}}", b"\n", b"NaN", b"1e9999", b"&a *a", b"\xed\xa0\x80", b"[" * 3000]
FILES = ["evaluation.jsonl", "evaluation_blocks.jsonl", "run.json", "config.yaml", "metrics.jsonl", "tokenizer.json"]


def mutated(name: str, original: bytes, chance: random.Random) -> bytes:
    """The content of a run's file with something in it that should not be there."""
    if chance.random() < 0.15:
        return _bytes(original, chance)
    if name == "config.yaml":
        try:
            text = yaml.safe_dump(_plain(yaml.safe_load(original), chance), sort_keys=False)
        except yaml.YAMLError:
            return _bytes(original, chance)
        return text.encode("utf-8", "backslashreplace")
    if name.endswith(".json"):
        return json.dumps(_plain(json.loads(original), chance)).encode()
    rows = [json.loads(line) for line in original.splitlines()]
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(rows))
        rows[at : at + (chance.random() > 0.3)] = [_plain(rows[at], chance)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _plain(value: Any, chance: random.Random) -> Any:
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        places = [place for place in _places(value) if place]
        if not places:
            return copy.deepcopy(chance.choice(VALUES))
        *before, last = chance.choice(places)
        inside = value
        for key in before:
            inside = inside[key]
        what = chance.random()
        if what < 0.7:
            inside[last] = copy.deepcopy(chance.choice(VALUES))
        elif what < 0.85:
            del inside[last]
        elif isinstance(inside, dict):
            inside[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
        else:
            inside.append(copy.deepcopy(chance.choice(VALUES)))
    return value


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from _places(item, (*place, key))


def _bytes(original: bytes, chance: random.Random) -> bytes:
    data = bytearray(original)
    for _ in range(chance.choice([1, 3, 20])):
        what, at = chance.random(), chance.randrange(len(data)) if data else 0
        if what < 0.4:
            data[at : at + 1] = bytes([chance.randrange(256)])
        elif what < 0.6:
            del data[at : at + chance.randrange(1, 40)]
        elif what < 0.8:
            data[at:at] = chance.choice(PIECES)
        else:
            del data[at:]
    return bytes(data)


# -- what is done with them --------------------------------------------------------------------------------------------


def chart(folder: Path) -> None:
    """What evaluate prints."""
    curve.print_curves(folder)


def report(folder: Path) -> None:
    """What a report computes and writes, without its pictures and the page around it, which take seconds."""
    from posbench.report import figures, latex, page
    from posbench.report.answer import answer
    from posbench.report.comparison import summary

    runs = [load.read(folder)]
    for group in load.groups(runs):
        summaries = summary.summarise(group, summary.LEAST)
        answer(group, summaries)
        tables.main_tables(group, summaries, summary.LEAST)
        tables.more_tables(group, summaries)
        latex.table(group, summaries, None, "title", "caption")
        page.curves(group, summaries, figures.baseline(group, summaries))
    load.repeated(runs), load.failures(runs)
    tables.outcomes(runs)
    csv_files.write(folder, load.groups(runs), runs)


def notebook(folder: Path) -> None:
    """What a notebook shows."""
    loaded = LoadedRun(load.read(folder))
    shown = [repr(loaded), loaded._repr_html_(), repr(loaded.curve()), repr(loaded.metrics()), repr(loaded.blocks())]
    shown.append(repr(many.runs(folder).drop(columns="folder")))
    print("\n".join(shown))


def evaluate_opens(folder: Path) -> None:
    """What evaluate does before it computes."""
    with Run.open(folder, load_config(folder), command=None) as run:
        run.refuse_other_text("0" * 64, "1" * 64)
        run.finish("done")


def sent(folder: Path) -> None:
    """What sync reads and gives to a session."""
    config = load_config(folder)
    with Run.open(folder, config, command=None) as run:
        sync.send(config, run, sync.Target.of(config, folder, run.id, run.record))


def tokenizes(folder: Path) -> None:
    """What a run's tokenizer is asked for."""
    tokenizer = from_file(folder / TOKENIZER)
    ids = tokenizer.encode(["hello world <|endoftext|> \u20ac " * 3])
    tokenizer.decode(ids[0])
    assert tokenizer.vocab_size < 10_000
    assert tokenizer.token_bytes is None or len(tokenizer.token_bytes) == len(tokenizer.texts)


USES: list[Callable[[Path], None]] = [chart, report, notebook, evaluate_opens, sent]


def outcome(use: Callable[[Path], None], folder: Path) -> str:
    """Empty where a use of a run ends well, or with the one line of a user's mistake; else what was wrong with it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exits.run(lambda: use(folder))
    said = out.getvalue() + err.getvalue()
    if code not in (0, 2):
        return f"exit code {code}: {err.getvalue()[-300:]!r}"
    acting = [character for character in said if not character.isprintable() and character != "\n"]
    return f"control characters {acting[:3]!r}" if acting else ""


class _Session:
    """In place of W&B's, which needs a second for each run."""

    step, line, rows, where = 0, 0, 0, "nowhere"

    def __init__(self, *_: Any) -> None: ...

    def metrics(self, row: Any) -> None: ...

    def curve(self, row: Any, line: int) -> None: ...

    def results(self, rows: Any, draw: Any) -> None: ...

    def finish(self, code: int, facts: Any) -> None: ...


def failures(run: Path, name: str, seeds: range, monkeypatch: Any) -> list[str]:
    """What goes wrong with a run whose file `name` is changed, by seed and use."""
    monkeypatch.setattr(sync, "Session", _Session)
    kept = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    found = []
    for seed in seeds:
        changed = mutated(name, kept[run / name], random.Random(f"{name} {seed}"))
        for use in [tokenizes] if name == TOKENIZER else USES:
            for path, content in kept.items():
                path.write_bytes(content)
            (run / name).write_bytes(changed)
            if wrong := outcome(use, run):
                found.append(f"{name}, seed {seed}, {use.__name__}: {wrong}")
    return found
