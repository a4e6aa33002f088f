"""Text in its splits, data sets of the hub, tokenizers, the token cache and batches. No
network: the hub is a fake.
"""

import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from support import start_child

from posbench.config.schema import DataConfig
from posbench.data import batches, hub, sources, text, tokenizer, tokens
from posbench.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs" / "data"
STRANGE = "naïve café\r\nпривет мир 你好 🙂👩‍👩‍👧 \u2028 \x00 e\u0301 \ufeff  two  spaces\n\n\tend 123 <|endoftext|> it's"  # noqa: RUF001


def config(name: str = "text", **changes: Any) -> DataConfig:
    values: dict[str, Any] = {}
    for file in ("_base", name):
        values |= yaml.safe_load((CONFIGS / f"{file}.yaml").read_text(encoding="utf-8"))
    del values["defaults"]
    if changes.get("path") is not None:
        changes["path"] = str(changes["path"])
    return DataConfig(**{**values, **changes})


def load(
    settings: DataConfig, folder: Path
) -> tuple[dict[str, text.Texts], dict[str, Any]]:
    for documents in folder.glob("*.documents"):
        documents.unlink()
    return text.load(settings, sources.locate(settings), folder)


def write(folder: Path, documents: dict[str, str]) -> Path:
    for name, content in documents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode())
    return folder


def numbered(n: int) -> dict[str, str]:
    return {f"{i:03}.md": f"document number {i} says {i * i}\n" * 3 for i in range(n)}


def prose(n: int, n_words: int = 200) -> dict[str, str]:
    """Return documents that share no passage."""
    return {
        f"{i:03}.md": " ".join(f"{word}of{i}" for word in range(n_words))
        for i in range(n)
    }


@pytest.mark.parametrize(
    ("texts", "wanted", "counts"),
    [
        (prose(151, 80), 30, (113, 8, 30)),
        # 70 % of the text are left
        ({f"{i:03}.md": f"{i:04}" + "x" * 86 for i in range(60)}, 30, (42, 3, 15)),
    ],
)
def test_documents_are_held_out_whole(tmp_path, texts, wanted, counts):
    splits, record = load(
        config(path=write(tmp_path / "many", texts), test_pieces=wanted or None),
        tmp_path,
    )
    assert record["split"] == "document"
    assert tuple(record["documents"].values()) == counts
    assert sorted(
        document for split in text.SPLITS for document in splits[split]
    ) == sorted(texts.values())
    assert splits["train"].sizes.sum() >= 0.7 * sum(map(len, texts.values()))


def test_equal_documents_are_in_one_split(tmp_path):
    texts = {name: prose(40)[f"{int(name[:3]) // 3:03}.md"] for name in prose(120)}
    splits, record = load(
        config(path=write(tmp_path / "many", texts), test_pieces=None), tmp_path
    )
    assert record["copies"]["shared"] == 0
    assert not {*splits["validation"]} & {*splits["test"]}
    assert tuple(record["documents"].values()) == (108, 6, 6)


@pytest.mark.parametrize("sizes", [[400_000], [3], [90_000, 30_000, 6_000]])
def test_stretches_are_apart_and_join_with_the_rest_to_the_text(tmp_path, sizes):
    texts = {
        f"{i}.txt": "".join(chr(33 + (i + 7 * k) % 900) for k in range(n))
        for i, n in enumerate(sizes)
    }
    folder = write(tmp_path / "text", texts)
    splits, record = load(config(path=folder), tmp_path)
    assert record["split"] == "stretches"
    assert splits["train"].sizes.sum() >= 0.7 * sum(sizes)
    counts = record["stretches"]["test"]
    assert len(counts) == len(sizes)
    assert sum(counts) == len(splits["test"]) >= 8
    rest = {split: iter(splits[split]) for split in text.SPLITS}
    # training text ends at each hole
    for document, number in zip(texts.values(), counts, strict=True):
        holes = [
            "".join(next(rest[split]) for split in text.SPLITS) for _ in range(number)
        ]
        assert "".join(holes) + next(rest["train"]) == document
    if sizes == [400_000]:
        assert len(splits["test"]) == 12
        assert splits["test"].sizes[0] == 8333
    made = tokens.prepare(config(path=folder, tokenizer="bytes"), tmp_path / "cache")
    assert made.test.sources is not None
    assert np.bincount(made.test.sources).tolist() == counts
    assert made.train.sources is None
    assert len(made.test.starts) == len(made.test.sources) + 1


