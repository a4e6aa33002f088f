"""Text in its splits, data sets of the hub, tokenizers, the token cache and batches. No
network: the hub is a fake.
"""

import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from huggingface_hub import constants
from support import start_child, until
from tokenizers import normalizers, pre_tokenizers

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import batches, hub, sources, text, tokenizer, tokens
from posbench.errors import UserError, nearest

CONFIGS = Path(__file__).parents[1] / "configs" / "data"
STRANGE = "naïve café\r\nпривет мир 你好 🙂👩‍👩‍👧 \u2028 \x00 e\u0301 \ufeff  two  spaces\n\n\tend 123 <|endoftext|> it's"  # noqa: RUF001
FOX = "the quick brown fox jumps over"


def config(name: str = "text", **changes: Any) -> DataConfig:
    values = {}
    for file in ("_base", name):
        content = (CONFIGS / f"{file}.yaml").read_text(encoding="utf-8")
        values.update(yaml.safe_load(content))
    del values["defaults"]
    values.update(changes)
    return DataConfig(**values)


def text_in(folder: Path, **changes: Any) -> DataConfig:
    """Return the settings of text of one's own."""
    return config("text", path=str(folder), **changes)


def load(folder: Path, **changes: Any) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Read a folder of text; return its documents by split, and their record."""
    settings = text_in(folder, **changes)
    source = sources.locate(settings)
    cache = Path(tempfile.mkdtemp(dir=folder.parent))
    splits, record = text.load(settings, source, cache)
    read = {split: list(documents) for split, documents in splits.items()}
    return read, record


def write(folder: Path, documents: dict[str, str]) -> Path:
    for name, content in documents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    return folder


def numbered(n: int) -> dict[str, str]:
    return {f"{i:03}.md": f"document number {i} says {i * i}\n" * 3 for i in range(n)}


def words_of(document: int, n: int) -> str:
    return " ".join(f"{word}of{document}" for word in range(n))


def prose(n: int, n_words: int = 200) -> dict[str, str]:
    """Return documents that share no passage."""
    return {f"{i:03}.md": words_of(i, n_words) for i in range(n)}


def short_lines(n: int) -> dict[str, str]:
    """Return documents of 90 characters."""
    return {f"{i:03}.md": f"{i:04}" + "x" * 86 for i in range(n)}


@pytest.mark.parametrize(
    ("texts", "counts"),
    [
        (prose(151, 80), [113, 8, 30]),
        (short_lines(60), [42, 3, 15]),  # 70 % of the text are left
    ],
)
def test_documents_are_held_out_whole(tmp_path, texts, counts):
    folder = write(tmp_path / "many", texts)

    splits, record = load(folder, test_pieces=30)

    assert record["split"] == "document"
    assert list(record["documents"].values()) == counts
    documents = splits["train"] + splits["validation"] + splits["test"]
    assert sorted(documents) == sorted(texts.values())
    n_characters = sum(map(len, documents))
    n_trained = sum(map(len, splits["train"]))
    assert n_trained >= 0.7 * n_characters


def test_equal_documents_are_in_one_split(tmp_path):
    texts = {f"{i:03}.md": words_of(i // 3, 200) for i in range(120)}
    folder = write(tmp_path / "many", texts)

    splits, record = load(folder, test_pieces=None)

    assert record["copies"]["shared"] == 0
    validation = set(splits["validation"])
    assert validation.isdisjoint(splits["test"])
    assert list(record["documents"].values()) == [108, 6, 6]


def text_of_stretches(folder: Path, sizes: list[int]) -> Path:
    texts = {}
    for i, size in enumerate(sizes):
        characters = [chr(33 + (i + 7 * k) % 900) for k in range(size)]
        texts[f"{i}.txt"] = "".join(characters)
    return write(folder / "text", texts)


@pytest.mark.parametrize("sizes", [[400_000], [3], [90_000, 30_000, 6_000]])
def test_stretches_are_apart_and_join_with_the_rest_to_the_text(tmp_path, sizes):
    folder = text_of_stretches(tmp_path, sizes)

    splits, record = load(folder)

    assert record["split"] == "stretches"
    n_trained = sum(map(len, splits["train"]))
    assert n_trained >= 0.7 * sum(sizes)
    counts = record["stretches"]["test"]
    assert len(counts) == len(sizes)
    assert sum(counts) == len(splits["test"])
    assert sum(counts) >= 8
    train, validation, test = map(iter, splits.values())
    for i, count in enumerate(counts):
        joined = ""
        # training text ends at each hole
        for _ in range(count):
            joined += next(train) + next(validation) + next(test)
        joined += next(train)
        assert joined == (folder / f"{i}.txt").read_text(encoding="utf-8")


def test_a_long_text_has_twelve_stretches(tmp_path):
    folder = text_of_stretches(tmp_path, [400_000])

    splits, _ = load(folder)

    lengths = [len(stretch) for stretch in splits["test"]]
    assert lengths == 12 * [8333]


def test_a_stretch_of_the_test_text_knows_its_document(tmp_path):
    folder = text_of_stretches(tmp_path, [90_000, 30_000, 6_000])
    _, record = load(folder)
    settings = text_in(folder, tokenizer="bytes")

    made = tokens.prepare(settings, tmp_path)

    counts = np.bincount(made.test.sources)
    assert counts.tolist() == record["stretches"]["test"]
    assert len(made.test.starts) == len(made.test.sources) + 1
    assert made.train.sources is None


def test_a_missing_held_out_split_is_half_of_the_other(tmp_path):
    texts = {"train.txt": "to learn", "valid.txt": "0123456789"}
    folder = write(tmp_path / "few", texts)

    splits, _ = load(folder)

    assert splits["train"] == ["to learn"]
    assert splits["validation"] == ["01234"]
    assert splits["test"] == ["56789"]


def passages(words: list[str], every: int = 1) -> set[tuple[str, ...]]:
    """Return every n-th passage of 64 words, or all the words if they are fewer."""
    last = max(0, len(words) - 64)
    found = set()
    for start in range(0, last + 1, every):
        passage = words[start : start + 64]
        found.add(tuple(passage))
    return found


@pytest.mark.parametrize("every", [1, 16])
def test_copied_passages_are_found_wherever_they_stand(every):
    rng = random.Random(0)
    numbers = [str(number) for number in range(200)]
    vocabulary = ["a", "naïve", "мир", "🙂", "<end>", *numbers]
    held_out = [rng.choices(vocabulary, k=n) for n in (300, 20, 64, 700, 5, 1500)]
    train = [rng.choices(vocabulary, k=n) for n in range(10, 800, 20)]
    for i in range(0, len(train), 5):
        train[i] += held_out[5][20 * i : 23 * i + 40]
        train[i] += rng.choices(vocabulary, k=30)
    # copied, but in another order, or 63 words
    document = held_out[2]
    train.append([document[1], document[0], *document[2:]])
    train.append(document[32:] + document[:32])
    train.append(held_out[3][101:164])
    # copied, the last with 79 words
    train.append(held_out[0])
    train.append(held_out[1])
    train.append(held_out[3][100:179])

    spaces = [" ", "\n", "\r\n", "\t", "  "]
    joined = [spaces[i % 5].join(words) for i, words in enumerate(train)]
    sought_in = [" ".join(words) for words in held_out]
    found, shared = text.copies([*joined, " \n"], [*sought_in, " "], every)

    sought = set()
    for words in held_out:
        sought |= passages(words, every)
    wanted = []
    in_both = set()
    for i, words in enumerate(train):
        copied = sought & passages(words)
        in_both |= copied
        if copied:
            wanted.append(i)
    assert found == wanted
    assert found[-3:] == [43, 44, 45]
    assert found[-4] < 40
    assert shared == len(in_both) / len(sought)


def test_training_documents_with_a_held_out_passage_are_left_out(tmp_path):
    folder = write(tmp_path / "many", prose(60))
    texts, record = load(folder, test_pieces=None)
    for split in ("validation", "test"):
        words = texts[split][0].split()
        quote = " \n".join(words[80:180])
        write(folder, {f"quoting_{split}.md": f"{split} says: {quote}"})

    with_copies, other = load(folder, test_pieces=None)

    assert with_copies == texts
    assert other["sha256"] == record["sha256"]
    assert record["copies"]["dropped_documents"] == 0
    assert record["copies"]["shared"] == 0
    assert record["copies"]["in_training"] == 0
    assert other["copies"]["dropped_documents"] == 2
    share = 2 * 37 / (6 * 137)
    assert other["copies"]["shared"] == round(share, 6)


def test_what_all_documents_share_leaves_no_training_text(tmp_path):
    licence = words_of(0, 70)
    texts = {f"{i}.txt": f"{licence} of document {i}" for i in range(40)}
    folder = write(tmp_path / "licensed", texts)
    message = "'train' is empty: of the 36 training documents 36 share 64 words"
    with pytest.raises(UserError, match=message):
        load(folder, test_pieces=None)


def test_a_text_of_equal_documents_is_refused_as_such(tmp_path):
    folder = write(tmp_path / "equal", {f"{i}.txt": "a poem" for i in range(40)})
    with pytest.raises(UserError, match="equal ones stay together: expected more"):
        load(folder)


@pytest.mark.parametrize(("large", "every"), [(10**6, 1), (1000, 16)])
def test_in_a_large_text_every_16th_passage_is_sought(
    tmp_path, monkeypatch, large, every
):
    monkeypatch.setattr(text, "LARGE", large)
    folder = write(tmp_path / "many", prose(60))

    _, record = load(folder)

    assert record["copies"]["every"] == every


def test_given_training_documents_stay(tmp_path):
    copied = words_of(0, 200)
    texts = {
        "train.txt": copied,
        "valid.txt": "of its own",
        "test.txt": f"{copied} end",
    }
    folder = write(tmp_path / "given", texts)

    splits, record = load(folder)

    assert splits["train"] == [copied]
    assert record["copies"]["dropped_documents"] == 0
    assert record["copies"]["shared"] > 0.5


def write_rows(folder: Path, split: str, n: int) -> None:
    """Write a split as a data set of the hub has it."""
    lines = [f'{{"text": "text {i} {i * i} of {n}"}}\n' for i in range(n)]
    write(folder, {f"{split}-00000-of-00001.jsonl": "".join(lines)})


@pytest.fixture
def set_of_the_hub(tmp_path, monkeypatch):
    """Return a folder, which `datasets` then takes for any data set of the hub."""
    import datasets

    folder = tmp_path / "set"
    real = datasets.load_dataset_builder

    def build(dataset, subset, **options):
        options["revision"] = None
        options["cache_dir"] = str(tmp_path / "huggingface")
        return real(str(folder), subset, **options)

    def commit_of(name, revision):
        return revision or "c0ffee"

    monkeypatch.setattr(datasets, "load_dataset_builder", build)
    monkeypatch.setattr(hub, "commit_of", commit_of)
    return folder


@pytest.mark.parametrize(
    ("splits", "most", "kind", "counts"),
    [
        (["train"], None, "document", [36, 2, 2]),
        (["train"], 25, "document", [23, 1, 1]),
        (["train", "dev"], None, "given", [40, 20, 20]),
    ],
)
def test_a_data_set_of_the_hub_has_the_splits_that_it_has(
    set_of_the_hub, tmp_path, splits, most, kind, counts
):
    for split in splits:
        write_rows(set_of_the_hub, split, 40)
    settings = config("hub", dataset="a/b", max_documents=most, test_pieces=None)

    meta = tokens.prepare(settings, tmp_path / "cache").meta

    assert meta["revision"] == "c0ffee"
    assert meta["split"] == kind
    assert list(meta["documents"].values()) == counts


@pytest.fixture
def flaky_hub(monkeypatch):
    """Return a hub that answers from the second time on."""
    api = Mock()
    answer = types.SimpleNamespace(sha="c0ffee")
    api.dataset_info.side_effect = [TimeoutError("no answer in 3 s"), answer]
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: api)
    return api


def test_a_hub_that_did_not_answer_once_is_asked_again(flaky_hub):
    answers = [hub.commit_of("asked/again", None) for _ in range(3)]

    assert answers == [None, "c0ffee", "c0ffee"]
    assert flaky_hub.dataset_info.call_count == 2


def test_one_time_out_leaves_the_network_on_for_the_process(
    flaky_hub, tmp_path, monkeypatch
):
    import datasets

    seen = []

    def build(dataset, subset, **options):
        seen.append((datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        raise FileNotFoundError("nothing in the cache")

    monkeypatch.setattr(datasets, "load_dataset_builder", build)
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE

    with pytest.raises(UserError, match="'a/b' cannot be read: nothing in the cache"):
        sources.locate(config("hub", dataset="a/b"))

    assert seen == [(True, True)]
    after = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    assert after == before


def test_only_what_a_library_raises_becomes_one_line():
    not_text: Any = None

    with pytest.raises(AttributeError), hub.one_line("a/b"):
        nearest(not_text, ["a"])

    with pytest.raises(UserError, match="'a/b' cannot be read"), hub.one_line("a/b"):
        json.loads(b"{")


@pytest.fixture(scope="module")
def bpe():
    sentence = f"{FOX} the lazy dog. привет мир 🙂 "
    return tokenizer.train_bpe([sentence * 20], 400)


@pytest.fixture
def inner(bpe):
    """Return the library's tokenizer, to change it."""
    return tokenizers.Tokenizer.from_str(json.dumps(bpe.description))


