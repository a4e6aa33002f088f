"""Checkpoints: `<run>/checkpoint/step-XXXXXXXX/` with the weights, the optimizer, plain state, and their digests.

Neither format notices damage by itself, so a manifest holds a sha256 of each file and nothing is used unverified.
A checkpoint is written beside its place and renamed into it: it is there as a whole or not at all. Bytes are made
in memory first (one transient copy of the checkpoint), so that what is hashed is what is written and what is read.
"""

import dataclasses
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench import files
from posbench.errors import UserError
from posbench.runs.folder import refuse_other_block

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")
_SCHEMA = 1
_KEEP = 2
_LARGEST_MANIFEST = 2**20  # bytes
_MOST_TENSORS = 50_000
_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of this machine
_MODEL, _OPTIMIZER, _STATE, _MANIFEST = "model.safetensors", "optimizer.pt", "state.json", "manifest.json"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint whose every file verified; tensors are on the CPU."""

    step: int
    path: Path
    model: dict[str, "Tensor"]
    optimizer: dict[str, Any]
    state: dict[str, Any]


def save(folder: Path, step: int, model: dict[str, "Tensor"], optimizer: dict[str, Any], state: dict[str, Any]) -> Path:
    """Write the checkpoint of a step into a run folder and keep the two newest.

    Args:
        model: state dict without tied duplicates.
        optimizer: the optimizer's state dict; tensors and plain types only.
        state: what else a resumed run needs; plain JSON types.

    Raises:
        RunFailed: no room on the disk (reason `disk`); earlier checkpoints are intact.
    """
    parent = folder / "checkpoint"
    parent.mkdir(exist_ok=True)
    path = parent / f"step-{step:08d}"
    contents = _serialised(model, optimizer, state)
    contents[_MANIFEST] = _manifest(step, contents)
    new = files.temporary(path)
    with files.full_disk_as_failure(path, sum(map(len, contents.values()))):
        try:
            new.mkdir()
            for name, data in contents.items():
                files.write_new(new / name, data)
            files.sync_folder(new)
            _remove([path] if os.path.lexists(path) else [])  # of this step already: damaged, or the same again
            os.rename(new, path)
            files.sync_folder(parent)
        except BaseException:
            files.delete(new)
            raise
    # A later step than this one is damaged: it was passed over when the run continued from before it.
    steps = _steps(folder)
    kept = [at for at in steps if at <= step][:_KEEP]
    _remove(steps[at] for at in steps if at not in kept)
    return path


def newest(folder: Path) -> Loaded | None:
    """The newest checkpoint of a run that verifies, or None where there are none.

    Raises:
        UserError: there are checkpoints and all are damaged, or the newest cannot be read.
    """
    found = _newest_verified(folder, (_MODEL, _OPTIMIZER, _STATE))
    if found is None:
        return None
    step, path, contents = found
    return Loaded(step, path, _tensors(path, contents), _optimizer(path, contents), _state(path, contents))


def load_model(folder: Path) -> tuple[int, dict[str, "Tensor"]]:
    """Step and weights of the newest checkpoint whose weights verify.

    Raises:
        UserError: no checkpoint, none that verifies, one that cannot be read, or weights for another definition of
            the model's block.
    """
    found = _newest_verified(folder, (_MODEL,))
    if found is None:
        raise UserError(f"{folder} has no checkpoint: expected the folder of a trained run")
    refuse_other_block(folder)
    step, path, contents = found
    return step, _tensors(path, contents)


def newest_weights(folder: Path) -> Path:
    """The file with the weights of the newest checkpoint that verifies.

    Raises:
        UserError: there is none.
    """
    found = _newest_verified(folder, (_MODEL,))
    if found is None:
        raise UserError(f"{folder} has no checkpoint: expected the folder of a trained run")
    return found[1] / _MODEL


def weights_at(folder: Path, step: int) -> "dict[str, Tensor] | None":
    """The weights after that many steps; None where that checkpoint is not there or does not verify."""
    path = _steps(folder).get(step)
    try:
        return None if path is None else _tensors(path, _verified(path, step, (_MODEL,)))
    except _DamagedError:
        return None


def state_at(folder: Path, step: int) -> dict[str, Any]:
    """What was saved beside the weights after that many steps; empty where that is not there or does not verify."""
    path = _steps(folder).get(step)
    try:
        state = {} if path is None else json.loads(_verified(path, step, (_STATE,))[_STATE])
    except (_DamagedError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def newest_state(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Step and state of the newest checkpoint whose state verifies; None where there are no checkpoints.

    Raises:
        UserError: there are checkpoints and all are damaged, or what was saved is not the state of a run.
    """
    found = _newest_verified(folder, (_STATE,))
    return None if found is None else (found[0], _state(*found[1:]))


