"""The panels of an encoding, as plain numbers; the hooks that it overrides decide which.

Learned tables are drawn from N(0,1), as in `codes.build`: an untrained table has no learned shape yet, but steps, end
and dependence on distance or position show at once.
"""

import dataclasses
import math
import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posbench.encodings._wrapper import Wrapper
from posbench.encodings.base import PAIRWISE, Encoding, Shape
from posbench.errors import UserError, did_you_mean
from posbench.show import codes
from posbench.show.schemes import Scheme

Numbers = NDArray[np.float64]

# A small model, for readable pictures: heads of 16 channels.
SHAPE = Shape(d_model=64, n_heads=4, n_layers=2, train_length=64)
DECAY_SAMPLES = 64
DECAY_QUERIES = 16  # the last queries: they see the most keys
FAINTEST = 1e-4  # attention, in multiples of an even share; below, a curve leaves the picture
STAYS = 1e-5  # largest change of a logit that counts as rounding
SHIFTS = 30


@dataclasses.dataclass(frozen=True)
class Heatmap:
    title: str
    x_label: str
    y_label: str
    values: Numbers  # (rows, columns), nan where undefined
    limit: float | None = None  # the column where training ended


@dataclasses.dataclass(frozen=True)
class Curves:
    title: str
    x_label: str
    y_label: str
    x: Numbers
    series: dict[str, Numbers]
    end: float | None = None  # of the x axis; None: the end of `x`
    limit: float | None = None  # where on the x axis training ended
    limit_y: float | None = None  # likewise on the y axis
    band: tuple[Numbers, Numbers] | None = None  # lowest and highest around the only series
    log_y: bool = False
    points: bool = False  # x counts whole things: pairs, layers
    even: bool = False  # y is in multiples of an even share
    note: str = ""  # a remark for the reader
    least_span: float = 0.0  # of the y axis, so that rounding does not look like change
    colour: int = 0  # of the first series, in the order of the colours

    def widened(self, low: float, high: float) -> tuple[float, float]:
        """The range of y, at least `least_span` wide."""
        lacking = max(0.0, self.least_span - (high - low))
        return low - 0.6 * lacking, high + 0.5 * lacking  # uneven: the middle is not between two rows of characters


Panel = Heatmap | Curves


@dataclasses.dataclass(frozen=True)
class Picture:
    """The panels of one encoding."""

    name: str
    subtitle: str
    panels: tuple[Panel, ...]
    train_length: int = SHAPE.train_length


def picture(scheme: Scheme) -> Picture:
    """Draw an encoding; UserError if its name, an option or `SHAPE` does not fit."""
    with codes.in_double(), torch.no_grad():
        encoding = codes.build(scheme.name, SHAPE, options=scheme.options)
        panels = of_positions(encoding)
        if codes.hooks_of(encoding) & PAIRWISE:
            panels.append(_by_distance(encoding))
        elif not panels and _varies(by_distance := _by_distance(encoding)):  # acts on q and k, but not as a rotation
            panels.append(by_distance)
        panels.append(_decay(encoding))
    notes = ["untrained: random parameters"] if any(True for _ in encoding.parameters()) else []
    return Picture(scheme.label, ", ".join([*notes, *first_layer_of_several(encoding)]), tuple(panels))


def of_positions(encoding: Encoding) -> list[Panel]:
    """An encoding's code at each position: at the input, and the rotation of q and k."""
    panels: list[Panel] = []
    if "embed" in codes.hooks_of(encoding):
        panels += [_code(encoding), _similarity(encoding)]
    if "rotate" in codes.hooks_of(encoding):
        panels += _rotary(encoding)
    return panels


def first_layer_of_several(encoding: Encoding) -> list[str]:
    """A note if the picture of a wrapper shows only the first layer's encoding."""
    used = codes.first_layer(encoding)
    around_nothing = isinstance(encoding, Wrapper) and [one.name for one in encoding.inner_encodings] == ["none"]
    return [] if used is encoding or around_nothing else [f"first layer: {used.name}"]