CHARACTERS = [chr(number) for number in range(1, 0x2FF)]
TEXTS = [STRANGE, "", "\r\n", "a" * 10, "".join(CHARACTERS)]


@pytest.mark.parametrize("given", TEXTS)
def test_decoding_gives_the_text_back_and_bytes_are_counted(given, bpe):
    (ids,) = bpe.encode([given])

    assert bpe.decode(ids) == given
    assert bpe.separator not in ids
    n_bytes = bpe.token_bytes[ids].sum()
    assert n_bytes == len(given.encode())


@pytest.mark.parametrize("given", TEXTS)
def test_the_tokens_of_bytes_are_the_bytes(given):
    made = tokenizer.raw_bytes()
    (ids,) = made.encode([given])

    assert made.vocab_size == 257
    assert made.separator == 256
    assert ids.tolist() == list(given.encode())
    assert made.decode(ids) == given
    assert made.token_bytes[ids].sum() == len(ids)


@pytest.mark.parametrize(("part", "longest"), [(f"{STRANGE} isn't . ", 2), ("x", 1)])
def test_a_text_is_cut_into_pieces_of_a_size_also_where_it_has_no_words(part, longest):
    given = part * (10 * tokenizer.PIECE // len(part))

    pieces = list(tokenizer.pieces(given))

    assert "".join(pieces) == given
    assert len(pieces) > 4
    assert max(map(len, pieces)) <= longest * tokenizer.PIECE


def test_a_long_text_is_learnt_and_encoded_in_pieces_as_if_whole(monkeypatch):
    given = (STRANGE + " the lazy dog isn't  quick . ") * 40
    bpe = tokenizer.train_bpe([given], 400)
    (whole,) = bpe.encode([given])

    monkeypatch.setattr(tokenizer, "PIECE", 70)

    _, in_pieces, _ = bpe.encode(["a", given, ""])
    assert np.array_equal(in_pieces, whole)
    learnt_in_pieces = tokenizer.train_bpe([given], 400)
    assert learnt_in_pieces.sha256 == bpe.sha256


def saved(inner: tokenizers.Tokenizer, folder: Path) -> Path:
    path = folder / "mine.json"
    inner.save(str(path))
    return path


def test_a_tokenizer_file_never_pads_cuts_or_draws(inner, tmp_path):
    inner.enable_truncation(3)
    inner.enable_padding()
    inner.model.dropout = 0.5

    made = tokenizer.from_file(saved(inner, tmp_path))

    ids, empty = made.encode([FOX, ""])
    assert made.decode(ids) == FOX
    assert len(empty) == 0
    for _ in range(20):
        (again,) = made.encode([FOX])
        assert np.array_equal(again, ids)


def test_a_tokenizer_file_gets_a_separator_that_no_text_has(bpe, tmp_path):
    description = bpe.description
    del description["added_tokens"][0]
    inner = tokenizers.Tokenizer.from_str(json.dumps(description))

    made = tokenizer.from_file(saved(inner, tmp_path))

    (ids,) = made.encode(["<|endoftext|>"])
    assert made.separator not in ids


def of_words(folder: Path, *words: str) -> Path:
    """Return the file of a tokenizer that knows some words and no others."""
    ids = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return saved(inner, folder)


def test_a_tokenizer_that_reads_a_separator_within_a_document_is_refused(tmp_path):
    file = of_words(tmp_path, "one", "two", "<|endoftext|>")
    texts = {f"{i:02}.txt": "one two <|endoftext|> " * (i + 1) for i in range(20)}
    folder = write(tmp_path / "texts", texts)
    settings = text_in(folder, tokenizer=str(file))

    with pytest.raises(UserError, match="which is to separate documents alone"):
        tokens.prepare(settings, tmp_path / "cache")


def test_a_tokenizer_without_a_token_for_unknown_words_is_refused(tmp_path):
    file = of_words(tmp_path, "one", "two")
    folder = write(tmp_path / "texts", {"a.txt": "one two three " * 90})
    settings = text_in(folder, tokenizer=str(file))

    with pytest.raises(UserError, match="has a token for what it does not know"):
        tokens.prepare(settings, tmp_path / "cache")


@pytest.mark.parametrize(
    ("part", "value", "is_exact"),
    [
        ("normalizer", None, True),
        ("normalizer", normalizers.NFC(), False),
        ("normalizer", normalizers.Lowercase(), False),
        ("normalizer", normalizers.Prepend("<"), False),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), False),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True), False),
    ],
)
def test_a_tokenizer_that_changes_text_counts_no_bytes_and_encodes_documents_whole(
    inner, monkeypatch, part, value, is_exact
):
    setattr(inner, part, value)
    monkeypatch.setattr(tokenizer, "PIECE", 1000)

    made = tokenizer.Tokenizer(inner)
    pieces = list(made.encode_pieces(["the quick fox  and a dog " * 600]))

    counts_bytes = made.token_bytes is not None
    assert counts_bytes is is_exact
    is_in_pieces = len(pieces) > 10
    assert is_in_pieces is is_exact


