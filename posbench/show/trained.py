"""The panels of a trained run: its encoding as learned, and its attention on its own test text.

In many encodings, the positional part of a logit depends on the text. It is therefore measured on text: the mean over
the last queries of some windows, per head and layer, at the training length and beyond.
"""

import dataclasses
import math
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posbench import encodings
from posbench.config.built import shape_of
from posbench.config.schema import Config
from posbench.data import tokens as data
from posbench.data.tokenizer import Tokenizer
from posbench.encodings.base import Encoding, Rows
from posbench.errors import UserError
from posbench.kernels.bias import Bias, Decay
from posbench.model.attention.dispatch import attention
from posbench.model.attention.reference import logits_of, rows_of
from posbench.model.gpt import GPT
from posbench.randomness import generator
from posbench.run_folder.folder import load_config, load_record
from posbench.run_folder.trained import model_of, tokenizer_of
from posbench.show import codes, panels
from posbench.show.panels import Curves, Numbers, Panel, Picture

RATIOS = (1, 2, 4)  # measured lengths, in training lengths
LONGEST = 2048  # tokens; longer lengths are left out, except the training length
WINDOWS = 64  # most windows of text per length
SECONDS = 2.0  # per length: reading stops after them; after three times that, no third length begins
QUERIES = 16  # of the end of a window, which see the most keys; at most an eighth of it
LAYERS = 4  # most layers with separate panels, if layers differ
FAINTEST = 1e-5  # attention; below, a curve leaves the picture


def picture(folder: Path) -> Picture:
    """Draw a run; UserError if the folder is no run, or has no complete checkpoint."""
    config = load_config(folder)
    tokenizer = tokenizer_of(folder)
    model = model_of(folder, config, tokenizer)
    notes = [f"{config.encoding.name}, trained", *panels.first_layer_of_several(model.encoding)]
    with codes.in_double(), torch.no_grad():
        drawn = panels.of_positions(_in_double(model.encoding, config, tokenizer))
    if config.data.task is not None:
        notes.append("attention is drawn for runs on text only")
    else:
        try:
            text = _text(folder, config)
        except UserError as error:
            notes.append(f"its text is not available: {error}")
        else:
            with torch.no_grad():
                drawn += _on_text(model, config, text)
    return Picture(folder.resolve().name, ", ".join(notes), tuple(drawn), config.training.train_length)


def _in_double(learned: Encoding, config: Config, tokenizer: Tokenizer) -> Encoding:
    """The run's encoding in fp64, like all codes in pictures."""
    encoding = encodings.build(config.encoding.name, shape_of(config, tokenizer.texts), config.encoding.options)
    encoding.load_state_dict(learned.state_dict())
    return encoding


# -- the text ----------------------------------------------------------------------------------------------------------


def _text(folder: Path, config: Config) -> data.TokenSplit:
    """The run's test text, or the other text that it is evaluated on; UserError if it is not here or has changed."""
    tokens = data.prepare(config.data, data.cache_folder(config.runtime.cache))
    recorded = load_record(folder).get("data")
    if isinstance(recorded, dict) and recorded.get("sha256") not in (None, tokens.record["sha256"]):
        raise UserError("the text there is not the one of the run")
    split: data.TokenSplit = getattr(tokens, config.evaluation.split)
    return split


def _windows(text: data.TokenSplit, length: int) -> list[NDArray[np.integer]]:
    """The beginnings of the first documents that are long enough; without these, consecutive windows of the text."""
    starts, ends = text.starts[:-1], text.starts[1:]
    chosen = starts[ends - starts >= length]
    if not len(chosen):
        chosen = np.arange(0, len(text.ids) - length + 1, length)
    return [text.ids[start : start + length] for start in chosen[:WINDOWS]]


# -- what the model does there -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Means over windows of one length."""

    length: int
    added: Numbers  # (layers, heads, distance): positional part of a logit
    weight: Numbers  # likewise, attention
    read: Numbers  # (layers, heads): mean distance of attention, tokens
    kept: Numbers | None  # (layers, heads): mean share kept by forget gates; None unless all layers have them