def keep_weights(folder: Path) -> int:
    """Of a finished run's checkpoints keep the weights of the newest that verifies; they are all that is still read.

    Returns:
        Bytes freed.
    """
    found = _newest_verified(folder, (_MODEL,))
    if found is None:
        return 0
    before = _size(folder / "checkpoint")
    _remove(path for path in _steps(folder).values() if path != found[1])
    (found[1] / _OPTIMIZER).unlink(missing_ok=True)
    return before - _size(folder / "checkpoint")


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _tensors(path: Path, contents: dict[str, bytes]) -> dict[str, "Tensor"]:
    import safetensors
    import safetensors.torch

    _refuse_many(path / _MODEL, contents[_MODEL])
    try:
        return safetensors.torch.load(contents[_MODEL])
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a type of numbers that torch does not have
        raise UserError(f"{path / _MODEL} is not a safetensors file: {error}") from None


def _refuse_many(path: Path, data: bytes) -> None:
    """A model has some tensors per block; a file of a few megabytes can name hundreds of thousands.

    Raises:
        UserError: it does.
    """
    if (number := data[8 : 8 + int.from_bytes(data[:8], "little")].count(b'"dtype"')) > _MOST_TENSORS:
        raise UserError(f"{path} holds {number:,} tensors: expected at most {_MOST_TENSORS:,}")


def _optimizer(path: Path, contents: dict[str, bytes]) -> dict[str, Any]:
    import torch

    try:  # weights_only spelt out: an environment variable can turn the default off
        loaded = torch.load(io.BytesIO(contents[_OPTIMIZER]), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception:  # torch's words name the way round: to let the file run code
        loaded = None
    if not isinstance(loaded, dict):
        raise UserError(f"{path / _OPTIMIZER} is not an optimizer state of posbench: expected tensors and plain values")
    return loaded


def _state(path: Path, contents: dict[str, bytes]) -> dict[str, Any]:
    try:
        state = json.loads(contents[_STATE])
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise UserError(f"{path / _STATE} is not the state of a run: expected an object")
    return state


def _serialised(model: dict[str, "Tensor"], optimizer: dict[str, Any], state: dict[str, Any]) -> dict[str, bytes]:
    import safetensors.torch
    import torch

    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
    return {
        _MODEL: safetensors.torch.save(weights, metadata={"format": "pt"}),
        _OPTIMIZER: buffer.getvalue(),
        _STATE: json.dumps(state).encode(),
    }


def _manifest(step: int, contents: dict[str, bytes]) -> bytes:
    entries = {name: _entry(data) for name, data in contents.items()}
    return json.dumps({"schema": _SCHEMA, "step": step, "files": entries}, separators=(",", ":")).encode()


def _entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _steps(folder: Path) -> dict[int, Path]:
    """Checkpoint folders by step, newest first: by number, since clocks jump. Links and foreign names are not ours."""
    parent = folder / "checkpoint"
    found = {}
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def _newest_verified(folder: Path, names: tuple[str, ...]) -> tuple[int, Path, dict[str, bytes]] | None:
    skipped: list[str] = []
    for step, path in _steps(folder).items():
        try:
            contents = _verified(path, step, names)
        except _DamagedError as damage:
            skipped.append(f"{path.name} is incomplete ({damage})")
            continue
        for line in skipped:
            logger.warning("%s: newest complete checkpoint is %s, which is used", line, path.name)
        return step, path, contents
    if skipped:
        raise UserError(f"no checkpoint in {folder} is complete: {'; '.join(skipped)}; --restart starts over")
    return None


class _DamagedError(Exception):
    """Which file of a checkpoint cannot be used, and why."""


def _verified(path: Path, step: int, names: tuple[str, ...]) -> dict[str, bytes]:
    """Contents of the named files, each equal to what the manifest says of it."""
    try:
        manifest = json.loads(_read(path / _MANIFEST, _LARGEST_MANIFEST))
        entries = manifest["files"]
        good = manifest["schema"] == _SCHEMA and manifest["step"] == step and isinstance(entries, dict)
        sizes = {name: entries[name]["bytes"] for name in names}
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good or not all(isinstance(size, int) for size in sizes.values()):
        raise _DamagedError(f"{_MANIFEST}: not a manifest of this step")
    contents = {}
    for name, size in sizes.items():
        contents[name] = _read(path / name, min(size, _MEMORY))
        if entries[name] != _entry(contents[name]):
            raise _DamagedError(f"{name}: checksum differs")
    return contents


def _read(path: Path, most: int) -> bytes:
    """At most so many bytes, which is more than there should be or can be held.

    Raises:
        UserError: the disk or its rights keep the file from being read, which says nothing about its contents. An
            older checkpoint in its place would be another model.
    """
    try:
        if not path.is_file():
            raise _DamagedError(f"{path.name}: missing")
        return files.read(path, most)
    except FileNotFoundError:
        raise _DamagedError(f"{path.name}: missing") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): try again, or move {path.parent.name} away to use the"
            " checkpoint before it"
        ) from None
    except UserError as error:
        raise _DamagedError(str(error)) from None


def _remove(paths: Iterable[Path]) -> None:
    """Delete checkpoints. Renamed first, so that a kill in the middle leaves no half checkpoint of a valid name."""
    for path in paths:
        try:
            going = files.temporary(path)
            os.rename(path, going)
            files.delete(going)
        except OSError as error:
            logger.warning("could not remove the old checkpoint %s (%s)", path, error.strerror)