def test_a_missing_held_out_split_is_half_of_the_other(tmp_path):
    folder = write(
        tmp_path / "few", {"train.txt": "to learn", "valid.txt": "0123456789"}
    )
    splits, _ = load(config(path=folder), tmp_path)
    assert [list(splits[split]) for split in text.SPLITS] == [
        ["to learn"],
        ["01234"],
        ["56789"],
    ]
    many = {
        f"{split}/{name}": content
        for split in ("train", "test")
        for name, content in prose(40, 20).items()
    }
    _, record = load(config(path=write(tmp_path / "many", many)), tmp_path)
    assert record["documents"] == {"train": 40, "validation": 20, "test": 20}
    assert record["split"] == "given"


@pytest.mark.parametrize("every", [1, 16])
def test_copied_passages_are_found_wherever_they_stand(every):
    rng = random.Random(0)

    def words_of(n: int) -> list[str]:
        return [
            rng.choice(["a", "naïve", "мир", "🙂", "<end>", f"w{rng.randrange(200)}"])
            for _ in range(n)
        ]

    def passages(words: list[str], step: int) -> set[tuple[str, ...]]:
        return {
            tuple(words[i : i + 64]) for i in range(0, max(1, len(words) - 63), step)
        }

    held_out = [words_of(n) for n in (300, 20, 64, 700, 5, 1500)]
    train = [words_of(n) for n in range(10, 800, 20)]
    for i in range(0, len(train), 5):
        train[i] += [*held_out[5][20 * i : 23 * i + 40], *words_of(30)]
    document = held_out[2]
    train += [
        [document[1], document[0], *document[2:]],
        document[32:] + document[:32],
        held_out[3][101:164],
    ]
    # the last of 79 words; before, 63 and others in order
    train += [held_out[0], held_out[1], held_out[3][100:179]]
    known = set().union(*(passages(words, every) for words in held_out))
    expected = [i for i, words in enumerate(train) if known & passages(words, 1)]
    spaces = [" ", "\n", "\r\n", "\t", "  "]
    joined = [
        "".join(word + spaces[(i + len(words)) % 5] for i, word in enumerate(words))
        for words in train
    ]
    numbers, shared = text.copies(
        [*joined, " \n"], [*map(" ".join, held_out), " "], every
    )
    assert numbers == expected
    assert numbers[-3:] == [43, 44, 45]
    assert numbers[-4] < 40
    assert shared == len(
        known & set().union(*(passages(words, 1) for words in train))
    ) / len(known)


def test_training_documents_with_a_held_out_passage_are_left_out_and_given_ones_stay(
    tmp_path, monkeypatch
):
    folder = write(tmp_path / "many", prose(60))
    clean, record = load(config(path=folder, test_pieces=None), tmp_path)
    assert record["copies"] == {
        "every": 1,
        "shared": 0.0,
        "dropped_documents": 0,
        "in_training": 0,
    }
    texts = {split: list(clean[split]) for split in text.SPLITS}
    quoted = [
        " \n".join(texts[split][0].split()[80:180]) for split in ("validation", "test")
    ]
    write(
        folder,
        {f"quoting{i}.md": f"{i} says: {quote}" for i, quote in enumerate(quoted)},
    )
    copied, other = load(config(path=folder, test_pieces=None), tmp_path)
    assert {split: list(copied[split]) for split in text.SPLITS} == texts
    assert other["sha256"] == record["sha256"]
    assert other["copies"] == {
        "every": 1,
        "shared": round(2 * 37 / (6 * 137), 6),
        "dropped_documents": 2,
        "in_training": 0,
    }
    monkeypatch.setattr(text, "LARGE", 1000)
    assert (
        load(config(path=folder, test_pieces=None), tmp_path)[1]["copies"]["every"]
        == 16
    )
    given = {
        "train.txt": prose(1)["000.md"],
        "valid.txt": "of its own",
        "test.txt": prose(1)["000.md"] + " end",
    }
    splits, record = load(config(path=write(tmp_path / "given", given)), tmp_path)
    assert list(splits["train"]) == [given["train.txt"]]
    assert record["copies"]["dropped_documents"] == 0
    assert record["copies"]["shared"] > 0.5