def room(encoding: Encoding) -> int:
    """The length of a picture's axis: twice the training length."""
    return 2 * encoding.shape.train_length


def defined(encoding: Encoding) -> int:
    """The length up to which the encoding is defined, at most the end of the axis."""
    return min(room(encoding), encoding.max_length or room(encoding))


def _code(encoding: Encoding) -> Heatmap:
    code = codes.input_code(encoding, codes.positions_of(encoding, defined(encoding)))
    used = int(code.any(0).nonzero().max()) + 1
    values = np.full((used, room(encoding)), np.nan)
    values[:, : len(code)] = code[:, :used].mT.numpy()
    dimension = "dimension" if used == code.shape[1] else "dimension (all others: 0)"
    return Heatmap("Code of each position", "position (tokens)", dimension, values, encoding.shape.train_length)


def _similarity(encoding: Encoding) -> Curves:
    """p_i · p_{i-r} by distance r: one line if it depends on distance alone, else a band over all positions i."""
    code = codes.input_code(encoding, codes.positions_of(encoding, defined(encoding)))
    products = code @ code.mT
    diagonals = [products.diagonal(-r) for r in range(len(products))]
    mean, low, high = (np.array([float(f(d)) for d in diagonals]) for f in (torch.mean, torch.min, torch.max))
    return Curves(
        title="Dot product of two codes",
        x_label="distance (tokens)",
        y_label="p(i) · p(i - r)",
        x=np.arange(len(mean), dtype=np.float64),
        series={"mean over places": mean},
        band=(low, high),
        end=room(encoding) - 1,
        limit=encoding.shape.train_length,
    )


def _rotary(encoding: Encoding) -> list[Panel]:
    """Angles, wavelengths and long-term decay, if `rotate` is a rotation of pairs."""
    angles = _turns_per_token(encoding)
    if angles is None:
        return []
    distance = np.arange(room(encoding))
    phases = np.exp(1j * distance[:, None] * angles)  # (distance, pair)
    with np.errstate(divide="ignore"):
        wavelengths = 2 * np.pi / angles
    pairs = np.arange(len(angles), dtype=np.float64)
    wave = Curves(
        title="Tokens until a pair has turned once",
        x_label="pair",
        y_label="wavelength (tokens)",
        x=pairs,
        series={"wavelength": np.where(np.isfinite(wavelengths), wavelengths, np.nan)},
        limit_y=encoding.shape.train_length,
        log_y=True,
        points=True,
    )
    bound = np.abs(phases.cumsum(axis=1)).mean(axis=1)
    decay = Curves(
        title="Long-term decay",
        x_label="distance (tokens)",
        y_label="relative to distance 0",
        x=distance.astype(np.float64),
        series={"q·k for q = k": phases.real.mean(axis=1), "bound (RoFormer)": bound / bound[0]},
        end=room(encoding) - 1,
        limit=encoding.shape.train_length,
    )
    turned = Heatmap(
        "Cosine of the angle turned",
        "position (tokens)",
        "pair",
        np.ascontiguousarray(phases.real.T),
        encoding.shape.train_length,
    )
    return [turned, wave, decay]


