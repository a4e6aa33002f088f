"""Checkpoints: `<run>/checkpoint/step-XXXXXXXX/` with the weights, the optimizer, plain state, and their digests.

Neither safetensors nor torch's format notices damage, so a manifest holds a sha256 of each file, and nothing is used
unverified. A checkpoint is written to a temporary folder and renamed: it exists as a whole or not at all.
"""

import dataclasses
import hashlib
import io
import json
import logging
import os
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench import files
from posbench.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")
_SCHEMA, _KEEP = 1, 2
PARTS = WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.json"
_MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run: parts whose digests are the manifest's. A part is given once."""

    step: int
    path: Path
    _contents: dict[str, bytes] = dataclasses.field(repr=False)  # verified and not yet used, by file

    def weights(self) -> dict[str, "Tensor"]:
        """The model's weights, on the CPU."""
        import safetensors.torch

        return safetensors.torch.load(self._contents.pop(WEIGHTS))

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict, its tensors on the CPU. Raises UserError if it is none of posbench's."""
        import torch

        data = io.BytesIO(self._contents.pop(OPTIMIZER))
        try:  # weights_only spelt out: an environment variable can turn the default off
            state: dict[str, Any] = torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # torch's own message suggests disabling weights_only: not shown
            wrong = f"{self.path / OPTIMIZER} is not an optimizer state of posbench: expected tensors and plain values"
            raise UserError(wrong) from None
        return state

    def state(self) -> dict[str, Any]:
        """What else was saved; plain JSON types."""
        state: dict[str, Any] = json.loads(self._contents.pop(STATE))
        return state

    def digest(self, name: str) -> str:
        """The sha256 of a part that was verified and not yet read."""
        return hashlib.sha256(self._contents[name]).hexdigest()


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

    path = folder / "checkpoint" / f"step-{step:08d}"
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
    contents = {
        WEIGHTS: safetensors.torch.save(weights, metadata={"format": "pt"}),
        OPTIMIZER: buffer.getvalue(),
        STATE: json.dumps(state).encode(),
    }
    manifest = {"schema": _SCHEMA, "step": step, "files": {name: _entry(data) for name, data in contents.items()}}
    contents[_MANIFEST] = json.dumps(manifest, separators=(",", ":")).encode()
    new = files.temporary(path)
    with files.full_disk_as_failure(path, sum(map(len, contents.values()))):
        try:
            new.mkdir()
            for name, data in contents.items():
                files.write_new(new / name, data)
            files.sync_folder(new)
            _remove([path] if os.path.lexists(path) else [])  # of this step already: damaged, or the same again
            os.rename(new, path)
            files.sync_folder(path.parent)
        except BaseException:
            files.delete(new)
            raise
    prune(folder, step)
    return path


def prune(folder: Path, step: int) -> None:
    """Keep the two newest up to a step; a later one is damaged: the run skipped it when it resumed from an earlier."""
    steps = _steps(folder)
    newest = [at for at in steps if at <= step][:_KEEP]
    _remove(steps[at] for at in steps if at not in newest)


def newest(folder: Path, parts: tuple[str, ...] = PARTS) -> Checkpoint | None:
    """The newest checkpoint of a run whose parts verify; None if there are no checkpoints.

    Raises:
        UserError: there are checkpoints and all are damaged.
    """
    skipped: list[str] = []
    for step, path in _steps(folder).items():
        try:
            found = Checkpoint(step, path, _verified(path, step, parts))
        except _DamagedError as damage:
            skipped.append(f"{path.name} is incomplete ({damage})")
            continue
        for line in skipped:
            logger.warning("%s: newest complete checkpoint is %s, which is used", line, path.name)
        return found
    if skipped:
        raise UserError(f"no checkpoint in {folder} is complete: {'; '.join(skipped)}; --restart starts over")
    return None


def at(folder: Path, step: int, *parts: str) -> Checkpoint | None:
    """The checkpoint after that many steps; None if it is missing or a part is damaged."""
    path = _steps(folder).get(step)
    try:
        return None if path is None else Checkpoint(step, path, _verified(path, step, parts))
    except _DamagedError:
        return None


def trained(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run whose weights verify, to evaluate or to export; UserError if there is none."""
    found = newest(folder, (WEIGHTS,))
    if found is None:
        raise UserError(f"{folder} has no checkpoint: expected the folder of a trained run")
    return found


def keep_weights(folder: Path, steps: int) -> int:
    """Delete a finished run's checkpoints but the newest weights: all that is read. Returns bytes freed.

    Nothing if the newest are damaged, or not those after all `steps`: training makes these again.
    """
    found = newest(folder, (WEIGHTS,))
    if found is None or found.path != next(iter(_steps(folder).values())) or found.step < steps:
        return 0
    before = files.size(folder / "checkpoint")
    _remove(path for path in _steps(folder).values() if path != found.path)
    (found.path / OPTIMIZER).unlink(missing_ok=True)
    return before - files.size(folder / "checkpoint")


def _entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _steps(folder: Path) -> dict[int, Path]:
    """Checkpoint folders by step, newest first: by number, since clocks jump. Other names are skipped."""
    paths = (folder / "checkpoint").glob("step-*")
    found = {int(match[1]): path for path in paths if (match := _STEP.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items(), reverse=True))


class _DamagedError(Exception):
    """Which file of a checkpoint is damaged, and how."""


def _verified(path: Path, step: int, names: Iterable[str]) -> dict[str, bytes]:
    """Contents of the named files, each equal to what the manifest says of it.

    Raises:
        OSError: the disk fails. That says nothing about the content, so no older checkpoint is used instead: it would
            be another model.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        entries = manifest["files"]
        if manifest["schema"] != _SCHEMA or manifest["step"] != step:
            raise ValueError
        contents = {name: (path / name).read_bytes() for name in names}
    except FileNotFoundError as error:
        raise _DamagedError(f"{Path(error.filename).name}: missing") from None
    except (ValueError, KeyError, TypeError):
        raise _DamagedError(f"{_MANIFEST}: not a manifest of this step") from None
    if wrong := next((name for name in contents if entries.get(name) != _entry(contents[name])), None):
        raise _DamagedError(f"{wrong}: checksum differs")
    return contents


def _remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints. Renamed first, so that a kill in the middle leaves no half checkpoint of a valid name."""
    for path in paths:
        try:
            going = files.temporary(path)
            os.rename(path, going)
            files.delete(going)
        except OSError as error:
            logger.warning("could not remove the old checkpoint %s (%s)", path, error.strerror)
