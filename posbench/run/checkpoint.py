"""Checkpoints: `<run>/checkpoint/step-XXXXXXXX/` with the weights, the optimizer, plain state, and their digests.

Neither safetensors nor torch's format notices damage, so a manifest holds a sha256 of each file, and nothing is used
unverified. A checkpoint is written to a temporary folder and renamed: it exists as a whole or not at all.
"""

import hashlib
import io
import json
import logging
import os
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posbench import files
from posbench.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")
_SCHEMA, _KEEP = 1, 2
PARTS = WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.json"
_MANIFEST = "manifest.json"


class Checkpoint(NamedTuple):
    """A checkpoint of a run."""

    step: int
    path: Path

    def weights(self) -> dict[str, "Tensor"]:
        """The model's weights, on the CPU."""
        import safetensors.torch

        return safetensors.torch.load_file(self.path / WEIGHTS)

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict, its tensors on the CPU. Raises UserError if it is none of posbench's."""
        import torch

        try:  # weights_only spelt out: an environment variable can turn the default off
            state: dict[str, Any] = torch.load(self.path / OPTIMIZER, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # torch's own message suggests disabling weights_only: not shown
            wrong = f"{self.path / OPTIMIZER} is not an optimizer state of posbench: expected tensors and plain values"
            raise UserError(wrong) from None
        return state

    def state(self) -> dict[str, Any]:
        """What else was saved; plain JSON types."""
        state: dict[str, Any] = json.loads((self.path / STATE).read_bytes())
        return state

    def digest(self, part: str) -> str:
        """The sha256 of a part."""
        return files.sha256(self.path / part).hex()

    def damage(self, parts: Iterable[str]) -> str | None:
        """Which of the parts is not what the manifest says, and how; None if all are."""
        try:
            manifest = json.loads((self.path / _MANIFEST).read_bytes())
            entries, of_this_step = manifest["files"], (manifest["schema"], manifest["step"]) == (_SCHEMA, self.step)
            wrong = next((name for name in parts if entries[name]["sha256"] != self.digest(name)), None)
        except FileNotFoundError as error:
            return f"{Path(error.filename).name}: missing"
        except (ValueError, KeyError, TypeError):
            of_this_step, wrong = False, None
        if not of_this_step:
            return f"{_MANIFEST}: not a manifest of this step"
        return wrong and f"{wrong}: checksum differs"


def save(folder: Path, step: int, model: dict[str, "Tensor"], optimizer: dict[str, Any], state: dict[str, Any]) -> Path:
    """Write the checkpoint of a step into a run folder and keep the two newest.

    Args:
        model: state dict without tied duplicates.
        optimizer: the optimizer's state dict; tensors and plain types only.
        state: what else a resumed run needs; plain JSON types.

    Raises:
        RunFailed: no room on the disk (reason `disk`); earlier checkpoints are intact.
    """
    import safetensors.torch
    import torch

    path, buffer = folder / "checkpoint" / f"step-{step:08d}", io.BytesIO()
    torch.save(optimizer, buffer)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
    data = safetensors.torch.save(weights, metadata={"format": "pt"}), buffer.getvalue(), json.dumps(state).encode()
    contents = dict(zip(PARTS, data, strict=True))
    entries = {name: {"sha256": hashlib.sha256(part).hexdigest()} for name, part in contents.items()}
    contents[_MANIFEST] = json.dumps({"schema": _SCHEMA, "step": step, "files": entries}).encode()
    with files.atomic_folder(path, sum(map(len, contents.values()))) as new:
        for name, part in contents.items():
            (new / name).write_bytes(part)
        _remove([path] if os.path.lexists(path) else [])  # of this step already: damaged, or the same again
    prune(folder, step)
    return path


def prune(folder: Path, step: int) -> None:
    """Keep the two newest up to a step; a later one is damaged: the run skipped it when it resumed from an earlier."""
    found = every(folder)
    newest = [each for each in found if each.step <= step][:_KEEP]
    _remove(each.path for each in found if each not in newest)


def every(folder: Path) -> list[Checkpoint]:
    """A run's checkpoints, verified or not, newest first: by number, since clocks jump."""
    paths = (folder / "checkpoint").glob("step-*")
    found = [Checkpoint(int(match[1]), path) for path in paths if (match := _STEP.fullmatch(path.name))]
    return sorted(found, reverse=True)


def newest(folder: Path, parts: tuple[str, ...] = PARTS) -> Checkpoint | None:
    """The newest checkpoint of a run whose parts verify; None if there are no checkpoints.

    Raises:
        UserError: there are checkpoints and all are damaged.
        OSError: the disk fails. No older checkpoint is used instead: it would be another model.
    """
    skipped: list[str] = []
    for checkpoint in every(folder):
        if damage := checkpoint.damage(parts):
            skipped.append(f"{checkpoint.path.name} is incomplete ({damage})")
            continue
        for line in skipped:
            logger.warning("%s: newest complete checkpoint is %s, which is used", line, checkpoint.path.name)
        return checkpoint
    if skipped:
        raise UserError(f"no checkpoint in {folder} is complete: {'; '.join(skipped)}; --restart starts over")
    return None


def at(folder: Path, step: int, *parts: str) -> Checkpoint | None:
    """The checkpoint after that many steps; None if it is missing or a part is damaged."""
    return next((each for each in every(folder) if each.step == step and not each.damage(parts)), None)


def trained(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run whose weights verify, to evaluate or to export; UserError if there is none."""
    if (found := newest(folder, (WEIGHTS,))) is None:
        raise UserError(f"{folder} has no checkpoint: expected the folder of a trained run")
    return found


def keep_weights(folder: Path, steps: int) -> int:
    """Delete a finished run's checkpoints but the newest weights: all that is read. Returns bytes freed.

    Nothing if the newest are damaged, or not those after all `steps`: training makes these again.
    """
    last = at(folder, steps, WEIGHTS)
    if last is None:
        return 0
    before = files.size(folder / "checkpoint")
    _remove(each.path for each in every(folder) if each != last)
    (last.path / OPTIMIZER).unlink(missing_ok=True)
    return before - files.size(folder / "checkpoint")


def _remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints. Renamed first, so that a kill in the middle leaves no half checkpoint of a valid name."""
    for path in paths:
        try:
            files.delete(path.rename(files.temporary(path)))
        except OSError as error:
            logger.warning("could not remove the old checkpoint %s (%s)", path, error.strerror)
