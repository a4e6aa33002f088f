"""What an encoding does, alone and in a trained run, as numbers and as panels. Its
hooks decide which panels there are.

The *code* of position i has a part for each hook: the vector at the input, a query and
a key of ones after rotation, and the change of the logit of two fixed tokens i apart.
Learned tables are drawn from N(0,1).
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posbench import encodings
from posbench.config.schema import Config
from posbench.data import sources
from posbench.data import tokens as data
from posbench.encodings.base import PAIRWISE, Encoding, Layer, Shape, check_length
from posbench.errors import UserError
from posbench.model.attention import attention, block_logits, make_layer
from posbench.model.definition import attention_weights
from posbench.model.gpt import GPT
from posbench.model.standalone import prepared_block
from posbench.run import TOKENIZER
from posbench.run.folder import load_config
from posbench.run.model import model_of, tokenizer_of
from posbench.run.saved import load_record

Numbers = NDArray[np.float64]
Build = Callable[..., Encoding]  # builds an encoding for a shape

# small, for readable pictures: heads of 16 channels
SHAPE = Shape(d_model=64, n_heads=4, n_layers=2, train_length=64)
CONTENTS = 4  # random tokens per measurement
# tokens left out at the start: some encodings read neighbours, and the padding there is
# no position
MARGIN = 8
# inputs of mean attention, and their last queries, which see the most keys
SAMPLES, QUERIES = 64, 16
STAYS = 1e-5  # largest change that counts as rounding
TINIEST = np.log(np.finfo(np.float32).tiny) / 2  # a weight with a smaller logit is 0
DISTANCE, ADDED = "distance in tokens", "added to the logit"
# measured lengths, as multiples of the training length; the longest, in tokens
RATIOS, LONGEST = (1, 2, 4), 2048
WINDOWS, LAYERS = 16, 4  # the most windows of text, and the most layers with a panel


def build(
    name: str, options: Mapping[str, Any], shape: Shape, draw: bool = True
) -> Encoding:
    """Build an encoding, the same at every call, with codes at scale 1; `draw`: with
    learned tables from N(0,1).
    """
    options = dict(options)
    if "scale" in encodings.options_of(name):
        options.setdefault("scale", 1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = encodings.build(name, shape, options)
        has_maps = "prepare" in encoding.hooks  # of contents
        for parameter_name, parameter in encoding.named_parameters(recurse=False):
            is_table = parameter_name == "table" or not has_maps
            if draw and is_table and parameter.dim() > 1:
                torch.nn.init.normal_(parameter)
    return encoding


def layer_encoding(encoding: Encoding, layer: int = 0) -> Encoding:
    """Return the encoding that a layer uses."""
    one_token = torch.zeros(1, 1, dtype=torch.long)
    return encoding.at(make_layer(encoding, one_token, layer))[0]


def hooks_of(encoding: Encoding) -> frozenset[str]:
    """Return the hooks that act at the input and in the first layer."""
    return encoding.hooks & {"embed"} | layer_encoding(encoding).hooks - {"embed"}


def positions_of(encoding: Encoding, length: int) -> Tensor:
    """Return the encoding's positions (1, T) for an input of this length, or of its
    maximum if that is shorter.
    """
    ids = torch.zeros(1, length, dtype=torch.long)
    return encoding.positions(ids[:, : encoding.max_length], None)


def input_code(encoding: Encoding, positions: Tensor) -> Tensor:
    """Return the code added to or concatenated with the token embeddings: (1, T) to (T,
    D).
    """
    check_length(encoding, positions.shape[-1])
    ids = torch.zeros_like(positions, dtype=torch.long)
    tokens = torch.zeros(*positions.shape, encoding.token_dim())
    return encoding.embed(tokens, positions, ids)[0]


def rotated_ones(encoding: Encoding, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a query and a key of ones after `rotate`, in the first head: (1, T) to (T,
    anything) each.
    """
    shape = encoding.shape
    length = positions.shape[-1]
    ones = torch.ones(1, shape.n_heads, length, shape.head_dim)
    x = random(1, 1, shape.d_model, seed=1).expand(-1, length, -1)
    scheme, layer = encoding.at(make_layer(encoding, positions, x=x))
    if "prepare" in scheme.hooks:
        layer = layer.replace(state=scheme.prepare(ones, ones, layer))
    q, k = scheme.rotate(ones, ones, layer)
    return q[0, 0], k[0, 0]


