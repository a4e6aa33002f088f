"""Extrapolation evaluation of a trained run: perplexity by context length, far beyond the training length."""

import contextlib
import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from posbench import checkpoint, devices, protocols, runs, tracking
from posbench.config import Config, EvaluationConfig
from posbench.data import tokens as data
from posbench.data.tokens import Tokens, TokenSplit
from posbench.errors import UserError
from posbench.model import GPT, build
from posbench.protocols import Windows
from posbench.statistics import block_bootstrap

logger = logging.getLogger(__name__)

HEAD_ROWS = 2048  # rows of fp32 logits held at once


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of an evaluation: a protocol at a context length, plain or with a sliding window."""

    protocol: str
    length: int  # tokens
    window: int | None
    windows: Windows | None  # None: the text is too short


def cells(settings: EvaluationConfig, split: TokenSplit, train_length: int) -> list[Cell]:
    """All cells that the settings ask for, plain ones by protocol and length, then the `windowed` baseline."""
    lengths = [round(ratio * train_length) for ratio in settings.ratios]
    found: list[Cell] = []
    for protocol in settings.protocols:
        plan = protocols.plan(protocol, split, lengths, settings.targets, settings.blocks, settings.documents)
        found += [Cell(protocol, length, None, windows) for length, windows in plan.items()]
        if protocol == "fixed_target" and settings.windowed:
            found += [Cell(protocol, c, train_length, w) for c, w in plan.items() if c > train_length]
    return found


def evaluate(
    model: GPT,
    tokens: Tokens,
    config: Config,
    step: int,
    known: list[dict[str, Any]],
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[dict[str, Any], list[dict[str, Any]]], None],
) -> None:
    """Compute the cells that are not among the `known` rows; each goes to `report(row, block rows)` when done."""
    settings = config.evaluation
    split: TokenSplit = getattr(tokens, settings.split)
    model.eval()
    for cell in cells(settings, split, config.training.train_length):
        row = _empty_row(cell, config, step, dtype)
        if cell.windows is None:
            row |= {"status": "too_short", "reason": f"the {settings.split} text has too few windows of {cell.length}"}
        elif (longest := model.encoding.max_length) is not None and cell.length > longest:
            row |= {"status": "undefined", "reason": f"'{config.encoding.name}' is defined up to {longest} tokens"}
        else:
            row["targets_sha256"] = cell.windows.targets_sha256(split)
        if any(_same_cell(row, other) for other in known):
            continue
        blocks: list[dict[str, Any]] = []
        if row["status"] == "ok":
            assert cell.windows is not None
            blocks = _measure(row, cell, cell.windows, model, tokens, split, config, device, dtype)
        report(row, blocks)


def score(
    model: GPT,
    split: TokenSplit,
    windows: Windows,
    device: torch.device,
    dtype: torch.dtype,
    batch_tokens: int,
    window: int | None = None,
) -> NDArray[np.float64]:
    """Negative log-likelihood in nats of every scored token: (windows, scored).

    Args:
        batch_tokens: tokens per forward pass, at least one window.
        window: narrow every attention layer to this many keys.
    """
    per_batch = max(1, batch_tokens // windows.length)
    out = []
    with _narrowed(model, window), torch.inference_mode():
        for first in range(0, len(windows.starts), per_batch):
            index = windows.starts[first : first + per_batch, None] + np.arange(windows.length + 1)
            ids = torch.from_numpy(split.ids[index].astype(np.int64)).to(device)
            with devices.autocast(device, dtype):
                hidden = model.hidden(ids[:, :-1])[:, -windows.scored :]
            nll = _nll(model, hidden.float().flatten(0, 1), ids[:, -windows.scored :].flatten())
            out.append(nll.view(-1, windows.scored).double().cpu().numpy())
    return np.concatenate(out)


def evaluate_run(
    folder: pathlib.Path, settings: EvaluationConfig, device: str | None = None, threads: int | None = None
) -> None:
    """Evaluate a finished run's newest checkpoint; only what is missing is computed.

    Raises:
        UserError: the folder holds no run or no complete checkpoint.
    """
    config = dataclasses.replace(runs.load_config(folder), evaluation=settings)
    step, weights = checkpoint.load_model(folder)
    chosen = devices.resolve(device or config.runtime.device)
    devices.set_threads(threads or config.runtime.threads)
    with runs.Run.open(folder, config, command=None) as run:
        tokens = data.prepare(config.data, data.cache_folder(config.runtime.cache))
        if run.record["tokenizer_sha256"] not in (None, tokens.tokenizer.sha256):
            raise UserError(f"the data of {folder} gives another tokenizer than the run was trained with")
        model = build(config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts).to(chosen)
        model.load_state_dict(weights)
        tracker = tracking.start(config, run)
        evaluate_into(run, tracker, model, tokens, config, step, chosen)
        tracker.finish()


def evaluate_into(
    run: "runs.Run",
    tracker: "tracking.Tracker",
    model: GPT,
    tokens: Tokens,
    config: Config,
    step: int,
    device: torch.device,
) -> None:
    """Evaluate into a run folder and its W&B mirror, row by row, so that nothing computed is lost."""
    dtype = devices.resolve_precision(config.training.precision, device)
    started = time.monotonic()

    def report(row: dict[str, Any], blocks: list[dict[str, Any]]) -> None:
        run.log_evaluation(row, blocks)
        tracker.curve(row)
        logger.info("%s", describe(row))

    evaluate(model, tokens, config, step, runs.evaluation_rows(run.folder), device, dtype, report)
    seconds = (run.record["evaluate_seconds"] or 0.0) + time.monotonic() - started
    run.update(evaluate_seconds=round(seconds, 3))


def describe(row: dict[str, Any]) -> str:
    """A row in one line, protocol and unit beside the number."""
    name = "windowed" if row["window"] else row["protocol"]
    where = f"{name} at {row['length']} tokens ({row['length_ratio']:g}x)"
    if row["status"] != "ok":
        return f"{where}: {row['status']}, {row['reason']}"
    interval = f"{row['ci_low']:.3f}..{row['ci_high']:.3f}"
    return f"{where}: {row['nll']:.4f} nats/token ({interval}), perplexity {row['perplexity']:.2f}"


def _measure(
    row: dict[str, Any],
    cell: Cell,
    windows: Windows,
    model: GPT,
    tokens: Tokens,
    split: TokenSplit,
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Fill an `ok` row with its numbers and return its block rows."""
    started = time.monotonic()
    devices.reset_peak_memory(device)
    nll = score(model, split, windows, device, dtype, config.evaluation.batch_tokens, cell.window)
    sums = np.bincount(windows.blocks, nll.sum(1))
    counts = np.bincount(windows.blocks) * windows.scored
    token_bytes = tokens.tokenizer.token_bytes  # None: this tokenizer's tokens are not pieces of the original text
    sizes: list[int | None] = [None] * windows.n_blocks
    if token_bytes is not None:
        in_windows = token_bytes[split.ids[windows.targets()]].sum(1)
        sizes = [int(size) for size in np.bincount(windows.blocks, in_windows)]
    n_bytes = None if token_bytes is None else sum(size or 0 for size in sizes)
    mean = float(nll.mean())
    low, high = block_bootstrap(sums, counts.astype(np.float64), config.evaluation.bootstrap)
    row |= {
        "n_tokens": nll.size,
        "n_bytes": n_bytes,
        "n_blocks": windows.n_blocks,
        "mean_context": windows.mean_context(cell.window),
        "nll": mean,
        "perplexity": math.exp(mean) if mean < 700 else None,
        "bits_per_byte": float(nll.sum()) / math.log(2) / n_bytes if n_bytes else None,
        "ci_low": low,
        "ci_high": high,
        "seconds": round(time.monotonic() - started, 3),
        "peak_memory_bytes": devices.peak_memory(device),
    }
    return [
        {"nll_sum": float(total), "n_tokens": int(count), "n_bytes": size}
        for total, count, size in zip(sums, counts, sizes, strict=True)
    ]