@pytest.mark.parametrize("taken", [{"lstrip": True}, {"rstrip": True}])
def test_added_tokens_that_take_in_spaces_count_no_bytes(inner, taken):
    word = tokenizers.AddedToken("unseen", **taken)
    inner.add_tokens([word])

    made = tokenizer.Tokenizer(inner)

    assert made.token_bytes is None


SPACES = [("\r\n", False), (" ", True)]


@pytest.mark.parametrize(("end", "is_exact"), SPACES)
def test_a_tokenizer_that_changes_this_text_alone_gives_no_bits_per_byte(
    inner, tmp_path, caplog, end, is_exact
):
    inner.normalizer = normalizers.Replace("\r\n", "\n")
    file = saved(inner, tmp_path)
    texts = {f"{i:02}.txt": f"{i} the quick fox{end}" * 9 for i in range(40)}
    folder = write(tmp_path / "many", texts)

    made = tokens.prepare(text_in(folder, tokenizer=str(file)), tmp_path)

    assert (made.tokenizer.token_bytes is not None) is is_exact
    assert ("no bits per byte" in caplog.text) is not is_exact


OTHER_SPACES = [("\n", "\r\n"), (" ", "  "), ("\n", "\n\n"), (" ", "\t"), (", ", ",")]


@pytest.mark.parametrize(("old", "new"), OTHER_SPACES)
def test_a_copy_with_other_line_ends_or_spaces_is_no_further_document(
    tmp_path, old, new
):
    texts = {}
    for i in range(40):
        texts[f"train_{i:02}.txt"] = f"{i * i} of training, line {i}\n" * 9
    for i in range(8):
        texts[f"test_{i}.txt"] = f"{i} is new, and has its own words\n" * 9
        texts[f"test_c{i}.txt"] = texts[f"test_{i}.txt"].replace(old, new)
        texts[f"valid_{i}.txt"] = f"{i} validates, and has its words\n" * 9
    folder = write(tmp_path / "many", texts)

    made = tokens.prepare(text_in(folder, tokenizer="bytes"), tmp_path)

    assert made.meta["documents"]["test"] == 16
    assert made.test.firsts.tolist() == [*range(8), *range(8)]
    assert made.validation.firsts.tolist() == list(range(8))


