"""Recompute a run's rows from tokens and weights, without posbench: docs/protocol.md in
plain torch.

It places targets again, runs the model in fp32 with whole attention matrices, and
compares every row of `fixed_target`, its windowed baseline and `nonoverlap`, and its
sums by unit of text. It knows models of `model=gpt` with rope or alibi. It imports
nothing of posbench, so that it cannot repeat posbench's errors.
"""

import bisect
import collections
import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

SEPARATOR = "<|endoftext|>"
FEWEST_BLOCKS = FEWEST_UNITS = 8
# nats per token in fp32: for a row, and for a unit of text
TOLERANCE, UNIT_TOLERANCE = 5e-5, 5e-4
Row = dict[str, Any]


class Stream(NamedTuple):
    """The tokens of a split: its documents in order, each after a separator."""

    ids: np.ndarray  # (tokens,) int64
    starts: list[int]  # the start of each document, and the end of the last one
    # if documents here are stretches: the number of each one's original document
    sources: list[int] | None = None


# A window reads `length` tokens from `start` on. Each predicts the next token; the last
# `scored` predictions count.
Window = collections.namedtuple("Window", "start length scored")
Blocks = list[list[Window]]  # the windows of each block of targets


def evenly(n: int, k: int) -> list[int]:
    """Return k of n places, evenly spread: each in the middle of an equal share."""
    return [(2 * j + 1) * n // (2 * k) for j in range(k)]


def dealt(candidates: list[range], wanted: int) -> list[int]:
    """Return `wanted` candidates in text order, the same number per document as far as
    each has enough.
    """
    counts = [len(each) for each in candidates]
    total = min(wanted, sum(counts))
    level = max(m for m in range(total + 1) if sum(min(n, m) for n in counts) <= total)
    shares = [min(n, level) for n in counts]
    more = [document for document, n in enumerate(counts) if n > level]
    for place in evenly(len(more), total - sum(shares)):
        shares[more[place]] += 1
    return [
        each[i]
        for each, share in zip(candidates, shares, strict=True)
        for i in evenly(len(each), share)
    ]


def placement(
    protocol: str, text: Stream, reaches: set[int], settings: dict[str, Any]
) -> tuple[list[int], int]:
    """Return each block's first token (target, or start of a span) at the longest of
    `reaches` with enough blocks.
    """
    targets = settings["targets"]
    blocks = settings["blocks"]
    documents = settings["documents"]
    choices = ["doc", "concat"] if documents == "auto" else [documents]
    for reach, boundaries in itertools.product(sorted(reaches, reverse=True), choices):
        pieces = list(
            itertools.pairwise(
                text.starts if boundaries == "doc" else [0, text.starts[-1]]
            )
        )
        if protocol == "fixed_target":
            firsts = dealt(
                [
                    range(a + reach - targets + 1, b - targets + 1, targets)
                    for a, b in pieces
                ],
                blocks,
            )
        else:
            firsts = dealt(
                [range(a, b - reach, reach) for a, b in pieces],
                max(FEWEST_BLOCKS, blocks // 4),
            )
        if len(firsts) >= FEWEST_BLOCKS:
            return firsts, reach
    raise ValueError(f"the text here is too short for {protocol}")


def blocks_of(
    protocol: str,
    placed: tuple[list[int], int],
    length: int,
    targets: int,
    train_length: int,
) -> Blocks:
    """Return the windows that a protocol reads and scores at one length."""
    firsts, reach = placed
    if protocol == "nonoverlap":
        return [
            [Window(first + i * length, length, length) for i in range(reach // length)]
            for first in firsts
        ]
    part = targets
    if length < train_length:  # windows too short to score a whole block
        part = max(
            n
            for n in range(1, targets + 1)
            if targets % n == 0 and n <= max(1, length / 2)
        )
    ends = range(part, targets + 1, part)
    return [
        [Window(first + end - 1 - length, length, part) for end in ends]
        for first in firsts
    ]


def places(block: list[Window]) -> list[int]:
    return sorted(w.start + w.length - i for w in block for i in range(w.scored))


def targets_sha256(blocks: Blocks, ids: np.ndarray) -> str:
    """Return the digest of the targets' places in ascending order, then blocks, then
    ids: int64, little-endian.
    """
    scored = sorted(
        (place, number)
        for number, block in enumerate(blocks)
        for place in places(block)
    )
    where, numbers = np.array(scored, dtype="<i8").T
    return hashlib.sha256(
        where.tobytes() + numbers.tobytes() + ids[where].astype("<i8").tobytes()
    ).hexdigest()


class Model:
    """The GPT of `model=gpt`: LayerNorm, attention, LayerNorm, exact GELU, no biases,
    the token table as head.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        model: dict[str, Any],
        encoding: dict[str, Any],
    ) -> None:
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.layers = model["n_layers"]
        self.heads = model["n_heads"]
        self.encoding = encoding

    def nll(self, ids: Tensor, scored: int, window: int | None) -> Tensor:
        """Return nats of the last `scored` of ids (B, T + 1), with at most `window`
        keys per query: (B, scored).
        """
        x = F.embedding(ids[:, :-1], self.weights["tokens.weight"])
        mask = self.mask(x.shape[1], window)
        for layer in range(self.layers):
            x = x + self.attention(
                f"blocks.{layer}.attention",
                self.norm(f"blocks.{layer}.attention_norm", x),
                mask,
            )
            hidden = F.gelu(
                self.linear(
                    f"blocks.{layer}.mlp.up", self.norm(f"blocks.{layer}.mlp_norm", x)
                )
            )
            x = x + self.linear(f"blocks.{layer}.mlp.down", hidden)
        logits = self.linear("tokens", self.norm("norm", x[:, -scored:]))
        return F.cross_entropy(
            logits.transpose(1, 2), ids[:, -scored:], reduction="none"
        )

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def attention(self, name: str, x: Tensor, mask: Tensor) -> Tensor:
        """Return softmax(q k / sqrt(d) + mask) v; the packed projection has the
        channels of q, then of k, then of v.
        """
        q, k, v = self.linear(f"{name}.qkv", x).chunk(3, dim=-1)
        # (B, H, T, d)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v)
        )
        if self.encoding["name"] == "rope":
            q = self.turned(q)
            k = self.turned(k)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.linear(f"{name}.out", mixed.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        """Return x with each pair of channels turned by position · base^(-2p/d), as in
        RoFormer's equation 34.
        """
        length, width = x.shape[-2:]
        pair = torch.arange(width // 2, dtype=torch.float64)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * float(
            self.encoding["base"]
        ) ** (-2 * pair / width)
        cosine = angle.cos().float()
        sine = angle.sin().float()
        a = x[..., 0::2]
        b = x[..., 1::2]
        return torch.stack(
            (a * cosine - b * sine, a * sine + b * cosine), dim=-1
        ).flatten(-2)

    def mask(self, length: int, window: int | None) -> Tensor:
        """Return the term added to logits, (H, T, T) or (1, T, T): -inf for hidden
        keys, and ALiBi's penalty.
        """
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        mask = torch.zeros(1, length, length)
        if self.encoding["name"] == "alibi":
            slopes = self.encoding["slopes"] or [
                2 ** (-8 * (head + 1) / self.heads) for head in range(self.heads)
            ]
            mask = -torch.tensor(slopes)[:, None, None] * distance
        return mask.masked_fill(hidden, -math.inf)


class Run:
    """A run folder, and the tokens of the split on which its rows were measured."""

    def __init__(self, folder: Path, text: Stream) -> None:
        self.text = text
        self.config = yaml.safe_load(
            (folder / "config.yaml").read_text(encoding="utf-8")
        )
        vocabulary = tokenizers.Tokenizer.from_file(
            str(folder / "tokenizer.json")
        ).get_vocab()
        # How many UTF-8 bytes of text each id stands for: byte-level BPE writes one
        # character per byte.
        self.bytes = {
            i: 0 if token == SEPARATOR else len(token)
            for token, i in vocabulary.items()
        }
        weights = safetensors.torch.load_file(
            max((folder / "checkpoint").glob("step-*")) / "model.safetensors"
        )
        self.model = Model(weights, self.config["model"], self.config["encoding"])
        lines = map(
            json.loads, (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        )
        self.rows = [row for row in lines if "protocol" in row and row["task"] is None]

    def reaches(self, row: Row) -> set[int]:
        """Return the contexts that may have placed the row's targets: the requested
        lengths and their halvings.
        """
        settings = self.config["evaluation"]
        trained = self.config["training"]["train_length"]
        longest = round((settings["longest"] or 1) * trained)
        halvings = {longest >> times for times in range(longest.bit_length())}
        paired = {
            other["length"]
            for other in self.rows
            if other["targets_sha256"] == row["targets_sha256"]
        }
        reaches = (
            {round(ratio * trained) for ratio in settings["ratios"]} | halvings | paired
        )
        return {length for length in reaches if length >= trained}

    @torch.inference_mode()
    def nats(self, blocks: Blocks, window: int | None) -> np.ndarray:
        """Return nats summed over each block's targets, in double precision."""
        totals = np.zeros(len(blocks))
        for number, block in enumerate(blocks):
            read = torch.from_numpy(
                np.stack(
                    [self.text.ids[w.start : w.start + w.length + 1] for w in block]
                )
            )
            totals[number] = (
                self.model.nll(read, block[0].scored, window).double().sum()
            )
        return totals

    def agrees(self, row: Row) -> bool:
        """Return whether a row has these targets, documents, tokens and bytes, and
        these nats in all and per unit.
        """
        text = self.text
        settings = self.config["evaluation"]
        placed = placement(row["protocol"], text, self.reaches(row), settings)
        trained = self.config["training"]["train_length"]
        blocks = blocks_of(
            row["protocol"], placed, row["length"], settings["targets"], trained
        )
        sums = self.nats(blocks, row["window"])
        where = [places(block) for block in blocks]
        unit, documents = units(text, [targets[0] for targets in where])
        nll = np.bincount(unit, sums)
        tokens = np.bincount(unit, [len(targets) for targets in where])
        n_bytes = sum(self.bytes[i] for i in text.ids[np.concatenate(where)])
        if [row["units"]["document"], row["units"]["tokens"], row["n_bytes"]] != [
            documents,
            tokens.tolist(),
            n_bytes,
        ]:
            return False
        worst = max(np.abs(nll - row["units"]["nll"]) / tokens)
        near = (
            abs(sums.sum() / tokens.sum() - row["nll"]) <= TOLERANCE
            and worst <= UNIT_TOLERANCE
        )
        return bool(near) and targets_sha256(blocks, text.ids) == row["targets_sha256"]


def units(text: Stream, firsts: list[int]) -> tuple[list[int], list[int]]:
    """Return the unit of text of each block, by its first target, and the document of
    each unit.
    """
    place = [bisect.bisect(text.starts, first) - 1 for first in firsts]
    document = (
        place if text.sources is None else [text.sources[stretch] for stretch in place]
    )
    names: list[Any] = document
    # then the stretches held out of them if there are eight, else segments
    if len(set(document)) < FEWEST_UNITS:
        names = place
        if text.sources is None or len(set(place)) < FEWEST_UNITS:
            names = []
            for number in sorted(set(document)):
                n = document.count(number)
                parts = min(n, max(1, round(16 * n / len(document))))
                names += [(number, at * parts // n) for at in range(n)]
    known = sorted(set(names))
    return [known.index(name) for name in names], [
        document[names.index(name)] for name in known
    ]
