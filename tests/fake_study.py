"""Run folders as posbench writes them, with numbers whose true values are known. No
model is trained.
"""

import dataclasses
import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from support import changed, encoded

from posbench.config.schema import Config, to_container
from posbench.launch import compose
from posbench.results.compare import compare
from posbench.results.comparison import Comparison
from posbench.results.frame import read
from posbench.results.headline import Headline, headline
from posbench.run.rows import EvaluationRow

ROOT = Path(__file__).parents[1]
RATIOS = (1, 2, 4, 8, 16)
BLOCKS = 48
TARGETS = 8
TEXT = np.random.default_rng(99).normal(0.0, 1.1, BLOCKS)
TEXT -= TEXT.mean()  # how hard each block is, the same for all runs


@dataclasses.dataclass(frozen=True)
class Truth:
    """The true values of a scheme: nll at the training length, and its rise per
    doubling, in nats per token.
    """

    nll: float
    rise: float
    last_ratio: int = 16  # rows beyond it are undefined
    ngram: float | None = None  # nll of the best n-gram model on the same targets
    # tokens of context; each halving below them costs 0.1 nats. None: no rows below 1x
    used: int | None = None
    # at earlier checkpoints, one every million tokens
    earlier: tuple["Truth", ...] = ()


SCHEMES = {
    "rope": Truth(3.66, 0.16),
    "alibi": Truth(3.655, 0.006),
    "none": Truth(3.92, 0.10),
    "t5": Truth(3.70, 0.12),
    "sinusoidal": Truth(3.90, 0.34),
    "learned": Truth(3.88, 0.0, last_ratio=1),
}


@functools.cache
def rows_of_study(name: str) -> pd.DataFrame:
    """Return the rows of a study of docs/rows."""
    return read([ROOT / "docs" / "rows" / f"{name}.parquet"])


@functools.cache
def comparison_of_study(name: str) -> Comparison:
    """Return the comparison of a study of docs/rows."""
    return compare(rows_of_study(name))


@functools.cache
def demo_config() -> Config:
    """Return the demo's configuration as it is composed today."""
    return compose.single(["experiment=demo"])


def configured(scheme: str, seed: int, **options: Any) -> Config:
    """Return the demo's configuration with another encoding."""
    config = encoded(demo_config(), scheme, **options)
    return changed(config, study="fake", seed=seed)


PARAMETERS = {"total": 1049728, "encoding": 0, "non_embedding": 787584}


def write_run(
    study: Path,
    config: Config,
    truth: Truth | None,
    status: str = "done",
    **record: Any,
) -> Path:
    """Write a run folder and return it; with `truth` None it has no evaluation, like
    that of a run that failed.
    """
    known = {"parameters": PARAMETERS}
    if truth is None:
        known["tokens"] = None
    folder = begin_run(study, config, status, **known | record)
    if truth is not None:
        with (folder / "rows.jsonl").open("w") as file:
            for row in _evaluation(config, truth):
                file.write(json.dumps({"run": config.id, **row}) + "\n")
    return folder


def headline_of(folder: Path) -> Headline:
    """Return a run's headline: the run in a few numbers."""
    return headline(read([folder]))


def write_study(
    study: Path,
    schemes: dict[str, Truth] | None = None,
    seeds: int = 5,
) -> Path:
    for scheme, truth in (schemes or SCHEMES).items():
        for seed in range(seeds):
            config = configured(scheme, seed)
            write_run(study, config, truth)
    return study


DATA = {
    "name": "text",
    "revision": None,
    "sha256": "c0ffee" + "0" * 58,
    "split": "document",
    "tokens": {},
}


def begin_run(study: Path, config: Config, status: str, **record: Any) -> Path:
    """Write a run folder with nothing but its configuration and its record, and return
    it.
    """
    folder = study / config.id
    name = config.encoding.name
    folder.mkdir(parents=True)
    text = yaml.dump(to_container(config), Dumper=yaml.CSafeDumper)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    usual = {
        "schema": 3,
        "id": config.id,
        "study": config.study,
        "encoding": name,
        "seed": config.seed,
        "status": status,
        "tokens": config.training.tokens,
        "command": f"posbench train encoding={name} seed={config.seed}",
        "tokenizer_sha256": "beef" + "0" * 60,
        "train_seconds": 44.0,
        "data": DATA,
    }
    if name == "none":
        usual["train_seconds"] = 40.0
    (folder / "run.json").write_text(json.dumps(usual | record))
    return folder