def test_every_document_begins_with_one_separator_and_decodes_to_itself(tmp_path):
    texts = {f"{i:02}.txt": f"{i} {STRANGE}" for i in range(40)}
    folder = write(tmp_path / "many", texts)
    settings = text_in(folder, vocab_size=300)

    made = tokens.prepare(settings, tmp_path)

    decoded = []
    for split in (made.train, made.validation, made.test):
        (separators,) = np.nonzero(split.ids == made.tokenizer.separator)
        assert np.array_equal(separators, split.starts[:-1])
        assert split.starts[0] == 0
        assert split.starts[-1] == len(split.ids)
        for start, end in itertools.pairwise(split.starts):
            ids = split.ids[start + 1 : end]
            decoded.append(made.tokenizer.decode(ids))
    assert sorted(decoded) == sorted(texts.values())


def test_the_record_counts_the_tokens(tmp_path):
    folder = write(tmp_path / "many", numbered(40))
    settings = text_in(folder, tokenizer="bytes")

    made = tokens.prepare(settings, tmp_path)

    counts = made.meta["tokens"]
    assert counts["train"] == len(made.train.ids)
    assert counts["validation"] == len(made.validation.ids)
    assert counts["test"] == len(made.test.ids)
    assert len(counts) == 3


CHANGES = [
    {},
    {"vocab_size": 301},
    {"tokenizer": "bytes"},
    {"max_documents": 30},
    {"test_pieces": 5},
    {"articles": True},
]


