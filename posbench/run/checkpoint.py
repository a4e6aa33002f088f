"""Checkpoints: `<run>/checkpoint/step-XXXXXXXX/` with the weights, the optimizer, plain state, and their digests.

Neither safetensors nor torch's format notices damage, so a manifest holds a sha256 of each file, and nothing is used
unverified. A checkpoint is written to a temporary folder and renamed: it exists as a whole or not at all.
"""

import hashlib
import io
import json
import logging
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posbench import files
from posbench.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
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
        """The optimizer's state dict, its tensors on the CPU."""
        import torch

        path = self.path / OPTIMIZER
        try:  # weights_only spelt out: an environment variable can turn the default off
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # torch's own message suggests disabling weights_only: not shown
            raise UserError(f"{path} is not an optimizer state: expected tensors and plain values") from None
        return state

    def state(self) -> dict[str, Any]:
        """What else was saved; plain JSON types."""
        state: dict[str, Any] = json.loads((self.path / STATE).read_bytes())
        return state

    def verifies(self, parts: Sequence[str]) -> bool:
        """Whether these parts are what the manifest says."""
        try:
            manifest = json.loads((self.path / _MANIFEST).read_bytes())
            digests = [manifest["files"][part]["sha256"] for part in parts]
            step: int = manifest["step"]
            return step == self.step and digests == [files.sha256(self.path / part).hex() for part in parts]
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return False


def save(folder: Path, step: int, model: dict[str, "Tensor"], optimizer: dict[str, Any], state: dict[str, Any]) -> Path:
    """Write the checkpoint of a step and keep the two newest. RunFailed if the disk is full; earlier ones are intact.

    Args:
        model: state dict without tied duplicates.
        state: what else a resumed run needs; plain JSON types.
    """
    import safetensors.torch
    import torch

    path, buffer = folder / "checkpoint" / f"step-{step:08d}", io.BytesIO()
    torch.save(optimizer, buffer)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
    data = safetensors.torch.save(weights, metadata={"format": "pt"}), buffer.getvalue(), json.dumps(state).encode()
    contents = dict(zip(PARTS, data, strict=True))
    digests = {name: {"sha256": hashlib.sha256(part).hexdigest()} for name, part in contents.items()}
    contents[_MANIFEST] = json.dumps({"step": step, "files": digests}).encode()
    with files.atomic_folder(path, sum(map(len, contents.values()))) as new:
        for name, part in contents.items():
            (new / name).write_bytes(part)
        _remove([path] if path.exists() else [])  # of this step already: damaged, or the same again
    prune(folder, step)
    return path


def prune(folder: Path, step: int) -> None:
    """Keep the two newest up to a step; a later one is damaged: the run skipped it when it resumed from an earlier."""
    checkpoints = every(folder)
    newest = [each for each in checkpoints if each.step <= step][:2]
    _remove(each.path for each in checkpoints if each not in newest)


def every(folder: Path) -> list[Checkpoint]:
    """A run's checkpoints, verified or not, newest first: by number, since clocks jump."""
    paths = (folder / "checkpoint").glob("step-*")
    return sorted((Checkpoint(int(path.name[5:]), path) for path in paths if path.name[5:].isdecimal()), reverse=True)


def newest(folder: Path, parts: tuple[str, ...] = PARTS) -> Checkpoint | None:
    """The newest checkpoint of a run whose parts verify; None if there is none, UserError if all are damaged.

    If the disk fails that is raised, and no older checkpoint is used instead: it would be another model.
    """
    checkpoints = every(folder)
    for checkpoint in checkpoints:
        if checkpoint.verifies(parts):
            if checkpoint != checkpoints[0]:
                logger.warning("%s is incomplete: %s is used", checkpoints[0].path.name, checkpoint.path.name)
            return checkpoint
    if checkpoints:
        names = ", ".join(checkpoint.path.name for checkpoint in checkpoints)
        raise UserError(f"no checkpoint in {folder} is complete ({names}): --restart starts over")
    return None


def at(folder: Path, step: int, *parts: str) -> Checkpoint | None:
    """The checkpoint after that many steps; None if it is missing or a part is damaged."""
    return next((each for each in every(folder) if each.step == step and each.verifies(parts)), None)


def trained(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run whose weights verify, to evaluate or to export; UserError if there is none."""
    if (checkpoint := newest(folder, (WEIGHTS,))) is None:
        raise UserError(f"{folder} has no checkpoint: expected the folder of a trained run")
    return checkpoint


def keep_weights(folder: Path, steps: int) -> None:
    """Delete a finished run's checkpoints but the newest weights, if these verify: all that is read."""
    if last := at(folder, steps, WEIGHTS):
        _remove(each.path for each in every(folder) if each != last)
        (last.path / OPTIMIZER).unlink(missing_ok=True)


def _remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints. Renamed first, so that a kill in the middle leaves no half checkpoint of a valid name."""
    for path in paths:
        files.delete(path.rename(files.temporary(path)))
