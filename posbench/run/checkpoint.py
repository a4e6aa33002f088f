"""Checkpoints: `<run>/checkpoint/step-XXXXXXXX/` with the weights, the optimizer, plain
state, and their digests.

Neither safetensors nor torch's format notices damage, so a manifest holds a sha256 of
each file, and nothing is used unverified. A checkpoint is written to a temporary folder
and renamed: it exists as a whole or not at all.
"""

import hashlib
import io
import json
import logging
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
        """Return the model's weights, on the CPU."""
        import safetensors.torch

        return safetensors.torch.load_file(self.path / WEIGHTS)

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state dict, its tensors on the CPU."""
        import torch

        # weights_only spelt out: an environment variable can turn the default off
        return dict(
            torch.load(self.path / OPTIMIZER, map_location="cpu", weights_only=True)
        )

    def state(self) -> dict[str, Any]:
        """Return what else was saved; plain JSON types."""
        return dict(json.loads((self.path / STATE).read_bytes()))

    def verifies(self, parts: Sequence[str]) -> bool:
        """Return whether these parts have the digests that the manifest says."""
        try:
            manifest = json.loads((self.path / _MANIFEST).read_bytes())
            digests = [manifest["files"][part]["sha256"] for part in parts]
            actual = [files.sha256(self.path / part).hex() for part in parts]
            return (self.step, actual) == (manifest["step"], digests)
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return False


def save(
    folder: Path,
    step: int,
    model: dict[str, "Tensor"],
    optimizer: dict[str, Any],
    state: dict[str, Any],
) -> Path:
    """Write the checkpoint of a step and keep the two newest. Raises RunFailed if the
    disk is full.
    """
    import safetensors.torch
    import torch

    path, buffer = folder / "checkpoint" / f"step-{step:08d}", io.BytesIO()
    torch.save(optimizer, buffer)
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.items()
    }
    data = (
        safetensors.torch.save(weights, metadata={"format": "pt"}),
        buffer.getvalue(),
        json.dumps(state).encode(),
    )
    contents = dict(zip(PARTS, data, strict=True))
    digests = {
        name: {"sha256": hashlib.sha256(part).hexdigest()}
        for name, part in contents.items()
    }
    contents[_MANIFEST] = json.dumps({"step": step, "files": digests}).encode()
    with files.atomic_folder(path, sum(map(len, contents.values()))) as new:
        for name, part in contents.items():
            (new / name).write_bytes(part)
        # an earlier one of this step is damaged, or equal
        _remove([path] if path.exists() else [])
    # later ones are damaged
    checkpoints = [
        checkpoint for checkpoint in every(folder) if checkpoint.step <= step
    ]
    _remove(
        checkpoint.path
        for checkpoint in every(folder)
        if checkpoint not in checkpoints[:2]
    )
    return path


def every(folder: Path) -> list[Checkpoint]:
    """Return a run's checkpoints, verified or not, newest first by step, since clocks
    jump.
    """
    paths = (folder / "checkpoint").glob("step-*")
    return sorted(
        (
            Checkpoint(int(path.name[5:]), path)
            for path in paths
            if path.name[5:].isdecimal()
        ),
        reverse=True,
    )


def newest(folder: Path, parts: tuple[str, ...] = PARTS) -> Checkpoint | None:
    """Return the newest checkpoint of a run whose parts verify; None if there is none,
    UserError if all are damaged.
    """
    checkpoints = every(folder)
    for checkpoint in checkpoints:
        if checkpoint.verifies(parts):
            return checkpoint
        logger.warning("%s is incomplete: it is not used", checkpoint.path.name)
    if checkpoints:
        raise UserError(f"no checkpoint in {folder} is complete: --restart starts over")
    return None


def at(folder: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint after that many steps; None if it is missing or its weights
    are damaged.
    """
    return next(
        (
            saved
            for saved in every(folder)
            if saved.step == step and saved.verifies([WEIGHTS])
        ),
        None,
    )


def trained(folder: Path) -> Checkpoint:
    """Return a run's newest checkpoint whose weights verify, to evaluate or export it;
    UserError if there is none.
    """
    if (checkpoint := newest(folder, (WEIGHTS,))) is None:
        raise UserError(
            f"{folder} has no checkpoint: expected the folder of a trained run"
        )
    return checkpoint


def _remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints. Each is renamed first, so that a kill meanwhile leaves no
    half checkpoint of a valid name.
    """
    for path in paths:
        files.delete(path.rename(files.temporary(path)))