def test_changed_text_or_tokenizer_is_another_cache_entry(tmp_path):
    folder = write(tmp_path / "many", numbered(30))
    original = text_in(folder, vocab_size=300)

    entries = set()
    for changes in CHANGES:
        settings = dataclasses.replace(original, **changes)
        made = tokens.prepare(settings, tmp_path)
        entries.add(made.folder)
    write(folder, {"000.md": "other text"})
    made = tokens.prepare(original, tmp_path)
    entries.add(made.folder)

    assert len(entries) == len(CHANGES) + 1


def test_two_processes_make_one_cache(tmp_path, monkeypatch):
    folder = write(tmp_path / "many", numbered(30))
    settings = text_in(folder, tokenizer="bytes")
    load = text.load

    def loaded(*given):
        with open(tmp_path / "loaded", "a") as file:
            file.write("once ")
        return load(*given)

    monkeypatch.setattr(text, "load", loaded)
    first = start_child(lambda: tokens.prepare(settings, tmp_path))
    second = start_child(lambda: tokens.prepare(settings, tmp_path))

    _, status_of_first = os.waitpid(first, 0)
    _, status_of_second = os.waitpid(second, 0)
    assert status_of_first == 0
    assert status_of_second == 0
    assert (tmp_path / "loaded").read_text() == "once "


