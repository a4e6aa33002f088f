"""Recompute the results of a run from text and weights, without posbench: docs/protocol.md in plain torch.

    python scripts/recompute.py outputs/demo/rope-s0-b2cad543
    python scripts/recompute.py RUN --text novels/ --lengths 64,1024 --threads 2

Reads the run folder's config.yaml, run.json, tokenizer.json, rows.jsonl and weights, and the text. Splits,
tokenises and places targets again, runs the model in fp32 with whole attention matrices, and compares every row of
`fixed_target`, its windowed baseline and `nonoverlap`, and its sums by unit of text. Exits with 1 if
anything differs; nll may differ by 2e-3 nats per token for a run in bf16, by 5e-5 for one in fp32.

It covers only what a proof needs: the built-in corpus and folders of .txt, models of `model=gpt`, and the encodings
rope and alibi. It imports nothing of posbench (a test checks this), so that it cannot repeat posbench's errors.
"""

import argparse
import bisect
import dataclasses
import glob
import hashlib
import itertools
import json
import math
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

MODULES = Path(__file__).parents[1] / "posbench" / "data" / "builtin.txt"  # read as text
SEPARATOR = "<|endoftext|>"
FEWEST_BLOCKS = FEWEST_UNITS = 8
TOLERANCE = {"bf16": 2e-3, "fp32": 5e-5}  # nats per token, of a row
UNIT_TOLERANCE = {"bf16": 0.05, "fp32": 5e-4}  # per unit of text: fewer tokens, and a row hides a wrong one
BATCH_TOKENS = 8192


# -- from text to documents --------------------------------------------------------------------------------------------


def builtin_documents(library: Path) -> dict[str, str]:
    """Sources of the listed modules that exist here and are not blank, in the list's order."""
    lines = MODULES.read_text(encoding="utf-8").splitlines()
    found = {}
    for name in " ".join(line for line in lines if not line.startswith("#")).split():
        module = library.joinpath(*name.split("."))
        for file in (Path(f"{module}.py"), module / "__init__.py"):
            if file.is_file() and (text := decoded(file)).strip():
                found[name] = text
                break
    return found


def text_documents(path: Path) -> list[str]:
    """One document per .txt file of a folder (recursively) or of a glob, in the order of their paths."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts)]
    else:
        files = [path] if path.is_file() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    files = [file for file in files if file.is_file()]
    if any(file.suffix in (".jsonl", ".parquet") for file in files):
        sys.exit(f"{path}: this script reads .txt files only")
    texts = (decoded(file) for file in sorted(files) if file.suffix == ".txt")
    return [text for text in texts if text.strip()]


def decoded(file: Path) -> str:
    """Strict UTF-8, line ends as they are, without a byte-order mark."""
    return file.read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8")


def held_out(keys: Sequence[str], shares: tuple[float, float]) -> dict[str, list[int]]:
    """Indices of validation and test documents: the lowest hashes of keys, then the next; equal keys stay together."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    order = sorted(range(len(keys)), key=lambda i: digests[i])
    cuts = [0]
    for share in (shares[0], shares[0] + shares[1]):
        cut = max(cuts[-1] + 1, round(share * len(order)))
        while cut < len(order) and digests[order[cut]] == digests[order[cut - 1]]:
            cut += 1
        cuts.append(cut)
    return {"validation": sorted(order[: cuts[1]]), "test": sorted(order[cuts[1] : cuts[2]])}


def grown(held: dict[str, list[int]], texts: Sequence[str], wanted: int) -> dict[str, list[int]]:
    """With up to `wanted` test documents, while 70 % of the characters remain; equal texts stay together."""
    taken = {*held["validation"], *held["test"]}
    rest = sorted(set(range(len(texts))) - taken, key=lambda i: hashlib.sha256(texts[i].encode()).digest())
    alike = [list(group) for _, group in itertools.groupby(rest, key=lambda i: texts[i])]
    test, total, left = list(held["test"]), sum(map(len, texts)), sum(len(texts[i]) for i in rest)
    for group in alike[:-1]:
        left -= sum(len(texts[i]) for i in group)
        if len(test) >= wanted or left < 0.7 * total:
            break
        test += group
    return {**held, "test": sorted(test)}


