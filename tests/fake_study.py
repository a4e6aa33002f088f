"""Run folders as posbench writes them, with numbers whose true values are known. No
model is trained.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from support import changed, encoded

from posbench.config import compose
from posbench.config.schema import Config, to_container
from posbench.results.frame import read
from posbench.results.headline import Headline, headline
from posbench.run.rows import EvaluationRow

RATIOS = (1, 2, 4, 8, 16)
BLOCKS, TARGETS = 48, 8
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
    return read([Path(__file__).parents[1] / "docs" / "rows" / f"{name}.parquet"])


def demo_config() -> Config:
    """Return the demo's configuration as it is composed today."""
    return compose.single(["experiment=demo"])


def configured(template: Config, scheme: str, seed: int, **options: Any) -> Config:
    return changed(encoded(template, scheme, **options), study="fake", seed=seed)


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
    parameters = {"total": 1049728, "encoding": 0, "non_embedding": 787584}
    known = {
        "parameters": parameters,
        "tokens": config.training.tokens if truth else None,
    }
    folder = begin_run(study, config, status, **known | record)
    if truth is not None:
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in _evaluation(config, truth))
        )
    return folder


def headline_of(folder: Path) -> Headline:
    """Return a run's headline: the run in a few numbers."""
    return headline(read([folder]))


def write_study(
    study: Path,
    template: Config,
    schemes: dict[str, Truth] | None = None,
    seeds: int = 5,
) -> Path:
    for scheme, truth in (schemes or SCHEMES).items():
        for seed in range(seeds):
            write_run(study, configured(template, scheme, seed), truth)
    return study


def begin_run(study: Path, config: Config, status: str, **record: Any) -> Path:
    """Write a run folder with nothing but its configuration and its record, and return
    it.
    """
    folder = study / config.id
    name = config.encoding.name
    folder.mkdir(parents=True)
    text = yaml.dump(
        to_container(config),
        Dumper=yaml.CSafeDumper,
        sort_keys=False,
        allow_unicode=True,
    )
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    usual = {
        "schema": 1,
        "id": config.id,
        "study": config.study,
        "encoding": name,
        "seed": config.seed,
        "status": status,
        "tokens": config.training.tokens,
        "command": f"posbench train encoding={name} seed={config.seed}",
        "tokenizer_sha256": "beef" + "0" * 60,
        "train_seconds": 40.0 if name == "none" else 44.0,
        "data": {
            "name": "text",
            "revision": None,
            "sha256": "c0ffee" + "0" * 58,
            "split": "document",
            "tokens": {},
        },
    }
    (folder / "run.json").write_text(json.dumps(usual | record))
    return folder


def _evaluation(config: Config, truth: Truth) -> Iterator[dict[str, Any]]:
    digest = hashlib.sha256(config.encoding.name.encode()).digest()
    trained = config.training.train_length
    rng = np.random.default_rng([config.seed, digest[0], digest[1]])
    # the seed's, alike for all schemes: pairs cancel it
    luck = np.random.default_rng(config.seed).normal(0, 0.02)
    level, steeper = rng.normal(0, 0.01, 2)
    stages = [*truth.earlier, truth]
    for stage, of_stage in enumerate(stages, 1):
        for ratio in (
            RATIOS if of_stage.used is None else (0.125, 0.25, 0.5, 0.75, *RATIOS)
        ):
            for window in (
                [None] if ratio <= 1 or of_stage is not truth else [None, trained]
            ):
                doublings = max(0.0, math.log2(ratio))
                mean = of_stage.nll + luck + level
                mean += (
                    0.002 * doublings
                    if window
                    else (of_stage.rise + steeper) * doublings
                )
                mean += 0.1 * max(
                    0.0, math.log2((of_stage.used or 0.01) / (ratio * trained))
                )
                noise = (
                    0.01
                    if of_stage.used is not None and ratio <= 1
                    else 0.05 + 0.05 * doublings * (window is None)
                )
                sums = (mean + TEXT + rng.normal(0, noise, BLOCKS)) * TARGETS
                row = _row(round(ratio * trained), ratio, window, of_stage, sums)
                if len(stages) > 1:
                    row |= {
                        "tokens": stage * 1_000_000,
                        "checkpoint_step": 12 - len(stages) + stage,
                    }
                yield row


def _row(
    length: int, ratio: float, window: int | None, truth: Truth, sums: np.ndarray
) -> dict[str, Any]:
    place = {
        "protocol": "fixed_target",
        "length": length,
        "length_ratio": float(ratio),
        "window": window,
    }
    place |= {
        "split": "test",
        "documents": "doc",
        "checkpoint_step": 12,
        "dtype": "fp32",
    }
    if ratio > truth.last_ratio:
        return EvaluationRow(
            **place, status="undefined", reason="defined up to 16 tokens"
        ).to_json()
    tokens = BLOCKS * TARGETS
    mean = float(sums.sum() / (BLOCKS * TARGETS))
    units = {
        "document": [*range(BLOCKS)],
        "tokens": [TARGETS] * BLOCKS,
        "nll": sums.tolist(),
    }
    if truth.ngram is not None:
        noise = np.random.default_rng(7).normal(0, 0.2, BLOCKS)
        units["ngram"] = (
            (truth.ngram + TEXT + noise - noise.mean()) * TARGETS
        ).tolist()
    return EvaluationRow(
        **place,
        status="ok",
        targets_sha256="a1" * 32,
        n_tokens=tokens,
        n_bytes=3 * tokens,
        n_blocks=BLOCKS,
        n_documents=BLOCKS,
        seconds=0.5,
        ci_low=mean - 0.3,
        ci_high=mean + 0.3,
        nll=mean,
        perplexity=math.exp(mean),
        bits_per_byte=mean / math.log(2) / 3,
        ngram_nll=truth.ngram,
        units=units,
    ).to_json()