def rows_of(folder: Path, **splits: int) -> Path:
    """Write a folder laid out like a data set of the hub; `splits`: the number of rows
    of each split.
    """
    lines = {
        split: "".join(f'{{"text": "text {i} {i * i} of {n}"}}\n' for i in range(n))
        for split, n in splits.items()
    }
    return write(
        folder, {f"{split}-00000-of-00001.jsonl": each for split, each in lines.items()}
    )


@pytest.fixture
def set_of_the_hub(tmp_path, monkeypatch):
    """Return data sets by name, which `datasets` then takes for data sets of the hub,
    each with a commit.
    """
    import datasets

    sets: dict[str, Path] = {}
    real = datasets.load_dataset_builder

    def build(dataset: str, subset: str | None, **options: Any) -> Any:
        options |= {"revision": None, "cache_dir": str(tmp_path / "huggingface")}
        return real(str(sets[dataset]), subset, **options)

    monkeypatch.setattr(datasets, "load_dataset_builder", build)
    monkeypatch.setattr(hub, "commit_of", lambda name, revision: revision or "c0ffee")
    return sets


def test_a_data_set_of_the_hub_has_the_splits_that_it_has(set_of_the_hub, tmp_path):
    def loaded(**changes: Any) -> tuple[str, list[int]]:
        _, record = load(
            config("hub", dataset="a/b", **{"test_pieces": None, **changes}), tmp_path
        )
        assert record["revision"] == "c0ffee"
        return record["split"], [*record["documents"].values()]

    set_of_the_hub["a/b"] = rows_of(tmp_path / "alone", train=40)
    assert loaded() == ("document", [36, 2, 2])
    assert loaded(max_documents=25)[1] == [
        23,
        1,
        1,
    ]
    set_of_the_hub["a/b"] = rows_of(tmp_path / "two", train=40, dev=40)
    assert loaded() == ("given", [40, 20, 20])


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train_bpe(
        ["the quick brown fox jumps over the lazy dog. привет мир 🙂 " * 20], 400
    )


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@pytest.mark.parametrize(
    "given", [STRANGE, "", "\r\n", "a" * 10, "".join(map(chr, range(1, 0x2FF)))]
)
def test_decoding_gives_the_text_back_and_bytes_are_counted(kind, given, bpe):
    made = bpe if kind == "bpe" else tokenizer.raw_bytes()
    (ids,) = made.encode([given])
    assert made.decode(ids) == given
    assert made.separator not in ids
    assert made.token_bytes is not None
    assert made.token_bytes[ids].sum() == len(given.encode())
    if kind == "bytes":
        assert made.vocab_size == 257
        assert made.separator == 256
        assert ids.tolist() == list(given.encode())


def test_a_long_text_is_learnt_and_encoded_in_pieces_as_if_whole(monkeypatch):
    given = (STRANGE + " the lazy dog isn't  quick . ") * 40
    bpe = tokenizer.train_bpe([given], 400)
    (whole,) = bpe.encode([given])
    monkeypatch.setattr(tokenizer, "PIECE", 70)
    assert len(list(tokenizer.pieces(given))) > 40
    assert "".join(tokenizer.pieces(given)) == given
    assert np.array_equal(bpe.encode(["a", given, ""])[1], whole)
    assert tokenizer.train_bpe([given], 400).sha256 == bpe.sha256
    assert "".join(tokenizer.pieces("x" * 1000)) == "x" * 1000
    assert max(map(len, tokenizer.pieces("x" * 1000))) <= 70


def saved(inner: tokenizers.Tokenizer, folder: Path) -> Path:
    inner.save(str(folder / "mine.json"))
    return folder / "mine.json"


