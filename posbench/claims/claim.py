"""A claim of the literature: its sentence and source, the runs that test it, and what
would show it.

The files of `configs/claim`, and of `claim` in a --config-dir folder, hold claims by
name. A new claim needs no code.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

from posbench.config import shipped
from posbench.config.overrides import shell_words
from posbench.config.schema import Section, validate
from posbench.config.shipped import configs_dir
from posbench.errors import UserError, unknown
from posbench.results.tasks import SEEDS_OF_TASK

FRESH_SEEDS = range(5, 15)  # never used to make a prediction
SEEDS = 5

_TEST = re.compile(
    r"(?P<figure>[^<>]+?)\s*(?P<side>[<>]|(?<=\s)=)\s*(?P<margin>[+-]?\d*\.?\d+)(\s*±\s*(?P<within>\d*\.?\d+))?"
)
_TERM = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<weight>\d*\.?\d+)\s*\*\s*)?(?P<run>\w+)"
    r"(?:/(?P<protocol>fixed_target|nonoverlap|problems|exact))?"
    r"(?::(?P<kind>\S+))?\s+(?P<ratio>\d*\.?\d+)x\s*"
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
    # A sum of losses and its margin, in nats per token; if several, all must hold. Or
    # one run's published number (a loss, a share of right tokens, RUN/problems:VARIANT,
    # or of right problems, RUN/exact) and the difference that is accepted.
    test: str | list[str] | None = None
    # the number of seeds that each run needs, for a published number
    seeds: int | None = None
    narrowed_from: float | None = None  # the difference accepted before the runs
    more_seeds: MoreSeeds | None = None
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """A loss: nll of a run at a multiple of its training length."""

    weight: float
    run: str
    ratio: float
    protocol: str
    kind: str  # plain, windowed, or an extension's name


@dataclasses.dataclass(frozen=True)
class Condition:
    """A sum of losses that should lie above (direction 1) or below (-1) a margin, or at
    most `within` away from it.
    """

    terms: tuple[LossTerm, ...]
    direction: int
    margin: float
    within: float = 0

    @classmethod
    def of(cls, text: str) -> "Condition":
        """Read `fox 4x - rope 4x < -0.02`. Raises UserError for anything else."""
        test = _TEST.fullmatch(text.strip())
        if test is None or (test["side"] == "=") != bool(test["within"]):
            raise UserError(f"test: cannot read '{text}': {_EXPECTED}")
        within = float(test["within"] or 0)
        if test["within"] and within == 0:
            raise UserError(f"test: '{text}' accepts no difference: expected above ± 0")

        figure = test["figure"]
        terms: list[LossTerm] = []
        start = 0
        while start < len(figure):
            match = _TERM.match(figure, start)
            if match is None or (terms and not match["sign"]):
                raise UserError(f"test: cannot read '{figure[start:]}': {_EXPECTED}")
            weight = float(match["weight"] or 1)
            if match["sign"] == "-":
                weight = -weight
            protocol = match["protocol"] or "fixed_target"
            kind = match["kind"] or "plain"
            ratio = float(match["ratio"])
            terms.append(LossTerm(weight, match["run"], ratio, protocol, kind))
            start = match.end()

        direction = 1 if test["side"] == ">" else -1
        return cls(tuple(terms), direction, float(test["margin"]), within)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checked claim."""

    id: str
    claim: Claim
    tests: tuple[Condition, ...]
    runs: dict[str, str]  # by name: the overrides that make the run
    path: Path  # its file

    def __post_init__(self) -> None:
        """Raise UserError for a claim that cannot be tested, or a published number that
        cannot be compared.
        """
        claim = self.claim
        tests = self.tests
        if (not tests) == (claim.more_seeds is None):
            raise UserError("expected test or more_seeds")

        if claim.seeds is not None and not 1 <= claim.seeds <= len(FRESH_SEEDS):
            raise UserError(f"seeds is {claim.seeds}: expected 1 to {len(FRESH_SEEDS)}")
        if claim.seeds and not self.is_published:
            raise UserError(
                f"seeds is {claim.seeds}: leave it out: only published numbers (= 1.88"
                " ± 0.05) have it"
            )
        if self.is_published:
            weights = [term.weight for term in tests[0].terms]
            if len(tests) > 1 or weights != [1]:
                raise UserError(
                    f"test is {claim.test}: expected one run and its published number"
                )

        for run, overrides in self.runs.items():
            shell_words(overrides, f"run '{run}'")  # refuses an open quotation

        used = set[str]()
        for test in tests:
            used |= {term.run for term in test.terms}
        if claim.more_seeds:
            used |= {claim.more_seeds.of, claim.more_seeds.than}
        for run in sorted(used - self.runs.keys()):
            raise UserError(f"run '{run}' is not among runs ({', '.join(self.runs)})")

    @classmethod
    def of(cls, name: str, path: Path, content: Any, shared: dict[str, str]) -> "Entry":
        """Return a claim from what its file holds of it; `shared`: the runs that
        several claims need, by name. Raises UserError for one that cannot be tested.
        """
        if not isinstance(content, dict):
            content = {}  # then a key is missing, as it is said
        claim = validate(Claim, content)
        texts = claim.test or []
        if isinstance(texts, str):
            texts = [texts]
        tests = tuple(map(Condition.of, texts))

        runs: dict[str, str] = {}
        for run in claim.runs:
            if isinstance(run, dict):
                for twice in runs.keys() & run.keys():
                    raise UserError(f"run '{twice}' stands in runs twice")
                runs |= run
            elif run in shared:
                runs[run] = shared[run]
            else:
                hint = f"runs that claims share: {', '.join(shared)}"
                raise unknown("run", run, shared, hint)
        return cls(name, claim, tests, runs, path)

    @property
    def is_published(self) -> bool:
        """Tell whether a published number is compared; other claims are tested."""
        return any(test.within for test in self.tests)

    @property
    def seeds(self) -> int:
        if self.claim.seeds:
            return self.claim.seeds
        return SEEDS_OF_TASK if self.claim.more_seeds else SEEDS

    def ratios_of(self, run: str) -> set[float]:
        """Return the multiples of the trained length at which a run is asked for."""
        ratios = set[float]()
        for test in self.tests:
            ratios |= {term.ratio for term in test.terms if term.run == run}
        more = self.claim.more_seeds
        if more and run in (more.of, more.than):
            ratios.add(more.at)
        return ratios


