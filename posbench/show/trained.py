"""The panels of a trained run: its encoding as learned, and what position does in its model on its own text.

In many encodings the positional part of a logit depends on the text. It is therefore a mean over the last queries of
some windows of text, per head and layer, at the training length and beyond.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from posbench.config.schema import Config
from posbench.data import tokens as data
from posbench.errors import UserError
from posbench.model.attention import attention, make_layer
from posbench.model.gpt import GPT
from posbench.run.model import model_of, tokenizer_of
from posbench.run.run import load_config, load_record
from posbench.show import panels
from posbench.show.panels import Panel, Picture

RATIOS, LONGEST = (1, 2, 4), 2048  # measured lengths, in training lengths; longer ones are left out
WINDOWS, QUERIES, LAYERS = 16, 16, 4  # most windows of text, last queries of each, and layers with a panel


@torch.no_grad()
def picture(folder: Path) -> Picture:
    """Return the panels of a run; UserError if the folder is no run, or has no complete checkpoint."""
    config, note = load_config(folder), ""
    model = model_of(folder, config, tokenizer_of(folder))
    drawn = panels.of_positions(model.encoding)
    try:
        drawn += on_text(model, config, _text(folder, config)) if config.data.task is None else []
    except UserError as error:
        note = f", its text is not available: {error}"
    return Picture(f"{folder.resolve().name}, trained{note}", drawn, config.training.train_length)


def _text(folder: Path, config: Config) -> Tensor:
    """Return the token ids of the text that the run is evaluated on; UserError if it is not here or has changed."""
    tokens = data.prepare(config.data, data.cache_folder(config.runtime.cache))
    if (load_record(folder).get("data") or {}).get("sha256") not in (None, tokens.record["sha256"]):
        raise UserError("the text there is not the one of the run")
    return torch.from_numpy(getattr(tokens, config.evaluation.split).ids[: WINDOWS * LONGEST].astype(np.int64))


def on_text(model: GPT, config: Config, ids: Tensor) -> list[Panel]:
    """Return what is added to logits by distance, if an encoding adds something, and mean attention."""
    trained, encoding, drawn, curves = config.training.train_length, model.encoding, [], {}
    for length in (trained * ratio for ratio in RATIOS if ratio == 1 or trained * ratio <= LONGEST):
        windows = ids[: len(ids) // length * length].view(-1, length)[:WINDOWS]
        if len(windows) and length <= (encoding.max_length or length):
            added, weights = torch.stack([_by_distance(model, window[None]) for window in windows]).mean(0).numpy()
            curves[f"at {length}"] = weights.mean((0, 1))
    if not curves:
        raise UserError("it is shorter than the training length")
    if any(panels.used_in(encoding, layer).hooks & {"distance_bias", "bias", "scores"} for layer in range(len(added))):
        alike = np.allclose(added, added[:1], atol=1e-4, equal_nan=True)
        for layer in [0] if alike else np.unique(np.linspace(0, len(added) - 1, LAYERS).astype(int)):
            title = "Added to the logit" + ("" if alike else f", layer {layer + 1} of {len(added)}")
            heads = {f"head {head}": values for head, values in enumerate(added[layer], start=1)}
            drawn.append(Panel(title, panels.DISTANCE, "mean on its own text", heads))
    return [*drawn, Panel("Mean attention, its own text", panels.DISTANCE, "weight", curves, log=True)]


def _by_distance(model: GPT, ids: Tensor) -> Tensor:
    """Return what is added to logits and what weight there is, (2, layers, heads, T), as the model reads a window."""
    encoding, length, means = model.encoding, ids.shape[1], []
    positions = encoding.positions(ids, None)
    x, window, sinks = encoding.embed(model.tokens(ids), positions, ids), model.window, model.sinks
    described = make_layer(encoding, positions)
    for layer, block in enumerate(model.layers):

        def attend(q: Tensor, k: Tensor, v: Tensor, read: Tensor, layer: int = layer) -> Tensor:
            last = max(1, min(QUERIES, length // 8))
            rows, _, weights, added = panels.pairs_of(encoding, q, k, read, positions, layer, last, window, sinks)
            means.append(panels.by_distance(torch.cat([added, weights]), rows, length))
            return attention(encoding, q, k, v, described.replace(index=layer, x=read), window, sinks)

        x = block(x, attend)
    return torch.stack(means, dim=1)
