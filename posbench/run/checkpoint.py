"""Checkpoints: `<run>/checkpoint/step-XXXXXXXX/` with the weights, the optimizer, plain
state, and their digests.

Neither safetensors nor torch's format notices damage, so a manifest holds the run's id
and a sha256 of each file, and nothing is used unverified. A checkpoint is written to a
temporary folder and renamed: it exists as a whole or not at all.
"""

import hashlib
import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posbench import files
from posbench.errors import UserError
from posbench.run.saved import load_record, other_run

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
PARTS = WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.json"
MANIFEST = "manifest.json"


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

    def fault(self, parts: Sequence[str]) -> str:
        """Return what is wrong if these parts have not the digests that the manifest
        says, or are another run's, else an empty text.
        """
        try:
            manifest = files.json_object((self.path / MANIFEST).read_bytes())
            digests = [manifest["files"][part]["sha256"] for part in parts]
            actual = [files.sha256(self.path / part).hex() for part in parts]
            if (self.step, actual) != (manifest["step"], digests):
                return "is incomplete"
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return "is incomplete"
        record = load_record(self.path.parent.parent)
        return other_run(manifest.get("run"), record)


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

    weights = {}
    for name, tensor in model.items():
        weights[name] = tensor.detach().cpu().contiguous()
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    contents = {
        WEIGHTS: safetensors.torch.save(weights, metadata={"format": "pt"}),
        OPTIMIZER: buffer.getvalue(),
        STATE: json.dumps(state).encode(),
    }
    digests = {}
    for name, part in contents.items():
        digests[name] = {"sha256": hashlib.sha256(part).hexdigest()}
    run = load_record(folder).id
    manifest = {"run": run, "step": step, "files": digests}
    contents[MANIFEST] = json.dumps(manifest).encode()

    path = folder / "checkpoint" / f"step-{step:08d}"
    with files.atomic_folder(path) as new:
        for name, part in contents.items():
            (new / name).write_bytes(part)
        if path.exists():  # it is damaged, or equal
            _remove(path)

    n_kept = 0
    for checkpoint in every(folder):
        is_damaged = checkpoint.step > step  # or this one would not have been made
        if is_damaged or n_kept == 2:
            _remove(checkpoint.path)
        else:
            n_kept += 1
    return path


def every(folder: Path) -> list[Checkpoint]:
    """Return a run's checkpoints, verified or not, newest first by step, since clocks
    jump.
    """
    checkpoints = []
    for path in (folder / "checkpoint").glob("step-*"):
        step = path.name.removeprefix("step-")
        if step.isdecimal():
            checkpoints.append(Checkpoint(int(step), path))
    return sorted(checkpoints, reverse=True)


def newest(folder: Path, parts: tuple[str, ...] = PARTS) -> Checkpoint | None:
    """Return the newest checkpoint of a run whose parts verify; None if there is none,
    UserError if all are damaged.
    """
    fault = ""
    for checkpoint in every(folder):
        fault = checkpoint.fault(parts)
        if not fault:
            return checkpoint
        fault = f"{checkpoint.path.name} {fault}"
        logger.warning("%s: it is not used", fault)
    if fault:
        raise UserError(
            f"no checkpoint in {folder} is complete: {fault};"
            " 'posbench train ... --restart' starts over"
        )
    return None


def at(folder: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint after that many steps; None if it is missing or its weights
    are damaged.
    """
    for saved in every(folder):
        if saved.step == step and not saved.fault([WEIGHTS]):
            return saved
    return None


def trained(folder: Path) -> Checkpoint:
    """Return a run's newest checkpoint whose weights verify, to evaluate or export it;
    UserError if there is none.
    """
    checkpoint = newest(folder, (WEIGHTS,))
    if checkpoint is None:
        raise UserError(
            f"{folder} has no checkpoint: expected the folder of a trained run"
        )
    return checkpoint


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill meanwhile leaves no half
    checkpoint of a valid name.
    """
    files.delete(path.rename(files.temporary(path)))
