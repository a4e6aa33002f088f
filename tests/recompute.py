"""Recompute a run's rows from tokens and weights, without posbench: docs/protocol.md in
plain torch.

It places targets again, runs the model in fp32 with whole attention matrices, and
compares every row of `fixed_target`, its windowed baseline and `nonoverlap`, and its
sums by unit of text. It knows models of `model=gpt` with rope or alibi. It imports
nothing of posbench, so that it cannot repeat posbench's errors.
"""

import bisect
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


class Window(NamedTuple):
    """Reads `length` tokens from `start` on. Each predicts the next token; the last
    `scored` predictions count.
    """

    start: int
    length: int
    scored: int


Blocks = list[list[Window]]  # the windows of each block of targets


def evenly(n: int, k: int) -> list[int]:
    """Return k of n places, evenly spread: each in the middle of an equal share."""
    return [(2 * j + 1) * n // (2 * k) for j in range(k)]


def dealt(candidates: list[range], wanted: int) -> list[int]:
    """Return `wanted` candidates in text order, the same number per document as far as
    each has enough.
    """
    counts = [len(each) for each in candidates]
    wanted = min(wanted, sum(counts))
    level = 0
    while sum(min(n, level + 1) for n in counts) <= wanted and level < wanted:
        level += 1
    shares = [min(n, level) for n in counts]
    larger = [document for document, n in enumerate(counts) if n > level]
    for place in evenly(len(larger), wanted - sum(shares)):
        shares[larger[place]] += 1

    chosen = []
    for candidate, share in zip(candidates, shares, strict=True):
        chosen += [candidate[i] for i in evenly(len(candidate), share)]
    return chosen


def placement(
    protocol: str, text: Stream, reaches: set[int], settings: dict[str, Any]
) -> tuple[list[int], int]:
    """Return each block's first token (target, or start of a span) at the longest of
    `reaches` with enough blocks.
    """
    targets = settings["targets"]
    wanted = settings["blocks"]
    documents = list(itertools.pairwise(text.starts))
    joined = [(0, text.starts[-1])]
    choices = {"doc": [documents], "concat": [joined], "auto": [documents, joined]}
    of_settings = choices[settings["documents"]]
    if protocol == "nonoverlap":
        wanted = max(FEWEST_BLOCKS, wanted // 4)

    for reach, pieces in itertools.product(sorted(reaches, reverse=True), of_settings):
        candidates = []
        for start, end in pieces:
            if protocol == "fixed_target":
                first = start + reach - targets + 1
                candidates.append(range(first, end - targets + 1, targets))
            else:
                candidates.append(range(start, end - reach, reach))
        firsts = dealt(candidates, wanted)
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
        offsets = range(0, reach // length * length, length)
        return [
            [Window(first + i, length, length) for i in offsets] for first in firsts
        ]

    part = targets
    if length < train_length:  # windows too short to score a whole block
        while targets % part or part > max(1, length / 2):
            part -= 1
    blocks = []
    for first in firsts:
        ends = range(first + part, first + targets + 1, part)
        blocks.append([Window(end - 1 - length, length, part) for end in ends])
    return blocks


def places(block: list[Window]) -> list[int]:
    """Return the places of a block's targets, in ascending order."""
    found = []
    for window in block:
        end = window.start + window.length + 1
        found += range(end - window.scored, end)
    return sorted(found)


def targets_sha256(blocks: Blocks, ids: np.ndarray) -> str:
    """Return the digest of the targets' places in ascending order, then blocks, then
    ids: int64, little-endian.
    """
    scored = []
    for number, block in enumerate(blocks):
        scored += [(place, number) for place in places(block)]
    where, numbers = np.array(sorted(scored), dtype="<i8").T
    digest = hashlib.sha256(where.tobytes())
    digest.update(numbers.tobytes())
    digest.update(ids[where].astype("<i8").tobytes())
    return digest.hexdigest()


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
            block = f"blocks.{layer}"
            normed = self.norm(f"{block}.attention_norm", x)
            x = x + self.attention(f"{block}.attention", normed, mask)
            normed = self.norm(f"{block}.mlp_norm", x)
            hidden = F.gelu(self.linear(f"{block}.mlp.up", normed))
            x = x + self.linear(f"{block}.mlp.down", hidden)
        logits = self.linear("tokens", self.norm("norm", x[:, -scored:]))
        labels = ids[:, -scored:]
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def attention(self, name: str, x: Tensor, mask: Tensor) -> Tensor:
        """Return softmax(q k / sqrt(d) + mask) v; the packed projection has the
        channels of q, then of k, then of v.
        """
        packed = self.linear(f"{name}.qkv", x)
        by_head = packed.unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, d)
        q, k, v = by_head.permute(2, 0, 3, 1, 4)  # (B, H, T, d)
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
        frequency = float(self.encoding["base"]) ** (-2 * pair / width)
        position = torch.arange(length, dtype=torch.float64)
        angle = position[:, None] * frequency  # (T, d / 2)
        cosine = angle.cos().float()
        sine = angle.sin().float()
        a = x[..., 0::2]
        b = x[..., 1::2]
        turned = torch.stack((a * cosine - b * sine, a * sine + b * cosine), dim=-1)
        return turned.flatten(-2)

    def mask(self, length: int, window: int | None) -> Tensor:
        """Return the term added to logits, (H, T, T) or (1, T, T): -inf for hidden
        keys, and ALiBi's penalty.
        """
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        slopes = [0.0]
        if self.encoding["name"] == "alibi":
            heads = range(1, self.heads + 1)
            slopes = self.encoding["slopes"] or [
                2 ** (-8 * n / self.heads) for n in heads
            ]
        mask = -torch.tensor(slopes)[:, None, None] * distance
        return mask.masked_fill(hidden, -math.inf)


class Run:
    """A run folder, and the tokens of the split on which its rows were measured."""

    def __init__(self, folder: Path, text: Stream) -> None:
        self.text = text
        config = (folder / "config.yaml").read_text(encoding="utf-8")
        self.config = yaml.safe_load(config)
        self.trained = self.config["training"]["train_length"]
        self.settings = self.config["evaluation"]

        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        # How many UTF-8 bytes of text each id stands for: byte-level BPE writes one
        # character per byte.
        self.bytes = {i: len(token) for token, i in tokenizer.get_vocab().items()}
        self.bytes[tokenizer.token_to_id(SEPARATOR)] = 0

        newest = max((folder / "checkpoint").glob("step-*"))
        weights = safetensors.torch.load_file(newest / "model.safetensors")
        self.model = Model(weights, self.config["model"], self.config["encoding"])

        self.rows = []
        for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "protocol" in row and row["task"] is None:
                self.rows.append(row)

    def reaches(self, row: Row) -> set[int]:
        """Return the contexts that may have placed the row's targets: the requested
        lengths and their halvings, and those of rows of the same targets.
        """
        reaches = {round(ratio * self.trained) for ratio in self.settings["ratios"]}
        longest = round((self.settings["longest"] or 1) * self.trained)
        while longest:
            reaches.add(longest)
            longest //= 2
        for other in self.rows:
            if other["targets_sha256"] == row["targets_sha256"]:
                reaches.add(other["length"])
        return {length for length in reaches if length >= self.trained}

    @torch.inference_mode()
    def nats(self, blocks: Blocks, window: int | None) -> np.ndarray:
        """Return nats summed over each block's targets, in double precision."""
        totals = []
        for block in blocks:
            read = [self.text.ids[w.start : w.start + w.length + 1] for w in block]
            ids = torch.from_numpy(np.stack(read))
            nll = self.model.nll(ids, block[0].scored, window)
            totals.append(float(nll.double().sum()))
        return np.array(totals)

    def agrees(self, row: Row) -> bool:
        """Return whether a row has these targets, documents, tokens and bytes, and
        these nats in all and per unit.
        """
        protocol = row["protocol"]
        placed = placement(protocol, self.text, self.reaches(row), self.settings)
        targets = self.settings["targets"]
        blocks = blocks_of(protocol, placed, row["length"], targets, self.trained)
        scored = [places(block) for block in blocks]
        read = self.text.ids[np.concatenate(scored)]
        unit, documents = units(self.text, [block[0] for block in scored])
        tokens = np.bincount(unit, [len(block) for block in scored])
        nll = np.bincount(unit, self.nats(blocks, row["window"]))

        apart = abs(nll.sum() / tokens.sum() - row["nll"])
        units_apart = np.abs(nll - row["units"]["nll"]) / tokens
        return bool(
            targets_sha256(blocks, self.text.ids) == row["targets_sha256"]
            and row["units"]["document"] == documents
            and row["units"]["tokens"] == tokens.tolist()
            and row["n_bytes"] == sum(self.bytes[i] for i in read)
            and apart <= TOLERANCE
            and units_apart.max() <= UNIT_TOLERANCE
        )


def units(text: Stream, firsts: list[int]) -> tuple[list[int], list[int]]:
    """Return the unit of text of each block, by its first target, and the document of
    each unit.
    """
    stretch = [bisect.bisect(text.starts, first) - 1 for first in firsts]
    document = stretch
    if text.sources is not None:
        document = [text.sources[number] for number in stretch]

    names: list[Any] = document
    if len(set(document)) < FEWEST_UNITS:
        names = segments(document)
        # or the stretches held out of them if there are eight
        if text.sources is not None and len(set(stretch)) >= FEWEST_UNITS:
            names = stretch
    known = sorted(set(names))
    unit = [known.index(name) for name in names]
    return unit, [document[names.index(name)] for name in known]


def segments(document: list[int]) -> list[tuple[int, int]]:
    """Return the segment of each block: sixteen in all, by the documents' shares."""
    names = []
    for number in sorted(set(document)):
        n = document.count(number)
        parts = min(n, max(1, round(16 * n / len(document))))
        names += [(number, block * parts // n) for block in range(n)]
    return names