def code(encoding: Encoding, positions: Tensor) -> Tensor:
    """Return the code of positions, or of distances if the encoding acts on pairs: (1,
    T) to (T, anything).
    """
    hooks = hooks_of(encoding)
    parts = [torch.zeros(positions.shape[-1], 1)]
    if "embed" in hooks:
        parts.append(input_code(encoding, positions))
    if "rotate" in hooks:
        parts += rotated_ones(encoding, positions)
    if hooks & PAIRWISE:
        # the query is the last token, and the keys lie at the given distances before it
        margin = positions.max() + 1 + torch.arange(MARGIN)
        distances = torch.cat([positions[0], margin])
        places = (distances.max() - distances).flip(0)
        added = contribution(encoding, places[None])
        parts.append(added.flatten(0, 1).mT.flip(0))
    return torch.cat(parts, dim=-1)


def contribution(encoding: Encoding, positions: Tensor) -> Tensor:
    """Return what position alone adds to the last query's logits if all tokens are
    equal: (contents, H, T - MARGIN).
    """
    shape = encoding.shape
    length = positions.shape[-1]
    vectors = random(2 * CONTENTS, 1, 1, shape.head_dim, seed=1)
    q, k = vectors.expand(-1, shape.n_heads, length, -1).chunk(
        2
    )  # (contents, H, T, Dh)
    x = random(CONTENTS, 1, shape.d_model, seed=1).expand(-1, length, -1)
    logits = pairs_of(encoding, q, k, x, positions, last=1).logits
    last_q = q[..., -1:, :]
    plain = last_q @ k.mT * layer_encoding(encoding).logit_scale
    return (logits - plain)[..., 0, MARGIN:]


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pairs(NamedTuple):
    """Queries and keys of a layer, each tensor (B, H, queries, keys)."""

    layer: Layer
    logits: Tensor
    weights: Tensor
    added: Tensor  # to the product of query and key


def pairs_of(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    positions: Tensor,
    layer: int = 0,
    last: int | None = None,
    **limits: int | None,
) -> Pairs:
    """Return the pairs of all keys with all queries, or with the last ones; `limits`
    are a layer's window and sinks.

    If an encoding normalises weights itself, they are its outputs for one-hot values,
    and logits are the logarithms of their sizes.
    """
    described = make_layer(encoding, positions, layer, x).replace(**limits)
    scheme, q, k, v, block = prepared_block(
        encoding, q, k, torch.zeros_like(k), described, last
    )
    logits = block_logits(scheme, q, k, block)
    weights = attention_weights(scheme, logits, v, block)
    plain = q @ k.mT * scheme.logit_scale
    if "attend" in scheme.hooks:
        usual = logits.softmax(-1)
        # with a sink, weights sum to less than 1
        shares = weights / weights.sum(-1, keepdim=True)
        if not torch.allclose(shares, usual, atol=1e-5):
            least = torch.finfo(torch.float32).tiny
            logits = weights.abs().clamp(min=least).log()
    return Pairs(block, logits, weights, logits - plain)


def by_distance(pairs: Tensor, layer: Layer, length: int) -> Tensor:
    """Return means of pairs (B, H, Tq, Tk) by distance in tokens, over the queries with
    a key there: (B, H, T).
    """
    places = torch.arange(length)
    gap = places[layer.rows, None] - places[layer.keys]
    is_past = gap >= 0
    distances = gap[is_past]
    sums = torch.zeros(*pairs.shape[:2], length)
    sums.index_add_(2, distances, pairs[:, :, is_past])
    return sums / torch.bincount(distances, minlength=length)


def read(encoding: Encoding, tokens: Tensor, bare: bool = False) -> tuple[Tensor, ...]:
    """Return q, k, v (by fixed projections), x and positions of tokens (B, T, D);
    `bare`: without code at the input.
    """
    shape = encoding.shape
    positions = positions_of(encoding, tokens.shape[1])
    ids = torch.zeros(tokens.shape[:2], dtype=torch.long)
    x = encoding.embed(tokens, positions, ids)
    if bare:
        x = x - input_code(encoding, positions)
    weights = random(3, 1, shape.d_model, shape.d_model) / shape.d_model**0.5
    projected = (x @ weights).unflatten(-1, (shape.n_heads, -1))  # (3, B, T, H, Dh)
    q, k, v = projected.transpose(2, 3)
    return q, k, v, x, positions


def logit_change(encoding: Encoding, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much the encoding changes the logits of tokens, and the attention
    weights, each (B, H, T, T).
    """
    q, k, _, x, positions = read(encoding, tokens)
    pairs = pairs_of(encoding, q, k, x, positions)
    bare_q, bare_k, *_ = read(encoding, tokens, bare=True)
    plain = bare_q @ bare_k.mT * layer_encoding(encoding).logit_scale
    return pairs.logits - plain, pairs.weights


class Panel(NamedTuple):
    """Curves over 0, 1, 2 ..., or an image; NaN where a value is undefined. `log`:
    attention, on a logarithmic axis.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Numbers] = {}
    image: Numbers = np.empty((0, 0))
    log: bool = False


class Picture(NamedTuple):
    """The panels of an encoding or a run, and the training length, which they go
    beyond.
    """

    title: str
    panels: list[Panel]
    train_length: int = SHAPE.train_length