def _evaluation(config, truth):
    """Yield the rows of a run, by checkpoint, length and window."""
    encoding = hashlib.sha256(config.encoding.name.encode()).digest()
    rng = np.random.default_rng([config.seed, encoding[0], encoding[1]])
    # the seed's, alike for all schemes: pairs cancel it
    luck = np.random.default_rng(config.seed).normal(0, 0.02)
    level, steeper = rng.normal(0, 0.01, 2)
    trained = config.training.train_length

    stages = [*truth.earlier, truth]
    for stage, of_stage in enumerate(stages, 1):
        nll = of_stage.nll + luck + level
        rise = of_stage.rise + steeper
        lucky = dataclasses.replace(of_stage, nll=nll, rise=rise)
        for ratio in _ratios(of_stage):
            length = round(ratio * trained)
            windows = [None]
            if ratio > 1 and of_stage is truth:
                windows.append(trained)
            for window in windows:
                sums = _sums(lucky, ratio, window, trained, rng)
                row = _row(length, ratio, window, of_stage, sums)
                if len(stages) > 1:
                    row["tokens"] = stage * 1_000_000
                    row["checkpoint_step"] = 12 - len(stages) + stage
                yield row


def _ratios(truth):
    if truth.used is None:
        return RATIOS
    return (0.125, 0.25, 0.5, 0.75, *RATIOS)


def _sums(truth, ratio, window, trained, rng):
    """Return the nats of each block: the truth, the text, and noise."""
    doublings = max(0.0, math.log2(ratio))
    rise = 0.002 if window else truth.rise
    mean = truth.nll + rise * doublings
    if truth.used is not None:
        missing = truth.used / (ratio * trained)
        halvings = max(0.0, math.log2(missing))
        mean += 0.1 * halvings

    spread = 0.05
    if truth.used is not None and ratio <= 1:
        spread = 0.01
    elif window is None:
        spread += 0.05 * doublings
    noise = rng.normal(0, spread, BLOCKS)
    return (mean + TEXT + noise) * TARGETS


def _row(length, ratio, window, truth, sums):
    place = {
        "protocol": "fixed_target",
        "length": length,
        "length_ratio": float(ratio),
        "window": window,
        "split": "test",
        "documents": "doc",
        "checkpoint_step": 12,
        "dtype": "fp32",
    }
    if ratio > truth.last_ratio:
        reason = "defined up to 16 tokens"
        return EvaluationRow(**place, status="undefined", reason=reason).to_json()

    n_tokens = BLOCKS * TARGETS
    nll = float(sums.sum() / n_tokens)
    result = {
        "targets_sha256": "a1" * 32,
        "n_tokens": n_tokens,
        "n_bytes": 3 * n_tokens,
        "n_blocks": BLOCKS,
        "n_documents": BLOCKS,
        "seconds": 0.5,
        "ci_low": nll - 0.3,
        "ci_high": nll + 0.3,
        "nll": nll,
        "perplexity": math.exp(nll),
        "bits_per_byte": nll / math.log(2) / 3,
        "ngram_nll": truth.ngram,
        "units": _units(truth, sums),
    }
    return EvaluationRow(**place, status="ok", **result).to_json()


def _units(truth, sums):
    """Return the sums by block, each of which is a document."""
    units = {
        "document": list(range(BLOCKS)),
        "tokens": [TARGETS] * BLOCKS,
        "nll": sums.tolist(),
    }
    if truth.ngram is not None:
        noise = np.random.default_rng(7).normal(0, 0.2, BLOCKS)
        noise -= noise.mean()
        nats = (truth.ngram + TEXT + noise) * TARGETS
        units["ngram"] = nats.tolist()
    return units