def test_a_tokenizer_file_gets_a_separator_and_never_pads_cuts_or_draws(bpe, tmp_path):
    description = bpe.description
    del description["added_tokens"][0]
    inner = tokenizers.Tokenizer.from_str(json.dumps(description))
    inner.enable_truncation(3)
    inner.enable_padding()
    inner.model.dropout = 0.5
    made = tokenizer.from_file(saved(inner, tmp_path))
    ids, empty = made.encode(["the quick brown fox jumps over", ""])
    assert made.decode(ids) == "the quick brown fox jumps over"
    assert len(empty) == 0
    assert made.separator not in made.encode(["<|endoftext|>"])[0]
    assert len({tuple(made.encode(["the quick brown fox"])[0]) for _ in range(20)}) == 1
    with pytest.raises(
        UserError, match=r"data.tokenizer: '.*json' cannot be read: No such file"
    ):
        tokenizer.find(f"{tmp_path}/worng.json")


@pytest.mark.parametrize(
    ("part", "value", "is_exact"),
    [
        ("normalizer", None, True),
        ("normalizer", tokenizers.normalizers.NFC(), False),
        ("normalizer", tokenizers.normalizers.Lowercase(), False),
        ("normalizer", tokenizers.normalizers.Prepend("<"), False),
        ("pre_tokenizer", tokenizers.pre_tokenizers.Whitespace(), False),
        (
            "pre_tokenizer",
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True),
            False,
        ),
    ],
)
def test_a_tokenizer_that_changes_text_counts_no_bytes_and_encodes_documents_whole(
    bpe, monkeypatch, part, value, is_exact
):
    inner = tokenizers.Tokenizer.from_str(bpe._inner.to_str())
    setattr(inner, part, value)
    made = tokenizer.Tokenizer(inner)
    assert (made.token_bytes is not None) == is_exact
    monkeypatch.setattr(tokenizer, "PIECE", 1000)
    assert (
        len([*made.encode_pieces(["the quick fox  and a dog " * 600])]) > 10
    ) == is_exact


def test_every_document_begins_with_one_separator_and_decodes_to_itself(tmp_path):
    texts = {f"{i:02}.txt": f"{i} {STRANGE}" for i in range(40)}
    made = tokens.prepare(
        config(path=write(tmp_path / "many", texts), vocab_size=300), tmp_path
    )
    decoded = []
    for split in (made.train, made.validation, made.test):
        assert split.starts[0] == 0
        assert split.starts[-1] == len(split.ids)
        assert np.array_equal(
            np.flatnonzero(split.ids == made.tokenizer.separator), split.starts[:-1]
        )
        decoded += [
            made.tokenizer.decode(split.ids[a + 1 : b])
            for a, b in itertools.pairwise(split.starts)
        ]
    assert sorted(decoded) == sorted(texts.values())
    assert made.record["tokens"] == {s: len(getattr(made, s).ids) for s in text.SPLITS}
    assert set(made.record) == {
        "name",
        "revision",
        "sha256",
        "split",
        "documents",
        "copies",
        "tokens",
    }


def test_changed_text_or_tokenizer_is_another_cache_entry_and_the_same_is_not_made_again(
    tmp_path, monkeypatch
):
    folder = write(tmp_path / "many", numbered(30))
    changed: tuple[dict[str, Any], ...] = (
        {},
        {"vocab_size": 301},
        {"tokenizer": "bytes"},
        {"max_documents": 30},
    )
    changed += ({"test_pieces": 5}, {"articles": True})
    settings = [
        config(path=folder, **{"vocab_size": 300, **changes}) for changes in changed
    ]
    folders = {tokens.prepare(each, tmp_path).folder for each in settings}
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_write", None)
        assert {tokens.prepare(each, tmp_path).folder for each in settings} == folders
    write(folder, {"000.md": "other text"})
    assert len(folders | {tokens.prepare(settings[0], tmp_path).folder}) == 7


def test_two_processes_make_one_cache(tmp_path, monkeypatch):
    settings = config(path=write(tmp_path / "many", numbered(30)), tokenizer="bytes")
    write_tokens = tokens._write

    def written(*given: Any) -> None:
        with open(tmp_path / "written", "a") as file:
            file.write("once ")
        write_tokens(*given)

    monkeypatch.setattr(tokens, "_write", written)
    children = [
        start_child(lambda: tokens.prepare(settings, tmp_path)) for _ in range(2)
    ]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert (tmp_path / "written").read_text() == "once "