def _on_text(model: GPT, config: Config, text: data.TokenSplit) -> list[Panel]:
    trained = config.training.train_length
    lengths = [trained * ratio for ratio in RATIOS if ratio == 1 or trained * ratio <= LONGEST]
    defined = [length for length in lengths if length <= (model.encoding.max_length or length)]
    seen: list[_Seen] = []
    began = time.monotonic()
    for length in defined:
        in_time = len(seen) < 2 or time.monotonic() < began + 3 * SECONDS
        if in_time and (one := _seen(model, config, text, length)):
            seen.append(one)
    if not seen:
        return []
    hooks = {hook for layer in range(config.model.n_layers) for hook in model.encoding.at(layer)[0].hooks}
    added = _added(seen[-1], trained) if hooks & {"distance_bias", "bias", "scores"} else []
    length, read, kept = seen[0].length, seen[0].read, seen[0].kept
    gates = [] if kept is None else [_by_layer("Forget gates: kept at each token", "share kept", kept)]
    reading = _by_layer(f"Mean distance read, at {length} tokens", "tokens", read)
    return [*added, *gates, reading, _attention(seen, lengths[-1], trained)]


def _seen(model: GPT, config: Config, text: data.TokenSplit, length: int) -> _Seen | None:
    """Attention in windows of a length; None if the text has no such window."""
    until = time.monotonic() + SECONDS
    read: list[list[tuple[Tensor, ...]]] = []
    for number, window in enumerate(_windows(text, length)):
        if read and time.monotonic() > until:
            break
        ids = torch.from_numpy(window.astype(np.int64))[None]
        positions = model.encoding.positions(ids, generator(config.seed, "portrait", length, number))
        read.append(_layers(model, ids, positions))
    if not read:
        return None
    added, weight, distance = (_mean([[layer[part] for layer in layers] for layers in read]) for part in range(3))
    gated = all(len(layer) == 4 for layer in read[0])
    kept = np.exp(_mean([[layer[3] for layer in layers] for layers in read])) if gated else None
    return _Seen(length, added, weight, distance, kept)


def _mean(windows: list[list[Tensor]]) -> Numbers:
    """The mean over windows, per layer."""
    found: Numbers = torch.stack([torch.stack(layers) for layers in windows]).double().mean(0).numpy()
    return found


