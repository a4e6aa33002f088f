"""A claim of the literature: its sentence and source, the runs that test it, and what would show it.

Each is one file, `configs/claim/ID.yaml`, or `claim/ID.yaml` in a --config-dir folder: adding one takes no code. The
file may come from a stranger, so it is plain data, and its runs are checked like every configuration.
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from posbench.config import plain_yaml
from posbench.config.schema import Section, validate
from posbench.config.shipped import choices, chosen, configs_dir
from posbench.errors import UserError, unknown

SHARED = "_runs"  # the file of runs that several claims need, by name

Outcome = Literal["supported", "contradicted", "open", "not learned", "not testable here", "not run"]
_TERM = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<weight>\d*\.?\d+)\s*\*\s*)?(?P<run>\w+)(?:/(?P<protocol>\w+))?(?::(?P<kind>\S+))?"
    r"\s+(?P<over>1/)?(?P<ratio>\d*\.?\d+)x\s*"
)
_EXPECTED = "expected a sum such as 'fire 8x - fire 1x - alibi 8x + alibi 1x', or 'rope:yarn 4x - rope 4x'"


@dataclasses.dataclass(frozen=True)
class Source(Section):
    paper: str
    where: str  # section, table or figure
    says: str  # what stands there, in our words
    arxiv: str | None = None
    published: str | None = None  # the value, with its unit
    scale: str | None = None  # of the models and texts behind it
    read: Literal["first-hand", "second-hand"] = "second-hand"


@dataclasses.dataclass(frozen=True)
class Prediction(Section):
    """What we expect, recorded before the first run that tests it."""

    outcome: Literal["supported", "contradicted", "open"]
    made: str  # a date
    why: str


@dataclasses.dataclass(frozen=True)
class Learned(Section):
    """Of two schemes the one that should answer a task right in more seeds."""

    more: str
    than: str
    at: float  # multiple of the longest trained problem
    right: float = 0.9  # share of right tokens from which on a seed counts


@dataclasses.dataclass(frozen=True)
class Claim(Section):
    """What the file holds. Either `figure` with `is_above` or `is_below`, or `learned`."""

    sentence: str
    source: Source
    runs: list[str | dict[str, str]]  # names of shared runs, and own ones as name: overrides
    prediction: Prediction
    figure: str | None = None  # a sum of levels, in nats per token
    is_above: float | None = None
    is_below: float | None = None
    learned: Learned | None = None
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Term:
    """A level: nll of a run at a multiple of its training length."""

    weight: float
    run: str
    ratio: float
    protocol: str
    kind: str  # plain, windowed, or an extension's name


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checked claim."""

    id: str
    claim: Claim
    terms: tuple[Term, ...]
    runs: dict[str, str]  # by name: the overrides that make the run

    @property
    def margin(self) -> float:
        given = self.claim.is_above if self.claim.is_below is None else self.claim.is_below
        return 0.0 if given is None else given

    @property
    def direction(self) -> int:
        """1 if the figure should lie above the margin, -1 if below."""
        return 1 if self.claim.is_below is None else -1


def read(names: list[str], own: Path | None = None) -> list[Entry]:
    """The claims of these names; all of them for `all`.

    Raises:
        UserError: no such claim, or a file that is none.
    """
    known = choices("claim", [own] if own else [])
    wanted = list(known) if names == ["all"] else list(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            raise unknown("claim", name, known, "'posbench list claims' shows all")
    return [_read(name, chosen("claim", name, own), own) for name in wanted]


def _read(name: str, path: Path, own: Path | None) -> Entry:
    content = plain_yaml.load(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a claim: expected keys such as sentence, source, runs, figure")
    try:
        claim = validate(Claim, content)
        terms = _terms(claim.figure) if claim.figure else ()
        entry = Entry(name, claim, terms, _runs(claim, own))
        _check(entry)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return entry


def _check(entry: Entry) -> None:
    claim = entry.claim
    sides = sum(bound is not None for bound in (claim.is_above, claim.is_below))
    if (claim.figure is None) == (claim.learned is None) or sides != (claim.figure is not None):
        raise UserError("expected figure with is_above or is_below, or else learned")
    asked = claim.learned
    used = {term.run for term in entry.terms} | ({asked.more, asked.than} if asked else set())
    for name in sorted(used ^ set(entry.runs)):
        raise UserError(
            f"run '{name}' is not among runs ({', '.join(entry.runs)})"
            if name in used
            else f"run '{name}' is not used: leave it out"
        )


def _runs(claim: Claim, own: Path | None) -> dict[str, str]:
    shared = _named(SHARED, own)
    found: dict[str, str] = {}
    for one in claim.runs:
        if isinstance(one, dict):
            found |= one
        elif one in shared:
            found[one] = shared[one]
        else:
            raise unknown("run", one, shared, f"runs that claims share: {', '.join(shared)}")
    return found


def _named(file: str, own: Path | None) -> dict[str, str]:
    """Overrides by name, of a file that comes with posbench and of one in a --config-dir folder."""
    found: dict[str, str] = {}
    for folder in (configs_dir(), *([own] if own else [])):
        path = folder / "claim" / f"{file}.yaml"
        if path.exists():
            content = plain_yaml.load(path)
            if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
                raise UserError(f"{path}: expected names, each with its overrides")
            found |= content
    return found


def _terms(figure: str) -> tuple[Term, ...]:
    terms, at = [], 0
    while at < len(figure):
        match = _TERM.match(figure, at)
        if match is None or (at and not match["sign"]):
            raise UserError(f"figure: cannot read '{figure[at:]}': {_EXPECTED}")
        ratio = 1 / float(match["ratio"]) if match["over"] else float(match["ratio"])
        weight = float(match["weight"] or 1) * (-1 if match["sign"] == "-" else 1)
        terms.append(Term(weight, match["run"], ratio, match["protocol"] or "fixed_target", match["kind"] or "plain"))
        at = match.end()
    return tuple(terms)