def _empty_row(cell: Cell, config: Config, step: int, dtype: torch.dtype) -> dict[str, Any]:
    absent = dict.fromkeys(
        ("n_tokens", "n_bytes", "n_blocks", "mean_context", "nll", "perplexity", "bits_per_byte", "accuracy",
         "exact_match", "ci_low", "ci_high", "targets_sha256", "seconds", "peak_memory_bytes")
    )  # fmt: skip
    return {
        "protocol": cell.protocol,
        "length": cell.length,
        "length_ratio": cell.length / config.training.train_length,
        "stride": None,
        "window": cell.window,
        "extension": None,
        "extension_options": None,
        "task": None,
        "split": config.evaluation.split,
        "documents": cell.windows.documents if cell.windows else None,
        "checkpoint_step": step,
        "status": "ok",
        "reason": None,
        "dtype": devices.dtype_name(dtype),
        **absent,
    }


def _same_cell(row: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = (*runs.EVALUATION_KEY, "status", "targets_sha256")
    return all(row[key] == other.get(key) for key in keys)


def _nll(model: GPT, hidden: Tensor, labels: Tensor) -> Tensor:
    """fp32 head and softmax whatever the model ran in; in pieces, since logits are the largest tensor of all."""
    pieces = zip(torch.split(hidden, HEAD_ROWS), torch.split(labels, HEAD_ROWS), strict=True)
    return torch.cat([F.cross_entropy(model.logits(h), y, reduction="none") for h, y in pieces])


@contextlib.contextmanager
def _narrowed(model: GPT, window: int | None) -> Iterator[None]:
    before = model.window
    model.window = before if window is None else min(window, before or window)
    try:
        yield
    finally:
        model.window = before
