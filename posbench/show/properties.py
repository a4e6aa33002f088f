"""The properties that tutorials want from a positional encoding, measured, beside the tutorials' verdicts.

Everything is computed in fp64 with fixed seeds through the public functions (`embed`, `rotate`, `distance_bias`,
`attention_logits`, `attention_output`), so a new encoding needs no code here. Learned tables are drawn from N(0,1)
first: a table of zeros would look like no encoding.

Sources of the properties:
- "Positional Encodings of Attention Mechanisms: Sinusoidal, Rotary Positional Encodings (Part 2)": order, uniqueness,
  relative and continuous, invariance, purpose.
- "Evolution of Positional Encoding in the Transformer Module" (fun ai course, slides): zero mean, spread, and that
  scores depend on relative distance.
- "Rotary Position Embedding": shift linearity, PE(pos + k) = T^k PE(pos).
- "A Brief Summary on Positional Encoding Methods" (2024-08-22): no embeddings beyond a learned table's length.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import PAIRWISE, Encoding, Shape, shared
from posbench.errors import UserError
from posbench.model.attention.reference import attention_logits, attention_output
from posbench.show import codes, schemes
from posbench.show.schemes import Scheme
from posbench.terminal import console, tables

WIDTH = 32  # d_model; one head, so head_dim too
CODE_WIDTH = 64  # for mean and spread, which depend on the width
# Not a power of two, so that the ends of `binary` and `learned` differ. Below the farthest measured position, so that
# changes beyond it show. Above T5's max_distance.
TRAIN_LENGTH = 160
ORDER_LENGTH = 48
ORDER_BATCH = 32  # sequences at a time: all 1,082 at once would be 4 GB for encodings that work on whole matrices
UNIQUE_LENGTH = 256
BF16_LENGTH = 512  # whole numbers above 256 collide in bf16
RELATIVE_LENGTH = 64
SPREAD_LENGTH = 128
SHIFTS = 191
HALVINGS = 14  # of the step between two positions
GPT2_RMS = 0.02  # of token embeddings

NOT_APPLICABLE = "n/a"


@dataclasses.dataclass(frozen=True)
class Measured:
    """One property of one encoding."""

    verdict: str
    figures: dict[str, float | int | None] = dataclasses.field(default_factory=dict)
    tutorials: str | None = None  # the tutorials' verdict; None if they give none
    explanation: str | None = None  # why the two disagree, if they do

    @property
    def disagrees(self) -> bool:
        return self.tutorials is not None and self.tutorials != self.verdict


@dataclasses.dataclass(frozen=True)
class Properties:
    """All properties of one encoding. Verdicts are words; the numbers behind them are in `figures`."""

    name: str
    order: Measured  # do swapped tokens change what the last one reads?
    uniqueness: Measured  # does every position, or distance, have its own code?
    relative_code: Measured  # do codes differ by distance alone?
    relative_logit: Measured  # is a pair's logit the same wherever it stands?
    shift_linear: Measured  # is code(i + 1) an affine function of code(i)?
    continuous: Measured  # is there a code between two positions, close to both?
    invariance: Measured  # is code(i) the same in a longer input?
    purpose: Measured  # it changes scores, values, both, normaliser (+sum) or neither
    zero_mean: Measured
    spread: Measured
    max_length: Measured


PROPERTIES = tuple(field.name for field in dataclasses.fields(Properties) if field.name != "name")

_SAID = ("order", "uniqueness", "relative_code", "shift_linear", "continuous", "invariance", "purpose", "max_length")


def _said(verdicts: str, **more: str) -> dict[str, str]:
    words = dict(zip(_SAID, verdicts.split(), strict=True))
    return {name: word.replace("_", " ") for name, word in (words | more).items() if word != "-"}


# Verdicts given by the tutorials or implied by them (sources above); "-": none.
TUTORIALS: dict[str, dict[str, str]] = {
    "none": _said("no no yes - n/a yes neither any", relative_logit="yes"),
    "index": _said("partial yes yes - yes yes both any"),
    "minmax": _said("yes yes yes - yes no both any"),
    "binary": _said("yes yes yes - no yes both -"),
    "sine": _said("yes yes no no yes yes both any"),
    "sinusoidal": _said("yes yes yes yes yes yes both any", relative_logit="no", zero_mean="yes"),
    "learned": _said("yes yes no - no yes both train_length", relative_logit="no"),
    "shaw": _said("partial no yes - no yes both any", relative_logit="yes"),
    "t5": _said("partial no yes - no yes scores any", relative_logit="yes"),
    "rope": _said("yes yes yes - yes yes scores any", relative_logit="yes"),
    "alibi": _said("yes yes yes - yes yes scores any", relative_logit="yes"),
}

EXPLANATIONS: dict[tuple[str, str], str] = {
    ("binary", "relative_code"): "digits turn over evenly, but neighbours do not lie equally far apart: "
    "1 and 2 differ in two digits, 2 and 3 in one",
    ("sinusoidal", "zero_mean"): "entries lie in -1..1, yet the slow cosines stay near 1 over any usual length, "
    "so the mean is about half of the rms; it is 0 over whole periods only",
}


def measure(words: list[str] | None = None) -> list[Properties]:
    """Measure encodings, each name followed by its options (rope base=100); all of them by default.

    Raises:
        UserError: an unknown name or option.
    """
    asked = schemes.parted(words or encodings.names())
    return [_measure_one(one) for one in [schemes.scheme(*words, _shape()) for words in asked]]


def main(words: list[str] | None = None, as_json: bool = False) -> None:
    """Print a table of verdicts; for given names also the numbers behind them; or everything as JSON."""
    measured = measure(words)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in measured], indent=2, allow_nan=False))
        return
    out = console.stdout()
    out.print(_overview(measured, out))
    for one in measured if words else []:
        out.print(_details(one, out))
    for one in measured:
        for name in PROPERTIES:
            if explanation := getattr(one, name).explanation:
                out.print(f"* {one.name}, {name.replace('_', ' ')}: {explanation}.")


def _measure_one(scheme: Scheme) -> Properties:
    results = {}
    with codes.in_double(), torch.no_grad():
        for index, (title, measurement) in enumerate(_MEASUREMENTS.items()):
            torch.manual_seed(index)
            results[title] = _beside_tutorials(scheme.label, title, measurement(scheme))
    return Properties(name=scheme.label, **results)


def _beside_tutorials(name: str, title: str, measured: Measured) -> Measured:
    measured = dataclasses.replace(measured, tutorials=TUTORIALS.get(name, {}).get(title))
    if not measured.disagrees:
        return measured
    return dataclasses.replace(measured, explanation=EXPLANATIONS.get((name, title)))


def _overview(measured: list[Properties], out: Console) -> Table:
    note = "* the tutorials say otherwise. Figures: posbench properties NAME, or --json"
    table = tables.table(out, "Properties, measured", note, tight=True)
    table.add_column("encoding", no_wrap=True)
    cells = {name: [_cell(getattr(one, name)) for one in measured] for name in _HEADERS}
    words = [["encoding", *(one.name for one in measured)]]
    words += [[*_HEADERS[name].split(), *(cell.plain for cell in column)] for name, column in cells.items()]
    spare = [1 + list(_HEADERS).index(name) for name in _SPARE]
    shown = tables.fitting([max(map(len, column)) for column in words], spare, out.width, tables.TIGHT)
    names = [name for at, name in enumerate(_HEADERS, start=1) if at in shown]
    for name in names:
        longest_word = max(map(len, _HEADERS[name].split()))
        table.add_column(_HEADERS[name], no_wrap=name in ("order", "purpose"), min_width=longest_word)
    for at, one in enumerate(measured):
        table.add_row(one.name, *(cells[name][at] for name in names))
    return table


def _cell(measured: Measured) -> Text:
    mark = "*" if measured.disagrees else ""
    if measured.verdict == "figure":
        return Text(f"{next(iter(measured.figures.values())):.3g}{mark}")
    return Text(f"{measured.verdict}{mark}", _COLOURS.get(measured.verdict, ""))


def _details(one: Properties, out: Console) -> Table:
    table = tables.table(out, one.name)
    for header in ("property", "measured", "tutorials", "figures"):
        table.add_column(header)
    for name in PROPERTIES:
        measured = getattr(one, name)
        figures = ", ".join(f"{key} {_number(value)}" for key, value in measured.figures.items() if value is not None)
        table.add_row(name.replace("_", " "), _cell(measured), measured.tutorials or "", figures.replace("_", " "))
    return table


def _number(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3g}"


# Columns that a narrow terminal leaves out, least important first.
_SPARE = ("shift_linear", "max_length", "purpose", "invariance", "continuous", "relative_code", "uniqueness")
# The verdicts, which fit into 80 characters; mean and spread have none.
_HEADERS = {
    "order": "order",
    "uniqueness": "unique",
    "relative_code": "rel. code",
    "relative_logit": "rel. logit",
    "shift_linear": "shift lin.",
    "continuous": "cont.",
    "invariance": "invar.",
    "purpose": "purpose",
    "max_length": "max. length",
}
_COLOURS = {"yes": "green", "no": "yellow", "partial": "cyan"}  # distinct for colour-blind readers; words say it too


def _build(scheme: Scheme, length: int = 1, width: int = WIDTH, draw: bool = True) -> Encoding:
    """Build with one head and two layers, and with a longer training length only if `length` requires it."""
    return codes.build(scheme.name, _shape(width), length, draw, scheme.options)


def _shape(width: int = WIDTH) -> Shape:
    return Shape(width, n_heads=1, n_layers=2, train_length=TRAIN_LENGTH, token_rms=GPT2_RMS)


# -- the measurements --------------------------------------------------------------------------------------------------


def _order(scheme: Scheme) -> Measured:
    """Swap every two tokens before the last one: how often does its output change?"""
    encoding = _build(scheme, ORDER_LENGTH)
    plain = _swaps_seen(encoding, layers=1, norm=False)
    pairs = math.comb(ORDER_LENGTH - 1, 2)
    score = plain / pairs
    verdict = "yes" if score >= 0.99 else "no" if score <= 0.01 else "partial"
    figures: dict[str, float | int | None] = {
        "swaps_seen": plain,
        "swaps": pairs,
        "swaps_seen_after_layernorm": _swaps_seen(encoding, layers=1, norm=True),
        "swaps_seen_by_two_layers": _swaps_seen(encoding, layers=2, norm=False),
        "directional": int(_directional(encoding)),
    }
    return Measured(verdict, figures)


def _swaps_seen(encoding: Encoding, layers: int, norm: bool) -> int:
    """The number of swaps that change the last output of causal layers by more than 1e-9 of its size."""
    first, second = torch.triu_indices(ORDER_LENGTH - 1, ORDER_LENGTH - 1, offset=1)
    original = torch.arange(ORDER_LENGTH)
    index = original.repeat(len(first), 1)
    rows = torch.arange(len(first))
    index[rows, first], index[rows, second] = second, first
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(ORDER_LENGTH, encoding.token_dim(), generator=generator)
    weights = torch.randn(layers, 3, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    batches = torch.split(torch.cat([original[None], index]), ORDER_BATCH)
    positions = shared(codes.positions_of(encoding, ORDER_LENGTH), consecutive=False)
    last = torch.cat([_last_output(encoding, tokens[batch], positions, weights, norm) for batch in batches])
    change = (last[1:] - last[0]).abs().amax(-1)
    return int((change > 1e-9 * last[0].abs().max()).sum())


def _last_output(encoding: Encoding, x: Tensor, positions: Tensor, weights: Tensor, norm: bool) -> Tensor:
    """The last token's output (B, D) of causal layers with weights (layers, 3, D, D) on tokens (B, T, D)."""
    x = encoding.embed(x, positions, torch.zeros(x.shape[:2], dtype=torch.long))
    for layer, projections in enumerate(weights):
        x = F.layer_norm(x, x.shape[-1:]) if norm else x
        q, k, v = (x @ weight for weight in projections)
        last = 1 if layer == len(weights) - 1 else None
        out = attention_output(encoding, q[:, None], k[:, None], v[:, None], x, layer, positions, last=last)[:, 0]
        x = x + out
    return out[:, -1]