def test_what_a_killed_process_began_is_removed_and_what_a_living_one_makes_stays(
    tmp_path,
):
    def begin(name: str) -> None:
        with files.atomic_folder(tmp_path / name) as new:
            (new / "half").touch()
            time.sleep(60)

    dead = start_child(lambda: begin("dead"))
    living = start_child(lambda: begin("living"))
    until(lambda: len([*tmp_path.glob(".tmp-*/half")]) == 2)
    os.kill(dead, signal.SIGKILL)
    os.waitpid(dead, 0)
    time.sleep(1.1)  # a younger folder is left alone

    with files.atomic_folder(tmp_path / "next"):
        left = [path.name for path in tmp_path.glob(".tmp-*")]
    os.kill(living, signal.SIGKILL)
    os.waitpid(living, 0)

    names = sorted(name.rpartition("-")[2] for name in left)
    assert names == ["living", "next"]


def test_what_is_in_the_cache_is_read_without_datasets(
    set_of_the_hub, tmp_path, monkeypatch
):
    write_rows(set_of_the_hub, "train", 40)
    settings = config("hub", dataset="a/b", revision="c" * 40)
    before = tokens.prepare(settings, tmp_path)

    monkeypatch.setitem(sys.modules, "datasets", None)
    after = tokens.prepare(settings, tmp_path)

    assert after.meta == before.meta


def test_a_tokenizer_that_nobody_has_is_told_the_choices(tmp_path):
    folder = write(tmp_path / "texts", {"a.txt": "abc " * 500})
    settings = text_in(folder, tokenizer="byte/")  # no name on the hub
    with pytest.raises(UserError, match=r"data.tokenizer: .*\(expected bpe, bytes, a"):
        tokens.prepare(settings, tmp_path)


def test_ids_beyond_16_bits_are_kept_whole(tmp_path):
    words = {f"w{i}": i for i in range(70_000)}
    words["?"] = 70_000
    model = tokenizers.models.WordLevel(words, unk_token="?")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = saved(inner, tmp_path)
    folder = write(tmp_path / "one", {"a.txt": "w69999 w65536 w1 " * 100})
    settings = text_in(folder, tokenizer=str(file))

    made = tokens.prepare(settings, tmp_path)

    ids = made.train.ids
    assert ids.dtype == np.uint32
    assert ids[:4].tolist() == [70_001, 69_999, 65_536, 1]
    assert made.tokenizer.token_bytes is None


