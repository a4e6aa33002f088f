"""What the sweeps of a study were typed with: `sweep.json` beside its runs."""

import json
from pathlib import Path

from posbench import files

SWEEP = "sweep.json"


def record(runs: list[Path], words: list[str], config_dir: Path | None) -> None:
    """Note what the sweep was typed with that these run folders belong to."""
    if config_dir:
        words = [*words, f"--config-dir={config_dir}"]
    by_study: dict[Path, dict[str, list[str]]] = {}
    for run in runs:
        by_study.setdefault(run.parent, {})[run.name] = words
    for study, names in by_study.items():
        known = words_by_run(study) | names
        files.write(study / SWEEP, json.dumps(known, indent=2).encode())


def words_by_run(study: Path) -> dict[str, list[str]]:
    """Return the words of each run's newest sweep, by the run's name."""
    path = study / SWEEP
    if not path.is_file():
        return {}
    return files.read_json(path)