def stretches(texts: Sequence[str], wanted: int) -> dict[str, list[str]]:
    """Validation and test stretches side by side, in the middle of each of equal parts of every text.

    Test stretches have 8,192 characters, or more to be 5 % of the text, or less to be 25 %; at most `wanted` in all,
    and 8 (or `wanted`) at least, both rounded up to the same number for each text.
    """
    share = min(max(0.05, wanted * 8192 / sum(map(len, texts))), 1 - 0.7 - 0.05)
    found: dict[str, list[str]] = {"validation": [], "test": []}
    for text in texts:
        fewest, most = math.ceil(min(8, wanted) / len(texts)), math.ceil(wanted / len(texts))
        n = min(most, max(fewest, int(share * len(text) / 8192)))
        validation, test = int(0.05 * len(text) / n), int(share * len(text) / n)
        for i in range(n):
            first = (2 * i + 1) * len(text) // (2 * n) - (validation + test) // 2
            found["validation"].append(text[first : first + validation])
            found["test"].append(text[first + validation : first + validation + test])
    return found


def split_documents(data: dict[str, Any], how: str, split: str, text: Path | None) -> list[str]:
    """The documents of one split, in their own order."""
    if data["source"] == "builtin":
        modules = builtin_documents(text or Path(sysconfig.get_path("stdlib")))
        names = list(modules)[: data["max_documents"]]
        return [modules[names[i]] for i in held_out(names, (0.06, 0.20))[split]]
    if data["source"] != "text" or data["articles"] or how not in ("document", "stretches"):
        sys.exit("this script reads the built-in corpus and .txt files that posbench split itself")
    texts = text_documents(text or Path(data["path"]).expanduser())[: data["max_documents"]]
    wanted = data.get("test_pieces")  # runs of earlier versions have no such key
    if len(texts) < 20:
        return stretches(texts, wanted or 8)[split]
    return [texts[i] for i in grown(held_out(texts, (0.05, 0.05)), texts, wanted or 0)[split]]


# -- from documents to tokens ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stream:
    """The tokens of a split: its documents in order, each after a separator."""

    ids: np.ndarray  # (tokens,) int64
    starts: list[int]  # start of each document, and the end of the last
    sources: list[int] | None = None  # where documents here are stretches: the number of the one that each is cut from


def stream(tokenizer: tokenizers.Tokenizer, documents: Iterable[str]) -> Stream:
    separator = tokenizer.token_to_id(SEPARATOR)
    tokenizer.encode_special_tokens = True  # the separator's characters in a text are ordinary characters
    ids, starts = [], [0]
    for document in documents:
        ids += [separator, *tokenizer.encode(document, add_special_tokens=False).ids]
        starts.append(len(ids))
    return Stream(np.array(ids, dtype=np.int64), starts)