def _directional(encoding: Encoding) -> bool:
    """Whether, without a mask, the logit of two equal tokens depends on their order."""
    length = codes.MARGIN
    generator = torch.Generator().manual_seed(0)
    token = torch.randn(1, 1, encoding.token_dim(), generator=generator).expand(1, length, -1)
    positions = codes.positions_of(encoding, length)
    x = encoding.embed(token, positions, torch.zeros(1, length, dtype=torch.long))
    q, k = (x @ weight for weight in torch.randn(2, WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
    logits = attention_logits(encoding, q[:, None], k[:, None], x, positions=positions, causal=False)
    return bool(((logits - logits.mT).abs() > 1e-9 * logits.abs().max()).any())


def _uniqueness(scheme: Scheme) -> Measured:
    """The least distance between two codes in fp32, and the neighbours that become equal in bf16."""
    vectors = codes.code(_build(scheme, UNIQUE_LENGTH), torch.arange(UNIQUE_LENGTH)[None])
    vectors = torch.from_numpy(vectors.numpy().astype("float32").astype("float64"))
    gaps = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(math.inf)
    least = gaps.min().item()
    shared = (gaps <= 1e-6).any(-1).nonzero()
    longer = codes.code(_build(scheme, BF16_LENGTH), torch.arange(BF16_LENGTH)[None]).bfloat16()
    figures = {
        "least_gap": least,
        "first_shared": shared[0].item() if len(shared) else None,
        "bf16_collisions": int((longer[1:] == longer[:-1]).all(-1).sum()),
    }
    return Measured("yes" if least > 1e-6 else "no", figures)


def _relative_code(scheme: Scheme) -> Measured:
    """At equal distances of positions: the spread of distances between codes, or of contributions to the logit."""
    encoding = _build(scheme, RELATIVE_LENGTH + codes.MARGIN)
    spreads = [0.0]
    if "embed" in codes.hooks_of(encoding):
        vectors = codes.input_code(encoding, codes.positions_of(encoding, RELATIVE_LENGTH))
        spreads.append(_uneven(torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")))
    if codes.hooks_of(encoding) & ({"rotate"} | PAIRWISE):
        pairs = codes.contribution(encoding, codes.positions_of(encoding, RELATIVE_LENGTH + codes.MARGIN))
        spreads.extend(_uneven(matrix) for matrix in pairs[:, 0])
    return Measured("yes" if max(spreads) < 1e-4 else "no", {"unevenness": max(spreads)})


def _uneven(matrix: Tensor) -> float:
    """The widest range along a diagonal below the main one, in standard deviations of the matrix."""
    ranges = [float(d.max() - d.min()) for d in (matrix.diagonal(-r) for r in range(1, len(matrix)))]
    deviation = matrix[torch.isfinite(matrix)].std().item()
    return max(ranges) / deviation if deviation > 0 else 0.0


def _relative_logit(scheme: Scheme) -> Measured:
    """Two tokens at (10 + s, 7 + s): how far does their full logit change as the phrase shifts by s?"""
    length = 10 + SHIFTS
    encoding = _build(scheme, length)
    positions = codes.positions_of(encoding, length)
    ids = torch.zeros(codes.CONTENTS, length, dtype=torch.long)
    query, key = (
        encoding.embed(tokens.expand(-1, length, -1), positions, ids)
        for tokens in codes.fixed_tokens(2 * codes.CONTENTS, encoding.token_dim()).chunk(2)
    )
    weights = torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5
    q, k = (query @ weights[0])[:, None], (key @ weights[1])[:, None]
    logits = codes.pair_scores(encoding, q, k, query, positions)[:, 0]
    logit = logits.diagonal(-3, -2, -1)[:, 7:]  # (contents, shifts)
    ratio = ((logit.amax(-1) - logit.amin(-1)).max() / logit[:, 0].abs().mean()).item()
    return Measured("yes" if ratio < 1e-5 else "no", {"range_over_logit": ratio})


def _shift_linear(scheme: Scheme) -> Measured:
    """The residual of the best affine map from code(i) to code(i + 1), relative to the spread of codes."""
    encoding = _build(scheme, UNIQUE_LENGTH)
    if "embed" not in codes.hooks_of(encoding):
        return Measured(NOT_APPLICABLE, {"residual": None})
    vectors = codes.input_code(encoding, codes.positions_of(encoding, UNIQUE_LENGTH))
    before = F.pad(vectors[:-1], (0, 1), value=1.0)
    after = vectors[1:]
    fitted = before @ torch.linalg.lstsq(before, after, driver="gelsd").solution
    residual = ((after - fitted).norm() / (after - after.mean(0)).norm()).item()
    return Measured("yes" if residual < 1e-6 else "no", {"residual": residual})


def _continuous(scheme: Scheme) -> Measured:
    """Halve every step 14 times towards the largest change: over a slope it shrinks, a jump stays."""
    encoding = _build(scheme, RELATIVE_LENGTH)
    try:
        vectors = functools.partial(_code_between, encoding)
        low, high = torch.zeros(RELATIVE_LENGTH - 1), torch.ones(RELATIVE_LENGTH - 1)
        at_low, at_high = vectors(low), vectors(high)
        steps = (at_high - at_low).norm(dim=-1)
        if steps.max() < 1e-12:
            return Measured(NOT_APPLICABLE, {"steepness": None})  # independent of positions
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            at_middle = vectors(middle)
            left = ((at_middle - at_low).norm(dim=-1) >= (at_high - at_middle).norm(dim=-1))[:, None]
            low, high = torch.where(left[:, 0], low, middle), torch.where(left[:, 0], middle, high)
            at_low, at_high = torch.where(left, at_low, at_middle), torch.where(left, at_middle, at_high)
    except UserError:
        return Measured("no", {"steepness": None})  # defined for whole positions only
    steepness = ((at_high - at_low).norm(dim=-1) / (high - low)).max().item()
    moving = steps[steps > 1e-12].median().item()
    return Measured("yes" if steepness < 1e3 * moving else "no", {"steepness": steepness})


def _code_between(encoding: Encoding, fraction: Tensor) -> Tensor:
    """Codes of i + fraction_i; both ends of the sequence stay fixed, since some encodings depend on them."""
    inner = torch.arange(len(fraction)) + fraction
    ends = torch.tensor([0.0, len(fraction)])
    return codes.code(encoding, torch.cat([ends[:1], inner, ends[1:]])[None])[1:-1]


def _invariance(scheme: Scheme) -> Measured:
    """The largest change of the first 32 codes when the input doubles from 32 tokens to 64."""
    encoding = _build(scheme, RELATIVE_LENGTH)
    change = 0.0
    for hooks, code in (({"embed"}, codes.input_code), ({"rotate"}, codes.turn_code)):
        if codes.hooks_of(encoding) & hooks:
            short, long = (code(encoding, codes.positions_of(encoding, length))[:32] for length in (32, 64))
            change = max(change, (short - long).abs().max().item())
    if codes.hooks_of(encoding) & PAIRWISE:
        short, long = (codes.contribution(encoding, codes.positions_of(encoding, n))[..., :24, :24] for n in (32, 64))
        visible = torch.isfinite(short)
        change = max(change, (short[visible] - long[visible]).abs().max().item())
    return Measured("yes" if change < 1e-7 else "no", {"change": change})


def _purpose(scheme: Scheme) -> Measured:
    """Compare with no encoding: logits, outputs at equal weights, and weights at equal logits."""
    length = WIDTH
    encoding = _build(scheme, length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, length, encoding.token_dim(), generator=generator)
    positions = codes.positions_of(encoding, length)
    ids = torch.zeros(1, length, dtype=torch.long)
    weights = torch.randn(3, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    x = encoding.embed(tokens, positions, ids)
    bare = x - codes.input_code(encoding, positions) if "embed" in codes.hooks_of(encoding) else x
    q, k, v = (x @ weight[None] for weight in weights[:, None])
    bare_q, bare_k, bare_v = (bare @ weight[None] for weight in weights[:, None])

    logits = attention_logits(encoding, q, k, x, positions=positions)
    bare_logits = (bare_q @ bare_k.mT) * codes.first_layer(encoding).logit_scale
    change = torch.where(torch.isfinite(logits), logits - bare_logits, math.nan)
    scores = (change - change.nanmean(-1, keepdim=True)).abs().nan_to_num().max().item()
    arriving = codes.arriving(encoding, q, k, x, positions)
    output = attention_output(encoding, q, k, v, x, positions=positions)
    values = (output - arriving @ bare_v).abs().max().item()
    normaliser = (arriving - logits.softmax(-1)).abs().max().item()

    acts = [name for name, size in (("scores", scores), ("values", values)) if size > 1e-6]
    words = ["both"] if len(acts) == 2 else acts
    if normaliser > 1e-6:  # short, to fit beside scores in an overview
        words = [f"{words[0]}+sum"] if words else ["normaliser"]
    figures = {"scores": scores, "values": values, "normaliser": normaliser}
    return Measured("".join(words) or "neither", figures)


def _zero_mean(scheme: Scheme) -> Measured:
    vectors = _initial_code(scheme, SPREAD_LENGTH)
    if vectors is None:
        return Measured(NOT_APPLICABLE, {"mean": None, "std": None})
    return Measured("figure", {"mean": vectors.mean().item(), "std": vectors.std(correction=0).item()})


def _spread(scheme: Scheme) -> Measured:
    """Root mean square of the raw code, that is its ratio to tokens of rms 1, and the ratio to rms 0.02."""
    vectors = _initial_code(scheme, SPREAD_LENGTH)
    if vectors is None:
        return Measured(NOT_APPLICABLE, {"rms": None, "rms_over_gpt2_tokens": None})
    rms = vectors.square().mean().sqrt().item()
    return Measured("figure", {"rms": rms, "rms_over_gpt2_tokens": rms / GPT2_RMS})


def _initial_code(scheme: Scheme, length: int) -> Tensor | None:
    encoding = _build(scheme, length, width=CODE_WIDTH, draw=False)
    return (
        codes.input_code(encoding, codes.positions_of(encoding, length))
        if "embed" in codes.hooks_of(encoding)
        else None
    )


def _max_length(scheme: Scheme) -> Measured:
    end = _build(scheme).max_length
    verdict = "any" if end is None else "train length" if end == TRAIN_LENGTH else str(end)
    return Measured(verdict, {"max_length": end, "train_length": TRAIN_LENGTH})


_MEASUREMENTS: dict[str, Callable[[Scheme], Measured]] = {
    "order": _order,
    "uniqueness": _uniqueness,
    "relative_code": _relative_code,
    "relative_logit": _relative_logit,
    "shift_linear": _shift_linear,
    "continuous": _continuous,
    "invariance": _invariance,
    "purpose": _purpose,
    "zero_mean": _zero_mean,
    "spread": _spread,
    "max_length": _max_length,
}