def test_what_is_in_the_cache_is_read_without_datasets(
    set_of_the_hub, tmp_path, monkeypatch
):
    set_of_the_hub["a/b"] = rows_of(tmp_path / "alone", train=40)
    settings = config("hub", dataset="a/b", revision="c" * 40)
    record = tokens.prepare(settings, tmp_path).record
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert tokens.prepare(settings, tmp_path).record == record


def test_ids_beyond_16_bits_are_kept_whole(tmp_path):
    words = {f"w{i}": i for i in range(70_000)}
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({**words, "?": 70_000}, unk_token="?")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = write(tmp_path / "one", {"a.txt": "w69999 w65536 w1 " * 100})
    made = tokens.prepare(
        config(path=folder, tokenizer=str(saved(inner, tmp_path))), tmp_path / "cache"
    )
    assert made.train.ids.dtype == np.uint32
    assert made.train.ids[:4].tolist() == [
        70_001,
        69_999,
        65_536,
        1,
    ]
    assert made.tokenizer.token_bytes is None


def save_to_disk(folder: Path) -> list[str]:
    """Save forty texts, and let `map` leave a changed copy of them in the folder."""
    import datasets

    texts = [*prose(40).values()]
    rows = datasets.Dataset.from_dict({"text": texts, "title": ["x"] * 40})
    rows.save_to_disk(folder)
    saved_rows = datasets.load_from_disk(str(folder))
    saved_rows.map(lambda row: {"text": row["text"].upper()})
    assert [*folder.glob("cache-*.arrow")]
    return texts


def test_of_a_data_set_on_disk_only_its_own_files_are_read(tmp_path):
    texts = save_to_disk(tmp_path / "saved")

    splits, record = load(config(path=tmp_path / "saved"), tmp_path)

    found = [text for split in splits.values() for text in split]
    assert sorted(found) == sorted(texts)
    assert record["split"] == "document"


def test_what_map_leaves_beside_a_data_set_changes_nothing(tmp_path):
    save_to_disk(tmp_path / "saved")
    settings = config(path=tmp_path / "saved")
    before = sources.locate(settings).sha256

    for path in (tmp_path / "saved").glob("cache-*.arrow"):
        path.unlink()

    assert sources.locate(settings).sha256 == before


def test_splits_of_a_data_set_on_disk_are_kept(tmp_path):
    import datasets

    texts = [*prose(40).values()]
    rows = datasets.Dataset.from_dict({"text": texts})
    parts = {"train": range(30), "validation": range(30, 35), "test": range(35, 40)}
    by_split = {name: rows.select(part) for name, part in parts.items()}
    datasets.DatasetDict(by_split).save_to_disk(tmp_path / "saved")

    splits, record = load(config(path=tmp_path / "saved"), tmp_path)

    assert record["split"] == "given"
    assert [*splits["train"]] == texts[:30]
    assert [*splits["validation"]] == texts[30:35]
    assert [*splits["test"]] == texts[35:]


def test_copies_within_training_are_said_and_counted(tmp_path, caplog):
    texts = prose(60)
    for name, document in prose(20).items():
        texts[f"copy_of_{name}"] = document
    path = write(tmp_path / "texts", texts)

    made = tokens.prepare(config(path=path, tokenizer="bytes"), tmp_path / "cache")

    n_copies = made.record["copies"]["in_training"]
    assert n_copies > 0
    line = f"{n_copies} of {len(made.train.starts) - 1} training documents are copies"
    assert line in caplog.text


LOSSY = {
    "without capitals": tokenizers.normalizers.Lowercase(),
    "without e": tokenizers.normalizers.Replace("e", ""),
}


@pytest.mark.parametrize("kind", LOSSY)
def test_a_tokenizer_that_loses_text_is_refused(bpe, tmp_path, kind):
    inner = tokenizers.Tokenizer.from_str(bpe._inner.to_str())
    inner.normalizer = LOSSY[kind]
    path = write(tmp_path / "texts", {"a.txt": "The Hen SAT there. " * 500})
    lossy = config(path=path, tokenizer=str(saved(inner, tmp_path)))

    with pytest.raises(UserError, match=r"% of the characters do not come back"):
        tokens.prepare(lossy, tmp_path / "cache")