@torch.no_grad()
def picture(label: str, build: Build) -> Picture:
    """Return the panels of an encoding; UserError if `SHAPE` does not fit it."""
    encoding = build(SHAPE)
    if [*encoding.parameters()]:
        label += ", untrained: random parameters"
    return Picture(label, encoding_panels(encoding))


def encoding_panels(encoding: Encoding) -> list[Panel]:
    """Return the panels of an encoding without a model."""
    panels = position_panels(encoding)
    reach = 2 * encoding.shape.train_length
    if hooks_of(encoding) & PAIRWISE:
        positions = positions_of(encoding, reach + MARGIN)
        added = contribution(encoding, positions)[0].flip(-1).numpy()
        added = np.where(added < TINIEST, np.nan, added)
        curves = _heads(added)
        if np.allclose(added, added[:1], equal_nan=True):
            curves = {"all heads": added[0]}
        title = "Added to the logit, equal tokens"
        panels.append(Panel(title, DISTANCE, ADDED, curves))

    # the mean weight for random tokens under random projections; 1 is an even share
    length = positions_of(encoding, reach).shape[1]
    tokens = random(SAMPLES, length, encoding.token_dim())
    q, k, _, x, positions = read(encoding, tokens)
    pairs = pairs_of(encoding, q, k, x, positions, last=QUERIES)
    n_seen = torch.arange(1, length + 1)[pairs.layer.rows, None]
    shares = by_distance(pairs.weights * n_seen, pairs.layer, length)
    mean = shares.mean((0, 1))[: length - QUERIES + 1].numpy()
    attention = Panel(
        "Mean attention, random tokens",
        DISTANCE,
        "times an even share",
        {"mean over heads": mean},
        log=True,
    )
    return [*panels, attention]


def position_panels(encoding: Encoding) -> list[Panel]:
    """Return panels of the code by position and of products of two codes: at the input,
    and of rotated q and k.
    """
    panels = []
    positions = positions_of(encoding, 2 * encoding.shape.train_length)
    if "embed" in hooks_of(encoding):
        code = input_code(encoding, positions)
        panels.append(_image("Code of each position", code, encoding))
        panels.append(_products("Dot product of two codes", code, code))
    if "rotate" in hooks_of(encoding):
        q, k = rotated_ones(encoding, positions)
        # else only the first tokens differ, which lack neighbours
        if (k[MARGIN:] - k[-1]).abs().max() > STAYS:
            panels.append(_image("A key of ones, by position", k, encoding))
            panels.append(_products("q·k of ones", q, k))
    return panels


def _image(title: str, code: Tensor, encoding: Encoding) -> Panel:
    n_used = len(np.trim_zeros(code.any(0).numpy(), "b"))  # the other channels are 0
    n_positions = 2 * encoding.shape.train_length
    image = np.full((n_used, n_positions), np.nan)
    image[:, : len(code)] = code[:, :n_used].mT.numpy()
    return Panel(title, "position", "channel", image=image)


def _products(title: str, q: Tensor, k: Tensor) -> Panel:
    """Draw q_i · k_{i-r} by distance r: one curve if it depends on distance alone, else
    the range over positions i.
    """
    products = q @ k.mT
    diagonals = [products.diagonal(-distance) for distance in range(len(q))]
    mean = np.array([float(diagonal.mean()) for diagonal in diagonals])
    low = np.array([float(diagonal.min()) for diagonal in diagonals])
    high = np.array([float(diagonal.max()) for diagonal in diagonals])
    curves = {"mean over places": mean, "lowest": low, "highest": high}
    if (high - low).max() <= STAYS * np.abs(high).max():
        curves = {"at every place": mean}
    return Panel(title, DISTANCE, "product", curves)


def _heads(values: Numbers) -> dict[str, Numbers]:
    """Return a curve per head of (H, T)."""
    return {f"head {head}": curve for head, curve in enumerate(values, start=1)}


@torch.no_grad()
def phrase_picture(
    builds: Iterable[tuple[str, Build]], phrase: str, pair: str
) -> Picture:
    """Return what position adds to the logit of two words, `daughter,called`, as their
    phrase moves.
    """
    words = phrase.lower().split()
    asked = {*pair.lower().replace(",", " ").split()} & {*words}
    places = sorted(words.index(word) for word in asked)
    if len(places) != 2 or len(words) >= SHAPE.train_length:
        raise UserError(
            f"--words is '{pair}': expected two different words of a phrase below"
            f" {SHAPE.train_length}"
        )
    key, query = places
    panels = []
    for label, build in builds:
        added = moved_logits(build(SHAPE), words, key, query, 2 * SHAPE.train_length)
        panels.append(Panel(label, "place of the later word", ADDED, {"": added}))
    return Picture(f"{pair} in '{phrase}'", panels)