def _layers(model: GPT, ids: Tensor, positions: Tensor) -> list[tuple[Tensor, ...]]:
    """What `_layer` finds at the last queries of each layer, as the model reads a window (1, T)."""
    encoding, last = model.encoding, max(1, min(QUERIES, ids.shape[1] // 8))
    window, sinks, consecutive = model.window, model.sinks, "positions" not in encoding.hooks
    found, x = [], encoding.embed(model.tokens(ids), positions, ids)
    for layer, block in enumerate(model.layers):
        q, k, v, read = block.into_attention(x)
        given = (encoding, q, k, v, read, positions, layer)
        (rows,) = rows_of(*given, window=window, sinks=sinks, block=last, last=last)
        used, own_layer = encoding.at(layer)
        found.append(_layer(used, rows, used.additions(q, k, read, positions, own_layer)))
        attended = attention(*given, window=window, sinks=sinks, consecutive=consecutive)
        x = block.out_of_attention(x, attended)
    return found


def _layer(encoding: Encoding, rows: Rows, additions: Bias | None) -> tuple[Tensor, ...]:
    """Per head: positional part and attention (H, T), mean distance read and, if there is one, mean log forget gate."""
    logits = logits_of(encoding, rows)
    weights = _weights(encoding, logits, rows)
    gap = _index(rows.queries)[:, None] - _index(rows.keys)  # in tokens, whatever the positions are
    read = (weights[0] * gap).sum(-1).mean(-1)
    added = logits - (rows.q @ rows.k.mT) * encoding.logit_scale
    found = _by_distance(added, gap), _by_distance(weights, gap), read
    if not isinstance(additions, Decay):
        return found
    return *found, (additions.sums[0, :, -1] - additions.sums[0, :, 0]) / (additions.sums.shape[-1] - 1)


def _index(which: slice | Tensor) -> Tensor:
    return torch.arange(which.start, which.stop) if isinstance(which, slice) else which


def _weights(encoding: Encoding, logits: Tensor, rows: Rows) -> Tensor:
    """The weight of each value (B, H, Tq, Tk); if the encoding has its own normaliser, found with one-hot values."""
    if "attend" not in encoding.hooks:
        return logits.softmax(-1)
    keys, width = rows.v.shape[-2:]
    nothing = encoding.attend(logits, dataclasses.replace(rows, v=torch.zeros_like(rows.v)))
    parts = []
    for start in range(0, keys, width):
        v = torch.eye(keys, start + width)[:, start:].expand_as(rows.v)
        parts.append(encoding.attend(logits, dataclasses.replace(rows, v=v)) - nothing)
    return torch.cat(parts, dim=-1)[..., :keys]


def _by_distance(pairs: Tensor, gap: Tensor) -> Tensor:
    """Means (H, T) of pairs (1, H, Tq, Tk) at each distance 0 .. T-1, over the queries with a key at that distance."""
    there = gap >= 0
    sums = torch.zeros(pairs.shape[1], int(gap.max()) + 1).index_add(1, gap[there], pairs[0][:, there])
    return sums / torch.bincount(gap[there])


# -- panels ------------------------------------------------------------------------------------------------------------


def _by_head(values: Numbers) -> dict[str, Numbers]:
    return {f"head {head + 1}": of_head for head, of_head in enumerate(values)}


def _added(seen: _Seen, trained: int) -> list[Panel]:
    """The contribution of position, a curve per head: one panel if all layers are equal, else some layers."""
    layers = len(seen.added)
    alike = bool(np.allclose(seen.added, seen.added[:1], atol=1e-4))
    chosen = [0] if alike else sorted({round(at) for at in np.linspace(0, layers - 1, min(LAYERS, layers))})
    found: list[Panel] = []
    for layer in chosen:
        added = np.where(np.isfinite(seen.added[layer]), seen.added[layer], np.nan)
        if not np.isfinite(added).any():
            continue
        found.append(
            Curves(
                title="Added to the logit" + ("" if alike else f", layer {layer + 1} of {layers}"),
                x_label="distance (tokens)",
                y_label="mean on its own text",
                x=np.arange(added.shape[1], dtype=np.float64),
                series=_by_head(added),
                end=seen.length - 1,
                limit=trained,
            )
        )
    return found


def _by_layer(title: str, y_label: str, values: Numbers) -> Curves:
    """Values (layers, heads) as a point per head above each layer's number."""
    layers = np.arange(1, len(values) + 1, dtype=np.float64)
    return Curves(title=title, x_label="layer", y_label=y_label, x=layers, series=_by_head(values.T), points=True)


def _attention(seen: list[_Seen], end: int, trained: int) -> Curves:
    """Mean attention over heads and layers by distance, a curve per available length."""
    longest = max(one.weight.shape[-1] for one in seen)
    series = {}
    for one in seen:
        mean = one.weight.mean((0, 1))
        values = np.full(longest, math.nan)
        values[: len(mean)] = panels.without_faint(mean, FAINTEST)
        series[f"at {one.length}"] = values
    return Curves(
        title="Mean attention, its own text",
        x_label="distance (tokens)",
        y_label="mean weight",
        x=np.arange(longest, dtype=np.float64),
        series=series,
        end=end - 1,
        limit=trained,
        log_y=True,
        note=panels.faint(np.concatenate([one.weight.mean((0, 1)) for one in seen]), FAINTEST),
    )