def bytes_of_tokens(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """UTF-8 bytes of text behind each id: byte-level BPE writes one character for a byte. The separator has none."""
    vocabulary = tokenizer.get_vocab()
    sizes = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for token, i in vocabulary.items():
        sizes[i] = 0 if token == SEPARATOR else len(token)
    return sizes


# -- places of targets -------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """Reads `length` tokens from `start` on, and scores the last `scored` of the tokens that follow each of them."""

    start: int
    length: int
    scored: int

    @property
    def targets(self) -> range:
        return range(self.start + self.length - self.scored + 1, self.start + self.length + 1)


Blocks = list[list[Window]]  # the windows of each block of targets


class Placement(NamedTuple):
    """The first tokens of a protocol's blocks (first target or start of a span), and the context that they allow."""

    firsts: list[int]
    reach: int


def evenly(n: int, k: int) -> list[int]:
    """k of n places, evenly spread: each in the middle of an equal share."""
    return [(2 * j + 1) * n // (2 * k) for j in range(k)]


def dealt(candidates: list[range], wanted: int) -> list[int]:
    """`wanted` candidates in text order, equally many per document as far as each has enough."""
    counts = [len(each) for each in candidates]
    total = min(wanted, sum(counts))
    level = max(m for m in range(total + 1) if sum(min(n, m) for n in counts) <= total)
    shares = [min(n, level) for n in counts]
    more = [document for document, n in enumerate(counts) if n > level]
    for place in evenly(len(more), total - sum(shares)):
        shares[more[place]] += 1
    return [each[i] for each, share in zip(candidates, shares, strict=True) for i in evenly(len(each), share)]


def placement(protocol: str, text: Stream, reaches: set[int], settings: dict[str, Any]) -> Placement:
    """The placement at the longest of `reaches` with enough blocks."""
    targets, blocks = settings["targets"], settings["blocks"]
    choices = ["doc", "concat"] if settings["documents"] == "auto" else [settings["documents"]]
    for reach in sorted(reaches, reverse=True):
        for boundaries in choices:
            edges = text.starts if boundaries == "doc" else [0, text.starts[-1]]
            pieces = list(itertools.pairwise(edges))
            if protocol == "fixed_target":
                wanted = blocks
                candidates = [range(a + reach - targets + 1, b - targets + 1, targets) for a, b in pieces]
            else:
                wanted = max(FEWEST_BLOCKS, blocks // 4)
                candidates = [range(a, b - reach, reach) for a, b in pieces]
            firsts = dealt(candidates, wanted)
            if len(firsts) >= FEWEST_BLOCKS:
                return Placement(firsts, reach)
    sys.exit(f"the text here is too short for {protocol}")


def blocks_of(protocol: str, placed: Placement, length: int, targets: int, train_length: int) -> Blocks:
    """The windows that a protocol reads and scores at one length."""
    if protocol == "fixed_target":
        part = targets
        if length < train_length:  # windows too short to score a whole block
            part = max(n for n in range(1, targets + 1) if targets % n == 0 and n <= max(1, length / 2))
        return [
            [Window(first + end - 1 - length, length, part) for end in range(part, targets + 1, part)]
            for first in placed.firsts
        ]
    return [
        [Window(first + i * length, length, length) for i in range(placed.reach // length)] for first in placed.firsts
    ]


def places(block: list[Window]) -> list[int]:
    return sorted(target for window in block for target in window.targets)


def targets_sha256(blocks: Blocks, ids: np.ndarray) -> str:
    """Over the places of all targets in ascending order, then their blocks, then their ids: int64, little-endian."""
    scored = sorted((place, number) for number, block in enumerate(blocks) for place in places(block))
    where, numbers = np.array(scored, dtype="<i8").T
    return hashlib.sha256(where.tobytes() + numbers.tobytes() + ids[where].astype("<i8").tobytes()).hexdigest()


# -- the model ---------------------------------------------------------------------------------------------------------


class Model:
    """The GPT of `model=gpt`: LayerNorm, attention, LayerNorm, exact GELU, no biases, the token table as head."""

    def __init__(self, weights: dict[str, Tensor], model: dict[str, Any], encoding: dict[str, Any]) -> None:
        expected = {"norm": "layernorm", "mlp": "gelu", "tie_embeddings": True}
        if any(model[key] != value for key, value in expected.items()) or model["attention"]["window"] is not None:
            sys.exit("this script knows the GPT block only: layernorm, gelu, a tied head, no window")
        if encoding["name"] not in ("rope", "alibi"):
            sys.exit(f"this script knows rope and alibi, not {encoding['name']}")
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.layers, self.heads, self.encoding = model["n_layers"], model["n_heads"], encoding

    def nll(self, ids: Tensor, scored: int, window: int | None) -> Tensor:
        """Nats of the last `scored` of ids (B, T + 1), read with at most `window` keys per query: (B, scored)."""
        x = F.embedding(ids[:, :-1], self.weights["tokens.weight"])
        mask = self.mask(x.shape[1], window)
        for layer in range(self.layers):
            x = x + self.attention(f"blocks.{layer}.attention", self.norm(f"blocks.{layer}.attention_norm", x), mask)
            hidden = F.gelu(self.linear(f"blocks.{layer}.mlp.up", self.norm(f"blocks.{layer}.mlp_norm", x)))
            x = x + self.linear(f"blocks.{layer}.mlp.down", hidden)
        logits = self.linear("tokens", self.norm("norm", x[:, -scored:]))
        return F.cross_entropy(logits.transpose(1, 2), ids[:, -scored:], reduction="none")

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.layer_norm(x, weight.shape, weight)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def attention(self, name: str, x: Tensor, mask: Tensor) -> Tensor:
        """softmax(q k / sqrt(d) + mask) v; of the packed projection's channels first q's, then k's, then v's."""
        q, k, v = self.linear(f"{name}.qkv", x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))  # (B, H, T, d)
        if self.encoding["name"] == "rope":
            q, k = self.turned(q), self.turned(k)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.linear(f"{name}.out", mixed.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        """Each pair of channels turned by position · base^(-2p/d), as in RoFormer's equation 34."""
        length, width = x.shape[-2:]
        pair = torch.arange(width // 2, dtype=torch.float64)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * float(self.encoding["base"]) ** (-2 * pair / width)
        cosine, sine = angle.cos().float(), angle.sin().float()
        if self.encoding["layout"] == "half":
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cosine - b * sine, a * sine + b * cosine), dim=-1).flatten(-2)

    def mask(self, length: int, window: int | None) -> Tensor:
        """The term added to logits, (H, T, T) or (1, T, T): -inf for hidden keys, and ALiBi's penalty."""
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        mask = torch.zeros(1, length, length)
        if self.encoding["name"] == "alibi":
            slopes = torch.tensor(self.encoding["slopes"] or alibi_slopes(self.heads))
            mask = -slopes[:, None, None] * distance
        return mask.masked_fill(hidden, -math.inf)


def alibi_slopes(heads: int) -> list[float]:
    """As in get_slopes of Press et al.: beyond a power of two of heads, every other slope of twice that."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


@torch.inference_mode()
def nll_of_blocks(model: Model, blocks: Blocks, ids: np.ndarray, window: int | None) -> np.ndarray:
    """Nats summed over each block's targets, in double precision."""
    totals = np.zeros(len(blocks))
    numbered = sorted((w.scored, number, w) for number, block in enumerate(blocks) for w in block)
    for scored, group in itertools.groupby(numbered, key=lambda entry: entry[0]):
        alike = list(group)
        step = max(1, BATCH_TOKENS // alike[0][2].length)
        for batch in (alike[i : i + step] for i in range(0, len(alike), step)):
            read = torch.from_numpy(np.stack([ids[w.start : w.start + w.length + 1] for _, _, w in batch]))
            sums = model.nll(read, scored, window).double().sum(dim=1)
            np.add.at(totals, [number for _, number, _ in batch], sums.numpy())
    return totals


# -- comparison with the run's results ---------------------------------------------------------------------------------

Row = dict[str, Any]
KEY = ("protocol", "length", "stride", "window", "extension", "task", "split", "checkpoint_step")


class Comparison(NamedTuple):
    """A row of the run and its recomputed values."""

    row: Row
    same_targets: bool
    same_units: bool  # documents and tokens of each, and the bytes of all
    nll: float
    worst_unit: float  # largest difference of a unit's nll, nats per token

    @property
    def difference(self) -> float:
        return self.nll - self.row["nll"]

    @property
    def agrees(self) -> bool:
        dtype = self.row["dtype"]
        near = abs(self.difference) <= TOLERANCE[dtype] and self.worst_unit <= UNIT_TOLERANCE[dtype]
        return near and self.same_targets and self.same_units


class Run:
    """A run folder and its text."""

    def __init__(self, folder: Path, text: Path | None) -> None:
        self.text = text
        self.config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        if self.config["data"]["tokenizer"] not in ("bpe", "bytes"):
            sys.exit("this script knows posbench's own tokenizers: data.tokenizer bpe and bytes")
        self.record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.bytes = bytes_of_tokens(self.tokenizer)
        newest = max((folder / "checkpoint").glob("step-*"))
        weights = safetensors.torch.load_file(newest / "model.safetensors")
        self.model = Model(weights, self.config["model"], self.config["encoding"])
        rows = (row for row in lines_of(folder / "rows.jsonl") if "protocol" in row)
        self.rows = list({key(row): row for row in rows}.values())
        self.streams: dict[str, Stream] = {}

    def stream(self, split: str) -> Stream:
        """The tokens of a split, made once."""
        if split not in self.streams:
            data = self.record["data"]
            documents = split_documents(self.config["data"], data["split"], split, self.text)
            made = self.streams[split] = stream(self.tokenizer, documents)
            was, here = (data["documents"][split], data["tokens"][split]), (len(documents), len(made.ids))
            if cut := data.get("stretches"):  # how many of each document
                sources = [document for document, number in enumerate(cut[split]) for _ in range(number)]
                made = self.streams[split] = dataclasses.replace(made, sources=sources)
            if was != here:
                print(f"another text: then {was[0]} {split} documents of {was[1]} tokens, here {here[0]} of {here[1]}")
        return self.streams[split]

    def reaches(self, row: Row) -> set[int]:
        """Contexts that may have placed the row's targets: the requested lengths and their halvings."""
        settings, trained = self.config["evaluation"], self.config["training"]["train_length"]
        longest = round((settings["longest"] or 1) * trained)
        halvings = {longest >> times for times in range(longest.bit_length())}
        paired = {other["length"] for other in self.rows if other["targets_sha256"] == row["targets_sha256"]}
        reaches = {round(ratio * trained) for ratio in settings["ratios"]} | halvings | paired
        return {length for length in reaches if length >= trained}

    def compared(self, row: Row) -> Comparison:
        text, settings = self.stream(row["split"]), self.config["evaluation"]
        placed = placement(row["protocol"], text, self.reaches(row), settings)
        if placed.reach < row["length"]:
            sys.exit(f"the text here is too short for {row['protocol']} at {row['length']} tokens")
        trained = self.config["training"]["train_length"]
        blocks = blocks_of(row["protocol"], placed, row["length"], settings["targets"], trained)
        sums = nll_of_blocks(self.model, blocks, text.ids, row["window"])
        where = [places(block) for block in blocks]
        unit, documents = units(text, [targets[0] for targets in where])
        nll, tokens = np.bincount(unit, sums), np.bincount(unit, [len(targets) for targets in where])
        n_bytes = int(self.bytes[text.ids[np.concatenate(where)]].sum())
        printed = [row["units"]["document"], row["units"]["tokens"], row["n_bytes"]]
        same = printed == [documents, tokens.tolist(), n_bytes]
        apart = np.abs(nll - row["units"]["nll"]) / tokens if same else [math.inf]
        return Comparison(
            row,
            same_targets=targets_sha256(blocks, text.ids) == row["targets_sha256"],
            same_units=same,
            nll=float(sums.sum() / tokens.sum()),
            worst_unit=float(max(apart)),
        )


def units(text: Stream, firsts: list[int]) -> tuple[list[int], list[int]]:
    """The unit of text of each block, by its first target, and the document of each unit.

    Documents; of fewer than eight the stretches held out of them, if those are eight; else some sixteen segments.
    """
    place = [bisect.bisect(text.starts, first) - 1 for first in firsts]
    document = place if text.sources is None else [text.sources[stretch] for stretch in place]
    names: list[Any] = document
    if len(set(document)) < FEWEST_UNITS:
        names = place
        if text.sources is None or len(set(place)) < FEWEST_UNITS:
            names = []
            for number in sorted(set(document)):
                n = document.count(number)
                parts = min(n, max(1, round(16 * n / len(document))))
                names += [(number, at * parts // n) for at in range(n)]
    known = sorted(set(names))
    return [known.index(name) for name in names], [document[names.index(name)] for name in known]


def key(line: Row) -> tuple[object, ...]:
    return tuple(line[column] for column in KEY)


def lines_of(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def covered(row: Row) -> bool:
    """Whether the row has a number and this script can recompute it."""
    known = row["protocol"] in ("fixed_target", "nonoverlap")
    return known and row["task"] is None and row["extension"] is None and row["nll"] is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--text", type=Path, help="default: the run's data.path, or the running Python's library")
    parser.add_argument("--lengths", help="only these, such as 64,1024")
    parser.add_argument("--threads", type=int, help="default: as torch chooses")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    run = Run(arguments.run, arguments.text)
    wanted = {int(length) for length in arguments.lengths.split(",")} if arguments.lengths else None
    asked = [row for row in run.rows if wanted is None or row["length"] in wanted]
    print(f"{'protocol':24} length  targets_sha256   units   printed nll  recomputed  difference   worst unit")
    failed = 0
    for row in filter(covered, asked):
        one = run.compared(row)
        failed += not one.agrees
        name = row["protocol"] + (f", window {row['window']}" if row["window"] else "")
        targets, units_ = ("equal" if same else "DIFFER" for same in (one.same_targets, one.same_units))
        print(
            f"{name:24} {row['length']:6}  {row['targets_sha256'][:8]} {targets:6}  {units_:6}  {row['nll']:11.5f}  "
            f"{one.nll:10.5f}  {one.difference:+10.5f}  {one.worst_unit:11.5f}{'' if one.agrees else '  <-'}",
            flush=True,
        )
    compared = sum(map(covered, asked))
    print(f"{compared - failed} of {compared} rows agree; {len(asked) - compared} are of kinds that are not recomputed")
    return int(failed > 0 or compared == 0)


if __name__ == "__main__":
    sys.exit(main())
