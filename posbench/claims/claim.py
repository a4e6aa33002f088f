"""A claim of the literature: its sentence and source, the runs that test it, and what
would show it.

The files of `configs/claim`, and of `claim` in a --config-dir folder, hold claims by
name. A file may also hold one claim, which has the file's name. A new claim needs no
code.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

from posbench.config import shipped
from posbench.config.schema import Section, validate
from posbench.config.shipped import configs_dir
from posbench.errors import UserError, unknown

SEEDS, SEEDS_OF_TASK = 5, 10

_TEST = re.compile(
    r"(?P<figure>[^<>]+?)\s*(?P<side>[<>]|(?<=\s)=)\s*(?P<margin>[+-]?\d*\.?\d+)(\s*±\s*(?P<within>\d*\.?\d+))?"
)
_TERM = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<weight>\d*\.?\d+)\s*\*\s*)?(?P<run>\w+)(?:/(?P<protocol>\w+))?(?::(?P<kind>\S+))?"
    r"\s+(?P<ratio>\d*\.?\d+)x\s*"
)
_EXPECTED = (
    "expected such as 'fire 8x - fire 1x - alibi 8x + alibi 1x < 0', or"
    " 'rope/nonoverlap 1x = 1.88 ± 0.05'"
)


class Source(Section):
    paper: str
    where: str  # section, table or figure
    says: str  # what stands there, in our words
    arxiv: str | None = None
    published: str | None = None  # the value, with its unit
    scale: str | None = None  # of the models and texts behind it
    read: Literal["first-hand", "second-hand"] = "second-hand"


class Prediction(Section):
    """What we expect, recorded before the first run that tests it."""

    outcome: Literal["supported", "contradicted", "open"]
    made: str  # a date
    why: str


class MoreSeeds(Section):
    """The claim that one scheme (`of`) answers a task right in more seeds than another
    (`than`).
    """

    of: str
    than: str
    # multiple of the longest trained problem; above 1, both schemes must have learned
    # the trained ones
    at: float
    right: float = 0.9  # the share of right tokens that a seed needs to count
    variant: str = ""  # the variation of the task that is tested, such as ignore=0.98


class Claim(Section):
    """A claim as its file has it, with either `test` or `more_seeds`."""

    sentence: str
    source: Source
    # names of shared runs; other runs as `name: overrides`
    runs: list[str | dict[str, str]]
    prediction: Prediction | None = None
    # A sum of losses and its margin, in nats per token; if several, all must hold. Or a
    # published number (a loss, a share of right tokens, RUN/problems:VARIANT, or of
    # right problems, RUN/exact) and the difference that is accepted.
    test: str | list[str] | None = None
    # the number of seeds that each run needs, for a published number
    seeds: int | None = None
    more_seeds: MoreSeeds | None = None
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Term:
    """A loss: nll of a run at a multiple of its training length."""

    weight: float
    run: str
    ratio: float
    protocol: str
    kind: str  # plain, windowed, or an extension's name


@dataclasses.dataclass(frozen=True)
class Inequality:
    """A sum of losses that should lie above (direction 1) or below (-1) a margin, or at
    most `within` away from it.
    """

    terms: tuple[Term, ...]
    direction: int
    margin: float
    within: float = 0


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checked claim."""

    id: str
    claim: Claim
    tests: tuple[Inequality, ...]
    runs: dict[str, str]  # by name: the overrides that make the run
    path: Path  # its file

    @property
    def seeds(self) -> int:
        return self.claim.seeds or (SEEDS_OF_TASK if self.claim.more_seeds else SEEDS)


def read(names: list[str], config_dir: Path | None = None) -> list[Entry]:
    """Return the claims of these names, or `all`. Raises UserError for an unknown name,
    or a file without a claim.
    """
    shared: dict[str, str] = {}
    contents: dict[str, tuple[Path, Any]] = {}  # by name: the file, and what it holds
    for folder in (configs_dir(), *([config_dir] if config_dir else [])):
        for path in sorted((folder / "claim").glob("*.yaml")):
            content = shipped.load(path)
            if path.stem == "_runs":  # runs that several claims need, by name
                shared |= content
                continue
            claims = {path.stem: content} if "sentence" in content else content
            contents |= {name: (path, value) for name, value in claims.items()}
    if strange := [name for name in names if name not in (*contents, "all")]:
        raise unknown("claim", strange[0], contents, "'posbench list claims' shows all")
    return [
        _read(name, *contents[name], shared)
        for name in sorted(contents if "all" in names else {*names})
    ]


def _read(name: str, path: Path, content: Any, shared: dict[str, str]) -> Entry:
    try:
        claim = validate(Claim, content if isinstance(content, dict) else {})
        if (claim.test is None) == (claim.more_seeds is None):
            raise UserError("expected test or more_seeds")
        tests = [claim.test] if isinstance(claim.test, str) else claim.test or []
        if strange := [
            run for run in claim.runs if isinstance(run, str) and run not in shared
        ]:
            raise unknown(
                "run",
                strange[0],
                shared,
                f"runs that claims share: {', '.join(shared)}",
            )
        overrides = (
            {run: shared[run]} if isinstance(run, str) else run for run in claim.runs
        )
        runs = dict(item for mapping in overrides for item in mapping.items())
        entry = Entry(name, claim, tuple(map(_inequality, tests)), runs, path)
        if claim.seeds and not any(test.within for test in entry.tests):
            raise UserError(
                f"seeds is {claim.seeds}: leave it out: only published numbers (= 1.88"
                " ± 0.05) have it"
            )
        if len(entry.tests) > 1 and any(test.within for test in entry.tests):
            raise UserError(
                f"test is {tests}: expected one, since it has a published number"
            )
        pair = claim.more_seeds
        names = {term.run for test in entry.tests for term in test.terms} | (
            {pair.of, pair.than} if pair else set()
        )
        for run in sorted(names ^ set(entry.runs)):
            wrong = (
                f"not among runs ({', '.join(entry.runs)})"
                if run in names
                else "not used: leave it out"
            )
            raise UserError(f"run '{run}' is {wrong}")
    except UserError as error:
        raise UserError(f"{path}: {name}: {error}") from None
    return entry


def _inequality(text: str) -> Inequality:
    test = _TEST.fullmatch(text.strip())
    if test is None or (test["side"] == "=") != bool(test["within"]):
        raise UserError(f"test: cannot read '{text}': {_EXPECTED}")
    figure, terms, start = test["figure"], [], 0
    while start < len(figure):
        match = _TERM.match(figure, start)
        if match is None or (start and not match["sign"]):
            raise UserError(f"test: cannot read '{figure[start:]}': {_EXPECTED}")
        weight = float(match["weight"] or 1) * (-1 if match["sign"] == "-" else 1)
        curve = match["protocol"] or "fixed_target", match["kind"] or "plain"
        terms.append(Term(weight, match["run"], float(match["ratio"]), *curve))
        start = match.end()
    direction = 1 if test["side"] == ">" else -1
    return Inequality(
        tuple(terms), direction, float(test["margin"]), float(test["within"] or 0)
    )
