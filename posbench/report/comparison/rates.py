"""The learning rate of a scheme, and its results at other rates.

A sweep with `tune=true` writes `tuning.json` into its study: the tried rates of each encoding, with nll on validation
text. A trial belongs to a scheme if its run id equals that of the scheme's seed 0 in all but the learning rate. So
records from other settings, or untrusted ones, have no effect.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from posbench.config.identity import run_id
from posbench.config.schema import Config
from posbench.report.comparison.load import Group, Scheme, listed, studies
from posbench.run_folder.jsonl import number

RECORD = "tuning.json"
Tried = dict[float, float | None]  # learning rate -> nll per token on validation text; None if the run failed


@dataclasses.dataclass(frozen=True)
class Rates:
    """The learning rate of a scheme's runs, among those tried."""

    ran: float
    tried: Tried  # ascending; empty if none was tried

    @property
    def measured(self) -> dict[float, float]:
        return {rate: nll for rate, nll in self.tried.items() if nll is not None}

    @property
    def best(self) -> float | None:
        """The learning rate of the lowest nll."""
        return min(self.measured, key=self.measured.__getitem__, default=None)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the lowest or highest tried, so that a better one may lie beyond."""
        return len(self.tried) > 1 and self.best in (min(self.tried), max(self.tried))

    @property
    def spread(self) -> float | None:
        """Nats per token between the worst and the best rate that did not fail."""
        nlls = self.measured.values()
        return max(nlls) - min(nlls) if nlls else None

    @property
    def lost(self) -> float | None:
        """Nats per token that the best rate would gain; None if the scheme's own rate was not tried."""
        return self.measured[self.ran] - min(self.measured.values()) if self.ran in self.measured else None


def of_schemes(group: Group) -> list[tuple[Scheme, Rates]]:
    """Each trained scheme of a group, with its trials in the records of the group's studies."""
    rows = [row for study in studies(group.runs) for row in listed(study / RECORD, "schemes")]
    found = []
    for scheme in group.schemes:
        config = scheme.runs[0].config
        if not isinstance(config, Config):
            continue
        found.append((scheme, Rates(config.training.learning_rate, tried(config, rows))))
    return found


def tried(config: Config, rows: Iterable[dict[str, Any]]) -> Tried:
    """The trials of a record that differ from a configuration in learning rate and seed only."""
    found: Tried = {}
    for trial in (trial for row in rows for trial in trials(row)):
        rate, name = number(trial.get("learning_rate")), str(trial.get("id"))
        if rate is None or rate <= 0 or not name.startswith(f"{config.encoding.name}-s0-"):
            continue
        if name == run_id(at_rate(config, rate, seed=0)):
            found[rate] = number(trial.get("nll"))
    return dict(sorted(found.items()))


def trials(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The trials of a record's row; none if the row is malformed."""
    found = row.get("tried")
    return [trial for trial in found if isinstance(trial, dict)] if isinstance(found, list) else []


def at_rate(config: Config, rate: float, seed: int | None = None) -> Config:
    """A configuration with another learning rate and, if given, another seed."""
    training = dataclasses.replace(config.training, learning_rate=rate)
    return dataclasses.replace(config, training=training, seed=config.seed if seed is None else seed)