def moved_logits(
    encoding: Encoding, words: list[str], key: int, query: int, length: int
) -> Numbers:
    """Return the encoding's change of two words' logit by the later word's place:
    (length,), NaN where it was not.
    """
    width = encoding.token_dim()
    vectors = [random(width, seed=zlib.crc32(word.encode())) for word in words]
    sentence = random(1, length, width)[:, : encoding.max_length]

    added = np.full(length, np.nan)
    for start in range(0, sentence.shape[1] - len(words) + 1, 4):
        tokens = sentence.clone()
        tokens[0, start : start + len(words)] = torch.stack(vectors)
        change, _ = logit_change(encoding, tokens)
        added[start + query] = change[0, 0, start + query, start + key]
    return added


# -- of a run, on its own text
# --------------------------------------------------------------------------------------


@torch.no_grad()
def run_picture(folder: Path, text: str | None = None) -> Picture:
    """Return the panels of a run, whose text is at another path now if that is given;
    UserError if the folder is no run, or has no complete checkpoint.
    """
    config = load_config(folder)
    if text:
        moved = sources.moved(config.data, text)
        config = dataclasses.replace(config, data=moved)
    model = model_of(folder, config, tokenizer_of(folder))
    if config.data.task:
        panels = encoding_panels(model.encoding)
    else:
        cache = config.runtime.cache
        tokens: Any = data.data_of(config.data, cache, folder / TOKENIZER)
        trained_on = load_record(folder).text_sha256
        if trained_on not in (None, tokens.meta["sha256"]):
            raise UserError(
                f"the text of {folder} is no longer the one that it was trained on"
            )
        # the beginning of the text that the run was evaluated on
        ids = getattr(tokens, config.evaluation.split).ids[: WINDOWS * LONGEST]
        panels = position_panels(model.encoding)
        panels += text_panels(model, config, torch.from_numpy(ids.astype(np.int64)))
    title = f"{folder.resolve().name}, trained"
    return Picture(title, panels, config.training.train_length)


def text_panels(model: GPT, config: Config, ids: Tensor) -> list[Panel]:
    """Return panels by distance: what is added to logits, if the encoding adds
    anything, and mean attention.
    """
    train_length = config.training.train_length
    lengths = [train_length * ratio for ratio in RATIOS]
    longest = max(train_length, LONGEST)
    if model.encoding.max_length:
        longest = min(longest, model.encoding.max_length)

    curves = {}
    for length in lengths:
        n_windows = min(len(ids) // length, WINDOWS)
        if n_windows and length <= longest:
            windows = ids[: n_windows * length].view(n_windows, 1, length)
            measured = [_by_distance(model, window) for window in windows]
            # what is added is drawn for the last of these lengths
            added, weights = torch.stack(measured).mean(0).numpy()
            curves[f"at {length}"] = weights.mean((0, 1))
    if not curves:
        raise UserError("the run's text is shorter than its training length")
    attention = Panel(
        "Mean attention, its own text", DISTANCE, "weight", curves, log=True
    )

    # what some layers add to logits, or one if all are alike
    n_layers = len(added)
    hooks = set[str]()
    for layer in range(n_layers):
        hooks |= layer_encoding(model.encoding, layer).hooks
    if not hooks & {"distance_bias", "bias", "scores"}:
        return [attention]
    if np.allclose(added, added[:1], atol=1e-4, equal_nan=True):
        titles = {0: "Added to the logit"}
    else:
        titles = {}
        for layer in np.unique(np.linspace(0, n_layers - 1, LAYERS).astype(int)):
            titles[layer] = f"Added to the logit, layer {layer + 1} of {n_layers}"
    of_layers = []
    for layer, title in titles.items():
        heads = _heads(added[layer])
        of_layers.append(Panel(title, DISTANCE, "mean on its own text", heads))
    return [*of_layers, attention]


def _by_distance(model: GPT, ids: Tensor) -> Tensor:
    """Return by distance, for a window, what the model adds to logits, and its weights:
    (2, layers, heads, T).
    """
    encoding = model.encoding
    limits = {"window": model.window, "sinks": model.sinks}
    length = ids.shape[1]
    n_queries = max(1, min(QUERIES, length // 8))
    positions = encoding.positions(ids, None)
    x = encoding.embed(model.tokens(ids), positions, ids)
    described = make_layer(encoding, positions).replace(**limits)
    means: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        index = len(means)
        pairs = pairs_of(encoding, q, k, x, positions, index, n_queries, **limits)
        both = torch.cat([pairs.added, pairs.weights])
        means.append(by_distance(both, pairs.layer, length))
        layer = described.replace(index=index, x=x)
        return attention(encoding, q, k, v, layer)

    for block in model.blocks:
        x = block(x, attend)
    return torch.stack(means, dim=1)
