"""What an encoding does, alone and in a trained run, as numbers and as panels. Its
hooks decide which panels there are.

The *code* of position i has a part for each hook: the vector at the input, a query and
a key of ones after rotation, and the change of the logit of two fixed tokens i apart.
Learned tables are drawn from N(0,1).
"""

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
from posbench.data import tokens as data
from posbench.encodings.base import PAIRWISE, Encoding, Layer, Shape
from posbench.errors import UserError
from posbench.model.attention import attention, logits_by_rows, make_layer
from posbench.model.gpt import GPT
from posbench.model.standalone import whole_block
from posbench.run import TOKENIZER
from posbench.run.model import model_of, tokenizer_of
from posbench.run.run import load_config, load_record

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
DISTANCE = "distance in tokens"
# measured lengths, as multiples of the training length; the longest, in tokens
RATIOS, LONGEST = (1, 2, 4), 2048
WINDOWS, LAYERS = 16, 4  # the most windows of text, and the most layers with a panel


def build(
    name: str, options: Mapping[str, Any], shape: Shape, draw: bool = True
) -> Encoding:
    """Build an encoding, the same at every call, with codes at scale 1; `draw`: with
    learned tables from N(0,1).
    """
    options = ({"scale": 1.0} if "scale" in encodings.options_of(name) else {}) | dict(
        options
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = encodings.build(name, shape, options)
        for key, parameter in encoding.named_parameters(recurse=False) if draw else ():
            # not maps of contents
            if parameter.dim() > 1 and (
                key == "table" or "prepare" not in encoding.hooks
            ):
                torch.nn.init.normal_(parameter)
    return encoding


def layer_encoding(encoding: Encoding, layer: int = 0) -> Encoding:
    """Return the encoding that a layer uses."""
    return encoding.at(
        make_layer(encoding, torch.zeros(1, 1, dtype=torch.long), layer)
    )[0]


def hooks_of(encoding: Encoding) -> frozenset[str]:
    """Return the hooks that act at the input and in the first layer."""
    return encoding.hooks & {"embed"} | layer_encoding(encoding).hooks - {"embed"}


def positions_of(encoding: Encoding, length: int) -> Tensor:
    """Return the encoding's positions (1, T) for an input of this length, or of its
    maximum if that is shorter.
    """
    return encoding.positions(
        torch.zeros(1, min(length, encoding.max_length or length), dtype=torch.long),
        None,
    )


def input_code(encoding: Encoding, positions: Tensor) -> Tensor:
    """Return the code added to or concatenated with the token embeddings: (1, T) to (T,
    D).
    """
    tokens = torch.zeros(1, positions.shape[-1], encoding.token_dim())
    return encoding.embed(
        tokens, positions, torch.zeros_like(positions, dtype=torch.long)
    )[0]


def rotated_ones(encoding: Encoding, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a query and a key of ones after `rotate`, in the first head: (1, T) to (T,
    anything) each.
    """
    length, shape = positions.shape[-1], encoding.shape
    ones = torch.ones(1, shape.n_heads, length, shape.head_dim)
    x = random(1, 1, shape.d_model, seed=1).expand(-1, length, -1)
    scheme, layer = encoding.at(make_layer(encoding, positions, x=x))
    q, k = scheme.rotate(ones, ones, layer)
    return q[0, 0], k[0, 0]


def code(encoding: Encoding, positions: Tensor) -> Tensor:
    """Return the code of positions, or of distances if the encoding acts on pairs: (1,
    T) to (T, anything).
    """
    hooks, parts = hooks_of(encoding), [torch.zeros(positions.shape[-1], 1)]
    parts += [input_code(encoding, positions)] if "embed" in hooks else []
    parts += rotated_ones(encoding, positions) if "rotate" in hooks else []
    # the query is the last token, and the keys lie at the given distances before it
    if hooks & PAIRWISE:
        distances = torch.cat(
            [positions[0], positions.max() + 1 + torch.arange(MARGIN)]
        )
        parts.append(
            contribution(encoding, (distances.max() - distances).flip(0)[None])
            .flatten(0, 1)
            .mT.flip(0)
        )
    return torch.cat(parts, dim=-1)


def contribution(encoding: Encoding, positions: Tensor) -> Tensor:
    """Return what position alone adds to the last query's logits if all tokens are
    equal: (contents, H, T - MARGIN).
    """
    length, shape = positions.shape[-1], encoding.shape
    q, k = (
        random(2 * CONTENTS, 1, shape.head_dim, seed=1)[:, None]
        .expand(-1, shape.n_heads, length, -1)
        .chunk(2)
    )
    x = random(CONTENTS, 1, shape.d_model, seed=1).expand(-1, length, -1)
    logits = pairs_of(encoding, q, k, x, positions, last=1)[1]
    return (logits - q[..., -1:, :] @ k.mT * layer_encoding(encoding).logit_scale)[
        ..., 0, MARGIN:
    ]


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pairs_of(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    positions: Tensor,
    layer: int = 0,
    last: int | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[Layer, Tensor, Tensor, Tensor]:
    """Return a layer with its rows, and logits, weights, and what is added to logits,
    each (B, H, last or T, keys).

    If an encoding normalises weights itself, they are its outputs for one-hot values,
    and logits are their logarithms.
    """
    described = make_layer(encoding, positions, layer, x)
    scheme, q, k, v, block = whole_block(
        encoding, q, k, torch.zeros_like(k), described, window, sinks, last
    )
    logits = logits_by_rows(scheme, q, k, block)
    plain = q @ k.mT * scheme.logit_scale
    if "attend" not in scheme.hooks:
        return block, logits, logits.softmax(-1), logits - plain
    (keys, width), parts = v.shape[-2:], []
    zero_output = scheme.attend(logits, torch.zeros_like(v), block)
    for start in range(0, keys, width):
        values = torch.eye(keys, start + width)[:, start:].expand_as(v)
        parts.append(scheme.attend(logits, values, block) - zero_output)
    weights = torch.cat(parts, dim=-1)[..., :keys]
    # with a sink, weights sum to less than 1
    shares = weights / weights.sum(-1, keepdim=True)
    if not torch.allclose(shares, logits.softmax(-1), atol=1e-5):
        logits = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    return block, logits, weights, logits - plain


def by_distance(pairs: Tensor, layer: Layer, length: int) -> Tensor:
    """Return means of pairs (B, H, Tq, Tk) by distance in tokens, over the queries with
    a key there: (B, H, T).
    """
    gap = torch.arange(length)[layer.rows, None] - torch.arange(length)[layer.keys]
    sums = torch.zeros(*pairs.shape[:2], length).index_add(
        2, gap[gap >= 0], pairs[:, :, gap >= 0]
    )
    return sums / torch.bincount(gap[gap >= 0], minlength=length)


def read(encoding: Encoding, tokens: Tensor, bare: bool = False) -> tuple[Tensor, ...]:
    """Return q, k, v (by fixed projections), x and positions of tokens (B, T, D);
    `bare`: without code at the input.
    """
    shape, positions = encoding.shape, positions_of(encoding, tokens.shape[1])
    x = encoding.embed(
        tokens, positions, torch.zeros(tokens.shape[:2], dtype=torch.long)
    )
    x = (
        x - input_code(encoding, positions)
        if bare and "embed" in hooks_of(encoding)
        else x
    )
    weights = random(3, 1, shape.d_model, shape.d_model) / shape.d_model**0.5
    q, k, v = (x @ weights).unflatten(-1, (shape.n_heads, -1)).transpose(2, 3)
    return q, k, v, x, positions


def logit_change(encoding: Encoding, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much the encoding changes the logits of tokens, and the attention
    weights, each (B, H, T, T).
    """
    (q, k, _, x, positions), (bare_q, bare_k, *_) = (
        read(encoding, tokens, bare) for bare in (False, True)
    )
    _, logits, weights, _ = pairs_of(encoding, q, k, x, positions)
    return logits - bare_q @ bare_k.mT * layer_encoding(encoding).logit_scale, weights


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
    added = [_added_panel(encoding)] if hooks_of(encoding) & PAIRWISE else []
    untrained = ", untrained: random parameters" if [*encoding.parameters()] else ""
    return Picture(
        label + untrained,
        [*position_panels(encoding), *added, _attention_panel(encoding)],
    )


def position_panels(encoding: Encoding) -> list[Panel]:
    """Return panels of the code by position and of products of two codes: at the input,
    and of rotated q and k.
    """
    panels, positions = [], positions_of(encoding, 2 * encoding.shape.train_length)
    if "embed" in hooks_of(encoding):
        code = input_code(encoding, positions)
        panels += [
            _image("Code of each position", code, encoding),
            _products("Dot product of two codes", code, code),
        ]
    if "rotate" in hooks_of(encoding):
        q, k = rotated_ones(encoding, positions)
        # else only the first tokens differ, which lack neighbours
        if (k[MARGIN:] - k[-1]).abs().max() > STAYS:
            panels += [
                _image("A key of ones, by position", k, encoding),
                _products("q·k of ones", q, k),
            ]
    return panels


def _image(title: str, code: Tensor, encoding: Encoding) -> Panel:
    used, lacking = (
        len(np.trim_zeros(code.any(0).numpy(), "b")),
        2 * encoding.shape.train_length - len(code),
    )
    image = np.pad(
        code[:, :used].mT.numpy(), [(0, 0), (0, lacking)], constant_values=np.nan
    )
    # the channels left out are 0
    return Panel(title, "position", "channel", image=image)


def _products(title: str, q: Tensor, k: Tensor) -> Panel:
    """Draw q_i · k_{i-r} by distance r: one curve if it depends on distance alone, else
    the range over positions i.
    """
    diagonals = [(q @ k.mT).diagonal(-distance) for distance in range(len(q))]
    mean, low, high = (
        np.array([float(of(d)) for d in diagonals])
        for of in (torch.mean, torch.min, torch.max)
    )
    same = (high - low).max() <= STAYS * np.abs(high).max()
    curves = (
        {"at every place": mean}
        if same
        else {"mean over places": mean, "lowest": low, "highest": high}
    )
    return Panel(title, DISTANCE, "product", curves)


def _added_panel(encoding: Encoding) -> Panel:
    """Draw the contribution of position to the last query's logits if all tokens are
    equal.
    """
    added = (
        contribution(
            encoding, positions_of(encoding, 2 * encoding.shape.train_length + MARGIN)
        )[0]
        .flip(-1)
        .numpy()
    )
    # such a weight is 0
    added = np.where(added < np.log(np.finfo(np.float32).tiny) / 2, np.nan, added)
    alike = np.allclose(added, added[:1], equal_nan=True)
    curves = {
        "all heads" if alike else f"head {head}": values
        for head, values in enumerate(added, start=1)
    }
    return Panel(
        "Added to the logit, equal tokens", DISTANCE, "added to the logit", curves
    )


def _attention_panel(encoding: Encoding) -> Panel:
    """Draw the mean weight by distance for random tokens under random projections; 1 is
    an even share.
    """
    length = positions_of(encoding, 2 * encoding.shape.train_length).shape[1]
    q, k, _, x, positions = read(
        encoding, random(SAMPLES, length, encoding.token_dim())
    )
    rows, _, weights, _ = pairs_of(encoding, q, k, x, positions, last=QUERIES)
    shares = by_distance(
        weights * torch.arange(1, length + 1)[rows.rows, None], rows, length
    )
    curves = {"mean over heads": shares.mean((0, 1))[: length - QUERIES + 1].numpy()}
    return Panel(
        "Mean attention, random tokens",
        DISTANCE,
        "times an even share",
        curves,
        log=True,
    )


@torch.no_grad()
def phrase_picture(
    builds: Iterable[tuple[str, Build]], phrase: str, pair: str
) -> Picture:
    """Return what position adds to the logit of two words, `daughter,called`, as their
    phrase moves.
    """
    words, pair_words, panels = phrase.lower().split(), pair.lower().split(","), []
    if (
        len({*pair_words}) != 2
        or not {*pair_words} <= {*words}
        or len(words) >= SHAPE.train_length
    ):
        raise UserError(
            f"--words is '{pair}': expected two different words of a phrase below"
            f" {SHAPE.train_length}"
        )
    for label, build in builds:
        key, query = sorted(map(words.index, pair_words))
        added = moved_logits(build(SHAPE), words, key, query, 2 * SHAPE.train_length)
        panels.append(
            Panel(label, "place of the later word", "added to the logit", {"": added})
        )
    return Picture(f"{pair} in '{phrase}'", panels)


def moved_logits(
    encoding: Encoding, words: list[str], key: int, query: int, length: int
) -> Numbers:
    """Return the encoding's change of two words' logit by the later word's place:
    (length,), NaN where it was not.
    """
    width, added = encoding.token_dim(), np.full(length, np.nan)
    vectors, sentence = (
        [random(width, seed=zlib.crc32(word.encode())) for word in words],
        random(1, length, width),
    )
    for start in range(
        0, min(length, encoding.max_length or length) - len(words) + 1, 4
    ):
        tokens = sentence[:, : encoding.max_length].clone()
        tokens[0, start : start + len(words)] = torch.stack(vectors)
        added[start + query] = logit_change(encoding, tokens)[0][
            0, 0, start + query, start + key
        ]
    return added


# -- of a run, on its own text
# -----------------------------------------------------------------------------------------


@torch.no_grad()
def run_picture(folder: Path) -> Picture:
    """Return the panels of a run; UserError if the folder is no run, or has no complete
    checkpoint.
    """
    config = load_config(folder)
    model = model_of(folder, config, tokenizer_of(folder))
    panels = (
        position_panels(model.encoding)
        if not config.data.task
        else picture("", lambda _: model.encoding).panels
    )
    if not config.data.task:
        tokens: Any = data.data_of(
            config.data, config.runtime.cache, folder / TOKENIZER
        )
        if (load_record(folder).get("data") or {}).get("sha256") not in (
            None,
            tokens.record["sha256"],
        ):
            raise UserError(
                f"the text of {folder} is no longer the one that it was trained on"
            )
        ids = (
            getattr(tokens, config.evaluation.split)
            .ids[: WINDOWS * LONGEST]
            .astype(np.int64)
        )
        panels += text_panels(model, config, torch.from_numpy(ids))
    return Picture(
        f"{folder.resolve().name}, trained", panels, config.training.train_length
    )


def text_panels(model: GPT, config: Config, ids: Tensor) -> list[Panel]:
    """Return panels by distance: what is added to logits, if the encoding adds
    anything, and mean attention.
    """
    trained, encoding, panels, curves = (
        config.training.train_length,
        model.encoding,
        [],
        {},
    )
    for length in (
        trained * ratio for ratio in RATIOS if ratio == 1 or trained * ratio <= LONGEST
    ):
        windows = ids[: len(ids) // length * length].view(-1, length)[:WINDOWS]
        if len(windows) and length <= (encoding.max_length or length):
            added, weights = (
                torch.stack([_by_distance(model, window[None]) for window in windows])
                .mean(0)
                .numpy()
            )
            curves[f"at {length}"] = weights.mean((0, 1))
    if not curves:
        raise UserError("the run's text is shorter than its training length")
    if any(
        layer_encoding(encoding, layer).hooks & {"distance_bias", "bias", "scores"}
        for layer in range(len(added))
    ):
        alike = np.allclose(added, added[:1], atol=1e-4, equal_nan=True)
        for layer in (
            [0]
            if alike
            else np.unique(np.linspace(0, len(added) - 1, LAYERS).astype(int))
        ):
            title = "Added to the logit" + (
                "" if alike else f", layer {layer + 1} of {len(added)}"
            )
            heads = {
                f"head {head}": values
                for head, values in enumerate(added[layer], start=1)
            }
            panels.append(Panel(title, DISTANCE, "mean on its own text", heads))
    return [
        *panels,
        Panel("Mean attention, its own text", DISTANCE, "weight", curves, log=True),
    ]


def _by_distance(model: GPT, ids: Tensor) -> Tensor:
    """Return by distance, for a window, what the model adds to logits, and its weights:
    (2, layers, heads, T).
    """
    encoding, length, means = model.encoding, ids.shape[1], []
    positions = encoding.positions(ids, None)
    x, window, sinks = (
        encoding.embed(model.tokens(ids), positions, ids),
        model.window,
        model.sinks,
    )
    described = make_layer(encoding, positions)
    for layer, block in enumerate(model.layers):

        def attend(
            q: Tensor, k: Tensor, v: Tensor, inputs: Tensor, layer: int = layer
        ) -> Tensor:
            last = max(1, min(QUERIES, length // 8))
            rows, _, weights, added = pairs_of(
                encoding, q, k, inputs, positions, layer, last, window, sinks
            )
            means.append(by_distance(torch.cat([added, weights]), rows, length))
            return attention(
                encoding,
                q,
                k,
                v,
                described.replace(index=layer, x=inputs),
                window,
                sinks,
            )

        x = block(x, attend)
    return torch.stack(means, dim=1)