def test_a_tokenizer_of_bytes_without_some_bytes_is_refused(tmp_path):
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    path = write(tmp_path / "texts", {"a.txt": "ab abc ab " * 500})
    lossy = config(path=path, tokenizer=str(saved(inner, tmp_path)))

    with pytest.raises(UserError, match="do not come back, such as 'c'"):
        tokens.prepare(lossy, tmp_path / "cache")


def test_what_a_tokenizer_loses_of_a_text_is_said_and_recorded(tmp_path, caplog):
    words = ["one", "two", "three", "four"]
    vocabulary = {word: number for number, word in enumerate([*words, "?"])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    texts = {f"{number}.txt": "one two three four " * 200 for number in range(4)}
    texts["0.txt"] += "z " + texts["0.txt"]
    path = write(tmp_path / "texts", texts)

    made = tokens.prepare(
        config(path=path, tokenizer=str(saved(inner, tmp_path))), tmp_path / "cache"
    )

    assert 0 < made.record["lost_characters"] < 1e-3
    assert "% of the characters do not come back, such as 'z'" in caplog.text


def test_batches_are_a_function_of_seed_and_step_alone_and_labels_are_the_next_tokens():
    ids = np.arange(1000, dtype=np.uint16)
    first, second = (batches.TrainingBatches(ids, 16, 8, seed=3) for _ in range(2))
    for step in (40, 2, 17, 40):
        for step_before in range(step):
            first.batch(step_before)
        a = first.batch(step)
        b = second.batch(step)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.labels, a.ids + 1)
        assert a.ids.shape == (8, 16)
        assert a.ids.dtype == a.labels.dtype == torch.int64
        assert a.n_scored == 8 * 16
    for rank, rows in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        share = first.batch(2).share(2, rank, 2)
        assert torch.equal(share.ids, first.batch(2).ids[rows])
        assert share.n_scored == 8 * 16
    assert not torch.equal(
        first.batch(0).ids, batches.TrainingBatches(ids, 16, 8, seed=4).batch(0).ids
    )


def test_an_epoch_visits_nearly_every_token_once_in_another_order_and_offset():
    data = batches.TrainingBatches(np.arange(1000), 16, 1, seed=0)
    epochs = []
    for epoch in range(3):
        first = epoch * data.blocks_per_epoch
        seen = torch.cat(
            [data.batch(first + i).ids.flatten() for i in range(data.blocks_per_epoch)]
        )
        assert len(seen) == len(set(seen.tolist())) > 1000 - 2 * 16
        epochs.append(seen)
    assert not torch.equal(epochs[0], epochs[1])
    assert len({int(epoch.min()) for epoch in epochs}) > 1
    across, alone = (
        batches.TrainingBatches(np.arange(40), 16, size, seed=0) for size in (5, 1)
    )
    # epochs of one block
    assert torch.equal(
        across.batch(0).ids, torch.cat([alone.batch(i).ids for i in range(5)])
    )


@pytest.mark.parametrize("steps", [1, 5, 14, 15, 40])
def test_the_spans_of_some_batches_are_the_tokens_that_they_hold(steps):
    data = batches.TrainingBatches(np.arange(1000), 16, 4, seed=0)
    held = {
        i
        for step in range(steps)
        for column in data.batch(step)[:2]
        for i in column.flatten().tolist()
    }
    spans = data.spans(steps)
    assert [
        token for first, end in spans.tolist() for token in range(first, end)
    ] == sorted(held)
    # what is one stretch of text is one span
    assert (spans[1:, 0] > spans[:-1, 1]).all()


def test_validation_blocks_are_fixed_disjoint_and_spread_and_a_text_has_one():
    with pytest.raises(
        UserError, match="the text has 16 tokens: a block of 16 needs 17"
    ):
        batches.validation_batches(np.zeros(16), 16, 4, 8)

    def read(limit: int) -> list[list[int]]:
        made = batches.validation_batches(
            np.arange(1000), 16, batch_size=5, limit=limit
        )
        return [row for batch in made for row in batch.ids.tolist()]

    assert len(read(12)) == 12
    assert len({i for row in read(12) for i in row}) == 12 * 16
    assert read(12)[0][0] == 0
    assert read(12)[-1][-1] > 900
    assert len(read(10_000)) == 999 // 16
