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
FEWEST_BLOCKS = 8
FEWEST_UNITS = 8
TOLERANCE = 5e-5  # nats per token in fp32, for a row
UNIT_TOLERANCE = 5e-4  # and for a unit of text
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
    for higher in range(1, wanted + 1):
        raised = [min(n, higher) for n in counts]
        if sum(raised) > wanted:
            break
        level = higher
    shares = [min(n, level) for n in counts]
    with_more = [document for document, n in enumerate(counts) if n > level]
    missing = wanted - sum(shares)
    for place in evenly(len(with_more), missing):
        document = with_more[place]
        shares[document] += 1

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
    if protocol == "nonoverlap":
        wanted = max(FEWEST_BLOCKS, wanted // 4)

    for reach in sorted(reaches, reverse=True):
        for pieces in choices[settings["documents"]]:
            candidates = []
            for start, end in pieces:
                if protocol == "fixed_target":
                    first = start + reach - targets + 1
                    places = range(first, end - targets + 1, targets)
                else:
                    places = range(start, end - reach, reach)
                candidates.append(places)
            firsts = dealt(candidates, wanted)
            if len(firsts) >= FEWEST_BLOCKS:
                return firsts, reach
    raise ValueError(f"the text here is too short for {protocol}")


def spans(firsts: list[int], reach: int, length: int) -> Blocks:
    """Return the windows of `nonoverlap`, side by side in each span, at one length."""
    blocks = []
    for first in firsts:
        block = []
        for number in range(reach // length):
            start = first + number * length
            block.append(Window(start, length, length))
        blocks.append(block)
    return blocks


def contexts(firsts: list[int], length: int, targets: int, trained: int) -> Blocks:
    """Return the windows of `fixed_target`, which end in their targets, at one
    length.
    """
    part = targets
    if length < trained:  # windows too short to score a whole block
        most = max(1, length / 2)
        while targets % part or part > most:
            part -= 1
    blocks = []
    for first in firsts:
        block = []
        for end in range(first + part, first + targets + 1, part):
            start = end - 1 - length
            block.append(Window(start, length, part))
        blocks.append(block)
    return blocks


def blocks_of(
    protocol: str,
    placed: tuple[list[int], int],
    length: int,
    targets: int,
    trained: int,
) -> Blocks:
    """Return the windows that a protocol reads and scores at one length."""
    firsts, reach = placed
    if protocol == "nonoverlap":
        return spans(firsts, reach, length)
    return contexts(firsts, length, targets, trained)


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

    def __init__(self, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.layers = config["model"]["n_layers"]
        self.heads = config["model"]["n_heads"]
        self.encoding = config["encoding"]

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
            hidden = self.linear(f"{block}.mlp.up", normed)
            x = x + self.linear(f"{block}.mlp.down", F.gelu(hidden))
        normed = self.norm("norm", x[:, -scored:])
        logits = self.linear("tokens", normed).transpose(1, 2)  # (B, V, scored)
        labels = ids[:, -scored:]
        return F.cross_entropy(logits, labels, reduction="none")

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
        wide = mixed.transpose(1, 2).flatten(2)  # (B, T, D)
        return self.linear(f"{name}.out", wide)

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
        first = a * cosine - b * sine
        second = a * sine + b * cosine
        return torch.stack((first, second), dim=-1).flatten(-2)

    def mask(self, length: int, window: int | None) -> Tensor:
        """Return the term added to logits, (H, T, T) or (1, T, T): -inf for hidden
        keys, and ALiBi's penalty.
        """
        places = torch.arange(length)
        distance = places[:, None] - places
        is_later = distance < 0
        is_far = distance >= (window or length)
        slopes = torch.tensor(self.slopes())
        mask = -slopes[:, None, None] * distance
        return mask.masked_fill(is_later | is_far, -math.inf)

    def slopes(self) -> list[float]:
        """Return ALiBi's penalty per token of distance, by head; one of 0 for RoPE."""
        if self.encoding["name"] == "rope":
            return [0.0]
        if self.encoding["slopes"]:
            return self.encoding["slopes"]
        return [2 ** (-8 * n / self.heads) for n in range(1, self.heads + 1)]


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
        separator = tokenizer.token_to_id(SEPARATOR)
        self.bytes[separator] = 0

        newest = max((folder / "checkpoint").glob("step-*"))
        weights = safetensors.torch.load_file(newest / "model.safetensors")
        self.model = Model(weights, self.config)

        self.rows = []
        lines = (folder / "rows.jsonl").read_text(encoding="utf-8")
        for line in lines.splitlines():
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
            read = []
            for start, length, _ in block:
                read.append(self.text.ids[start : start + length + 1])
            ids = torch.from_numpy(np.stack(read))
            nll = self.model.nll(ids, block[0].scored, window)
            total = nll.double().sum()
            totals.append(total.item())
        return np.array(totals)

    def agrees(self, row: Row) -> bool:
        """Return whether a row has these targets, documents, tokens and bytes, and
        these nats in all and per unit.
        """
        protocol = row["protocol"]
        length = row["length"]
        targets = self.settings["targets"]
        reaches = self.reaches(row)
        placed = placement(protocol, self.text, reaches, self.settings)
        blocks = blocks_of(protocol, placed, length, targets, self.trained)

        scored = [places(block) for block in blocks]
        n_scored = [len(block) for block in scored]
        first_targets = [block[0] for block in scored]
        unit, documents = units(self.text, first_targets)
        tokens = np.bincount(unit, n_scored)
        nll = np.bincount(unit, self.nats(blocks, row["window"]))
        n_bytes = 0
        for token in self.text.ids[np.concatenate(scored)]:
            n_bytes += self.bytes[token]

        mean = nll.sum() / tokens.sum()
        apart = np.abs(nll - row["units"]["nll"]) / tokens
        found = [
            targets_sha256(blocks, self.text.ids) == row["targets_sha256"],
            row["units"]["document"] == documents,
            row["units"]["tokens"] == tokens.tolist(),
            row["n_bytes"] == n_bytes,
            abs(mean - row["nll"]) <= TOLERANCE,
            apart.max() <= UNIT_TOLERANCE,
        ]
        return all(found)


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
    of_unit = [document[names.index(name)] for name in known]
    return unit, of_unit


def segments(document: list[int]) -> list[tuple[int, int]]:
    """Return the segment of each block: sixteen in all, by the documents' shares."""
    names = []
    for number in sorted(set(document)):
        n = document.count(number)
        share = round(16 * n / len(document))
        parts = min(n, max(1, share))
        names += [(number, block * parts // n) for block in range(n)]
    return names