def _turns_per_token(encoding: Encoding) -> Numbers | None:
    """Radians per token of each pair, fastest first: the arguments of the step matrix's eigenvalues.

    None if steps differ between positions or turn nothing.
    """
    width = encoding.shape.head_dim
    positions = torch.arange(2 * codes.MARGIN + 2)[None]
    turned = codes.turn_code(encoding, positions).view(positions.shape[-1], width, -1)
    turned = turned[..., turned.shape[-1] // 2 :]  # the keys: queries may be scaled, even to 0
    if turned.shape[-1] != width:
        return None
    near, far = (torch.linalg.solve(turned[at], turned[at + 1]) for at in (codes.MARGIN, 2 * codes.MARGIN))
    if not torch.allclose(near, far, atol=1e-6):  # for example a mixture of speeds
        return None
    values = torch.linalg.eigvals(near)
    if not (values.imag.abs() > 1e-12).any():  # q and k change, but not by a rotation
        return None
    angles = values.angle().abs().sort(descending=True).values
    return np.asarray(angles[::2].numpy(), dtype=np.float64)


def _varies(curves: Curves) -> bool:
    return any(float(np.nanmax(added) - np.nanmin(added)) > STAYS for added in curves.series.values())


def _by_distance(encoding: Encoding) -> Curves:
    """The contribution of position to the last query's logits if all tokens are equal."""
    length = min(room(encoding) + codes.MARGIN, encoding.max_length or math.inf)
    pairs = codes.contribution(encoding, codes.positions_of(encoding, int(length)))
    added = pairs[0, :, -1].flip(-1).numpy()  # (H, distance)
    added = np.where(added < math.log(torch.finfo(torch.float64).tiny) / 2, np.nan, added)
    own = (
        "attend" in codes.hooks_of(encoding)
        and "bias" not in codes.hooks_of(encoding)
        and "distance_bias" not in codes.hooks_of(encoding)
    )
    shared = bool(np.allclose(added, added[:1], equal_nan=True))
    names = ["all heads"] if shared else [f"head {head + 1}" for head in range(len(added))]
    return Curves(
        title="Weight by distance, equal tokens" if own else "Added to the logit, equal tokens",
        x_label="distance (tokens)",
        y_label="log of the weight" if own else "added to the logit",
        x=np.arange(added.shape[1], dtype=np.float64),
        series=dict(zip(names, added, strict=False)),
        end=room(encoding) - 1,
        limit=encoding.shape.train_length,
    )


def _decay(encoding: Encoding) -> Curves:
    """Mean weight by distance for random tokens under random projections; 1 is an even share."""
    length = defined(encoding)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(DECAY_SAMPLES, length, encoding.token_dim(), generator=generator)
    q, k, x = _project(encoding, tokens, generator)
    weights = codes.arriving(encoding, q, k, x, codes.positions_of(encoding, length))
    rows = torch.arange(length - DECAY_QUERIES, length)[:, None]
    distance = torch.arange(length - DECAY_QUERIES + 1)
    share = weights.mean((0, 1))[rows, rows - distance] * (rows + 1)  # (queries, distance)
    by_distance = share.mean(0).numpy()
    return Curves(
        title="Mean attention, random tokens",
        x_label="distance (tokens)",
        y_label="times an even share",
        x=np.arange(len(by_distance), dtype=np.float64),
        series={"mean over heads": without_faint(by_distance, FAINTEST)},
        end=room(encoding) - 1,
        limit=encoding.shape.train_length,
        log_y=True,
        even=True,
        note=faint(by_distance, FAINTEST),
    )


def without_faint(weights: Numbers, least: float) -> Numbers:
    """The weights to draw on a logarithmic axis."""
    return np.where(weights > least, weights, np.nan)


def faint(weights: Numbers, least: float) -> str:
    """A note if some weights are left out; otherwise empty."""
    return f"below {least:g}: not drawn" if (weights <= least).any() else ""


def _project(encoding: Encoding, tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (B, H, T, Dh) under random projections, and the layer's input (B, T, D)."""
    ids = torch.zeros(tokens.shape[:2], dtype=torch.long)
    x = encoding.embed(tokens, codes.positions_of(encoding, tokens.shape[1]), ids)
    q, k = (_heads(encoding, x @ w) for w in _projections(encoding, generator))
    return q, k, x


def _projections(encoding: Encoding, generator: torch.Generator) -> Tensor:
    width = encoding.shape.d_model
    projections: Tensor = torch.randn(2, width, width, generator=generator) / width**0.5
    return projections


def _heads(encoding: Encoding, x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], encoding.shape.n_heads, -1).transpose(1, 2)


# -- a pair of words moved along a sentence ----------------------------------------------------------------------------


def moving(schemes: list[Scheme], phrase: str, words: tuple[str, str]) -> Picture:
    """Draw what position adds to the logit of two words of a phrase, by the place of the phrase; a panel per encoding.

    Raises:
        UserError: a word that is not in the phrase, or a phrase as long as the training length.
    """
    tokens = phrase.lower().split()
    key, query = sorted(_place(word, tokens) for word in words)
    if len(tokens) >= SHAPE.train_length:
        raise UserError(f"the phrase has {len(tokens)} words: expected fewer than {SHAPE.train_length}")
    panels = tuple(_moved(scheme, tokens, key, query) for scheme in schemes)
    return Picture("'{}' and '{}' in '{}'".format(*words, phrase), "", panels)


def _moved(scheme: Scheme, tokens: list[str], key: int, query: int) -> Curves:
    """Move a phrase along a longer sentence; the logit of its `query` with its `key` less that without encoding."""
    with codes.in_double(), torch.no_grad():
        encoding = codes.build(scheme.name, SHAPE, options=scheme.options)
        length = defined(encoding)
        starts = torch.linspace(0, length - len(tokens), SHIFTS).long()
        logits, bare = _phrase_logits(encoding, tokens, starts, length)
        rows = torch.arange(len(starts))
        with_encoding = logits[rows, 0, starts + query, starts + key]
        part = with_encoding - bare[rows, 0, starts + query, starts + key]
    where = (starts + query).numpy().astype(np.float64)
    differs = (part - part[0]).abs() > STAYS * max(1.0, float(with_encoding.abs().max()))
    said = f"changes by {float(part.max() - part.min()):.3g}" if differs.any() else "stays"
    until = where[int(differs.int().argmax()) - 1]  # the last place before the first change
    if differs.any() and until >= SHAPE.train_length / 2:
        said = f"stays to {until:g}, then {said}"
    return Curves(
        title=scheme.label,
        x_label="later word's place",
        y_label="added by position to the logit",
        x=where,
        series={"": part.numpy()},
        end=room(encoding) - 1,
        limit=SHAPE.train_length,
        least_span=max(1.0, float(part.mean().abs())),
        colour=int(differs.any()),
        note=said,
    )


def _place(word: str, tokens: list[str]) -> int:
    if word.lower() not in tokens:
        raise UserError(f"'{word}' is not a word of the phrase{did_you_mean(word, tokens)}")
    return tokens.index(word.lower())


def _phrase_logits(encoding: Encoding, words: list[str], starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Logits (shift, H, T, T) of the same tokens with the encoding and without it."""
    width = encoding.token_dim()
    generator = torch.Generator().manual_seed(0)
    sentence = torch.randn(length, width, generator=generator).repeat(len(starts), 1, 1)
    phrase = torch.stack([_embedding(word, width) for word in words])
    for row, start in enumerate(starts.tolist()):
        sentence[row, start : start + len(words)] = phrase
    ids = torch.zeros(sentence.shape[:2], dtype=torch.long)
    positions = codes.positions_of(encoding, length)
    x = encoding.embed(sentence, positions, ids)
    bare = x - codes.input_code(encoding, positions) if "embed" in codes.hooks_of(encoding) else x
    projections = _projections(encoding, generator)
    q, k, bare_q, bare_k = (_heads(encoding, tokens @ w) for tokens in (x, bare) for w in projections)
    return codes.pair_scores(encoding, q, k, x, positions), (bare_q @ bare_k.mT) * codes.first_layer(
        encoding
    ).logit_scale


def _embedding(word: str, width: int) -> Tensor:
    """A word's vector: random, but the same for the same word."""
    return torch.randn(width, generator=torch.Generator().manual_seed(zlib.crc32(word.encode())))