def read(names: list[str], config_dir: Path | None = None) -> list[Entry]:
    """Return the claims of these names, or `all`. Raises UserError for an unknown name,
    or a file without a claim.
    """
    shared, contents = _files(config_dir)
    if "all" in names:
        names = list(contents)
    for name in names:
        if name not in contents:
            hint = "'posbench list claims' shows all"
            raise unknown("claim", name, contents, hint)

    entries = []
    for name in sorted(set(names)):
        path, content = contents[name]
        try:
            entries.append(Entry.of(name, path, content, shared))
        except UserError as error:
            raise UserError(f"{path}: {name}: {error}") from None
    return entries


def _files(
    config_dir: Path | None,
) -> tuple[dict[str, str], dict[str, tuple[Path, Any]]]:
    """Return the runs that several claims need, by name, and each claim's file with
    what it holds of the claim.
    """
    folders = [configs_dir()]
    if config_dir:
        folders.append(config_dir)
    shared: dict[str, str] = {}
    contents: dict[str, tuple[Path, Any]] = {}
    for folder in folders:
        for path in sorted((folder / "claim").glob("*.yaml")):
            content = shipped.load(path)
            for name in content:
                if not isinstance(name, str):
                    raise UserError(
                        f"{path}: the name {name} is no text: expected quotation marks"
                    )
            if path.stem == "_runs":
                shared |= content
                continue
            for name, value in content.items():
                contents[name] = path, value
    return shared, contents
