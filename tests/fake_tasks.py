"""Run folders of tasks as posbench writes them, with answers whose shares are known. No model is trained."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from fake_study import begin_run, write_rows

from posbench.config.schema import Config, EncodingConfig

LONGEST = 16
RATIOS = (0.25, 0.625, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
PROBLEMS, TOKENS = 100, 10  # a place: a thousand tokens, so that a share of three digits is exact
OFFSET = 64


@dataclasses.dataclass(frozen=True)
class Skill:
    """What a run is made to answer: shares of right tokens."""

    trained: float = 1.0  # at every trained length, and with shifted positions
    beyond: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)  # at the longer ones; undefined where there are no more
    steps: int | None = 300  # of the first validation that reaches the gate
    variants: dict[str, float] = dataclasses.field(default_factory=dict)  # at the longest trained length
    extended: dict[str, float] = dataclasses.field(default_factory=dict)  # by extension, at twice that length


def task_config(template: Config, name: str = "copy", **options: Any) -> Config:
    """A configuration like the template's, of a task."""
    task = {"name": name, "shortest": 4, "longest": LONGEST, **options}
    data = dataclasses.replace(template.data, name="problems", source="task", task=task)
    evaluation = dataclasses.replace(template.evaluation, protocols=("problems",), ratios=(1, 2, 4, 8))
    return dataclasses.replace(template, study="fake", data=data, evaluation=evaluation)


def write_task_run(
    study: Path, config: Config, scheme: str, seed: int, skill: Skill | None, status: str = "done", **record: Any
) -> Path:
    """One run folder; `skill` None writes neither rows nor metrics, as of a run that failed."""
    config = dataclasses.replace(config, seed=seed, encoding=EncodingConfig(scheme, {}))
    folder = begin_run(study, config, status, **record)
    if skill is not None:
        write_rows(folder / "evaluation.jsonl", _places(config, skill))
        accuracies = [0.5 if skill.steps is None or step < skill.steps else 0.995 for step in range(100, 1001, 100)]
        metrics = [{"step": 100 * n, "tokens": 100 * n, "validation/accuracy": a} for n, a in enumerate(accuracies, 1)]
        write_rows(folder / "metrics.jsonl", metrics)
    return folder


def _places(config: Config, skill: Skill) -> list[dict[str, Any]]:
    assert config.data.task is not None
    name, known = config.data.task["name"], dict(zip(RATIOS[3:], skill.beyond, strict=False))
    places = [(name, ratio, 0, skill.trained if ratio <= 1 else known.get(ratio)) for ratio in RATIOS]
    places.append((name, 1.0, OFFSET, skill.trained))
    places += [(f"{name}:{variant}", 1.0, 0, share) for variant, share in skill.variants.items()]
    found = [_place(*place) for place in places]
    return found + [_place(name, 2.0, 0, share, extension) for extension, share in skill.extended.items()]


def _place(task: str, ratio: float, offset: int, share: float | None, extension: str | None = None) -> dict[str, Any]:
    row = {
        "protocol": "problems", "length": int(2 * ratio * LONGEST + 2), "length_ratio": ratio, "stride": None,
        "window": None, "extension": extension, "task": task, "split": "test", "checkpoint_step": 1000,
        "problem_length": int(ratio * LONGEST), "offset": offset, "dtype": "fp32",
        "targets_sha256": hashlib.sha256(f"{task} {ratio}".encode()).hexdigest(),
    }  # fmt: skip
    if share is None:
        return row | {"status": "undefined", "reason": "defined up to 16"}
    wrong = round((1 - share) * PROBLEMS * TOKENS)
    correct = [TOKENS - wrong // PROBLEMS - (n < wrong % PROBLEMS) for n in range(PROBLEMS)]
    exact = sum(right == TOKENS for right in correct) / PROBLEMS
    row |= {"status": "ok", "n_tokens": PROBLEMS * TOKENS, "n_blocks": PROBLEMS, "nll": 2 * (1 - share)}
    if task.startswith("passkey"):  # rows of other tasks are like those of earlier versions
        row |= {"n_distinct": PROBLEMS, "chance": 0.1, "trivial": 0.66}
    row |= {"accuracy": sum(correct) / (PROBLEMS * TOKENS), "exact_match": exact}
    return row