def save_to_disk(folder: Path) -> list[str]:
    """Save forty texts, and let `map` leave a changed copy of them in the folder."""
    import datasets

    texts = list(prose(40).values())
    columns = {"text": texts, "title": 40 * ["x"]}
    rows = datasets.Dataset.from_dict(columns)
    rows.save_to_disk(folder)
    saved_rows = datasets.load_from_disk(str(folder))
    saved_rows.map(lambda row: {"text": row["text"].upper()})
    left_there = list(folder.glob("cache-*.arrow"))
    assert left_there
    return texts


def test_of_a_data_set_on_disk_only_its_own_files_are_read(tmp_path):
    texts = save_to_disk(tmp_path / "saved")

    splits, record = load(tmp_path / "saved")

    found = splits["train"] + splits["validation"] + splits["test"]
    assert sorted(found) == sorted(texts)
    assert record["split"] == "document"


def test_what_map_leaves_beside_a_data_set_changes_nothing(tmp_path):
    folder = tmp_path / "saved"
    save_to_disk(folder)
    settings = text_in(folder)
    before = sources.locate(settings)

    for path in folder.glob("cache-*.arrow"):
        path.unlink()

    after = sources.locate(settings)
    assert after.sha256 == before.sha256


def test_splits_of_a_data_set_on_disk_are_kept_and_unread_ones_said(tmp_path, caplog):
    import datasets

    texts = list(prose(40).values())
    rows = datasets.Dataset.from_dict({"text": texts})
    by_split = datasets.DatasetDict()
    by_split["train"] = rows.select(range(30))
    by_split["validation"] = rows.select(range(30, 35))
    by_split["test"] = rows.select(range(35, 40))
    by_split["unsupervised"] = rows.select(range(5))
    by_split.save_to_disk(tmp_path / "saved")

    caplog.set_level("INFO", logger="posbench")
    splits, record = load(tmp_path / "saved")

    assert record["split"] == "given"
    assert splits["train"] == texts[:30]
    assert splits["validation"] == texts[30:35]
    assert splits["test"] == texts[35:]
    assert "saved': splits that are not read: unsupervised" in caplog.text


def test_copies_within_training_are_said_and_counted(tmp_path, caplog):
    texts = prose(60)
    for name, document in prose(20).items():
        texts[f"copy_of_{name}"] = document
    folder = write(tmp_path / "texts", texts)
    settings = text_in(folder, tokenizer="bytes")

    made = tokens.prepare(settings, tmp_path / "cache")

    n_copies = made.meta["copies"]["in_training"]
    n_documents = len(made.train.starts) - 1
    assert n_copies > 0
    line = f"{n_copies} of {n_documents} training documents are copies"
    assert line in caplog.text


def test_a_vocabulary_that_a_text_does_not_fill_is_said(tmp_path, caplog):
    folder = write(tmp_path / "texts", {"a.txt": "abc " * 500})
    settings = text_in(folder, vocab_size=300)

    made = tokens.prepare(settings, tmp_path / "cache")

    n_tokens = made.tokenizer.vocab_size
    assert f"the text gives only {n_tokens} tokens, not 300" in caplog.text


@pytest.mark.parametrize(
    "normalizer", [normalizers.Lowercase(), normalizers.Replace("e", "")]
)
def test_a_tokenizer_that_changes_text_is_refused(inner, tmp_path, normalizer):
    inner.normalizer = normalizer
    file = saved(inner, tmp_path)
    folder = write(tmp_path / "texts", {"a.txt": "The Hen SAT there. " * 500})
    settings = text_in(folder, tokenizer=str(file))

    with pytest.raises(UserError, match="% of the characters do not come back"):
        tokens.prepare(settings, tmp_path / "cache")


def test_a_tokenizer_of_bytes_without_some_bytes_is_refused(tmp_path):
    model = tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[])
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    file = saved(inner, tmp_path)
    folder = write(tmp_path / "texts", {"a.txt": "ab abc ab " * 500})
    settings = text_in(folder, tokenizer=str(file))

    with pytest.raises(UserError, match="do not come back, such as 'c'"):
        tokens.prepare(settings, tmp_path / "cache")


def test_what_a_tokenizer_loses_of_a_text_is_said_and_recorded(tmp_path, caplog):
    ids = {"one": 0, "two": 1, "three": 2, "four": 3, "?": 4}
    model = tokenizers.models.WordLevel(ids, unk_token="?")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = saved(inner, tmp_path)
    texts = {f"{number}.txt": "one two three four " * 200 for number in range(4)}
    texts["0.txt"] += "z " + texts["0.txt"]
    folder = write(tmp_path / "texts", texts)
    settings = text_in(folder, tokenizer=str(file))

    made = tokens.prepare(settings, tmp_path / "cache")

    assert 0 < made.meta["lost_characters"] < 1e-3
    assert "% of the characters do not come back, such as 'z'" in caplog.text


IDS = np.arange(1000, dtype=np.uint16)


def test_the_labels_of_a_batch_are_the_next_tokens():
    data = batches.TrainingBatches(IDS, 16, 8, seed=3)

    batch = data.batch(0)

    assert torch.equal(batch.labels, batch.ids + 1)
    assert batch.ids.shape == (8, 16)
    assert batch.ids.dtype == torch.int64
    assert batch.labels.dtype == torch.int64
    assert batch.n_scored == 8 * 16


@pytest.mark.parametrize("step", [2, 17, 40])
def test_a_batch_is_a_function_of_seed_and_step_alone(step):
    data = batches.TrainingBatches(IDS, 16, 8, seed=3)
    for step_before in range(step):
        data.batch(step_before)

    batch = data.batch(step)

    fresh = batches.TrainingBatches(IDS, 16, 8, seed=3)
    alone = fresh.batch(step)
    assert torch.equal(batch.ids, alone.ids)
    assert torch.equal(batch.labels, alone.labels)


def test_another_seed_gives_another_batch():
    data = batches.TrainingBatches(IDS, 16, 8, seed=3)
    other = batches.TrainingBatches(IDS, 16, 8, seed=4)
    for step in (2, 17, 40):
        ids = data.batch(step).ids
        other_ids = other.batch(step).ids
        assert not torch.equal(ids, other_ids)


@pytest.mark.parametrize(("rank", "rows"), [(0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])])
def test_a_process_has_a_share_of_each_part_of_a_batch(rank, rows):
    batch = batches.TrainingBatches(IDS, 16, 8, seed=3).batch(2)

    share = batch.share(2, rank, 2)

    assert torch.equal(share.ids, batch.ids[rows])
    assert share.n_scored == 8 * 16


def test_an_epoch_visits_nearly_every_token_once_in_another_order_and_offset():
    data = batches.TrainingBatches(IDS, 16, 1, seed=0)
    epochs = []
    for epoch in range(3):
        seen = []
        for block in range(data.blocks_per_epoch):
            batch = data.batch(epoch * data.blocks_per_epoch + block)
            seen += batch.ids.flatten().tolist()
        epochs.append(seen)

    for seen in epochs:
        assert len(seen) > 1000 - 2 * 16
        assert len(seen) == len(set(seen))
    assert epochs[0] != epochs[1]
    offsets = {min(seen) for seen in epochs}
    assert len(offsets) > 1


@pytest.mark.parametrize("steps", [1, 5, 14, 15, 40])
def test_the_spans_of_some_batches_are_the_tokens_that_they_hold(steps):
    data = batches.TrainingBatches(IDS, 16, 4, seed=0)
    held = set()
    for step in range(steps):
        batch = data.batch(step)
        held.update(batch.ids.flatten().tolist())
        held.update(batch.labels.flatten().tolist())

    spans = data.spans(steps)

    spanned = []
    for first, end in spans.tolist():
        spanned += range(first, end)
    assert spanned == sorted(held)
    # what is one stretch of text is one span
    is_apart = spans[1:, 0] > spans[:-1, 1]
    assert is_apart.all()


def validation_rows(limit: int) -> list[list[int]]:
    rows = []
    for batch in batches.validation_batches(IDS, 16, batch_size=5, limit=limit):
        rows += batch.ids.tolist()
    return rows


def test_validation_blocks_are_disjoint_and_spread():
    rows = validation_rows(12)

    assert len(rows) == 12
    read = set().union(*rows)
    assert len(read) == 12 * 16
    assert rows[0][0] == 0
    assert rows[-1][-1] > 900


def test_a_short_validation_text_is_read_whole():
    rows = validation_rows(10_000)
    assert len(rows) == 999 // 16


def test_a_validation_text_shorter_than_a_block_is_refused():
    short = np.zeros(16)
    message = "the text has 16 tokens: a block of 16 needs 17"
    with pytest.raises(UserError, match=message):
        batches.validation_batches(short, 16, 4, 8)
