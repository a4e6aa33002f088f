"""The numbers an evaluation gives, on models whose perplexity is known beforehand."""

import collections
import copy
import json
import math
import pathlib
import shutil
import signal
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fake_study import headline_of
from support import changed, encoded, write_words
from torch import Tensor

from posbench.config.overrides import apply
from posbench.config.schema import Config
from posbench.data import tokens as data
from posbench.data.tokens import TokenSplit
from posbench.errors import Stopped, Undefined, UserError
from posbench.evaluation import probes, protocols
from posbench.evaluation.evaluate import Evaluation, evaluate
from posbench.evaluation.job import evaluate_run
from posbench.evaluation.models import Subject, TrainedGPT, Variant, Varied
from posbench.evaluation.ngrams import Readers
from posbench.evaluation.protocols import targets_of
from posbench.launch.run import config_with_measured_lengths, evaluate_runs
from posbench.model.gpt import build
from posbench.results import compare
from posbench.results.frame import read
from posbench.run.rows import EvaluationRow, evaluation_rows, on_shared_targets
from posbench.run.run import Run, load_record
from posbench.training.train import train

# of a finished run: its configuration and its folder
Trained = tuple[Config, pathlib.Path]
V = 37
L = 16


class Planted:
    """A subject that is no model: expects the token `distance` before the one to come,
    where it can see that far.
    """

    name = "planted"
    train_length = L

    def __init__(self, distance: int | None, max_length: int | None = None) -> None:
        self.distance, self.max_length = distance, max_length
        self.variant = Variant()
        # length and variant, of the changed copies too
        self.passes: list[tuple[int, Variant]] = []

    def logits(
        self, ids: np.ndarray, scored: np.ndarray, first: int
    ) -> Iterator[Tensor]:
        self.passes.append((ids.shape[1] - 1, self.variant))
        yield self.expects(torch.from_numpy(ids[:, :-1]))[torch.from_numpy(scored)]

    def shifted(self, offset: int) -> Subject:
        return self

    def varied(self, variant: Variant, length: int) -> Varied:
        if self.max_length is not None and length > self.max_length:
            raise Undefined(
                f"length {length} is beyond the end of 'planted' (defined up to"
                f" {self.max_length})"
            )
        changed = copy.copy(self)
        changed.variant = variant
        return Varied(changed, {"sinks": variant.sinks} if variant.sinks else None)

    def expects(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V) of token ids (B, T)."""
        out = torch.zeros(*ids.shape, V)
        if self.distance is not None and ids.shape[1] >= self.distance:
            seen = torch.nn.functional.one_hot(
                ids[:, : ids.shape[1] - self.distance + 1], V
            )
            out[:, self.distance - 1 :] = 20.0 * seen
        return out


def periodic(period: int, repeats: int = 80) -> TokenSplit:
    ids = np.tile(np.random.default_rng(0).integers(0, V, period), repeats).astype(
        np.uint16
    )
    return TokenSplit(ids=ids, starts=np.array([0, len(ids)], dtype=np.int64))


def gpt(config: Config, encoding: str) -> TrainedGPT:
    """A model with its initial weights."""
    model = build(encoded(config, encoding), V).eval()
    return TrainedGPT(model, L, torch.device("cpu"), torch.float32)


def rows_of(
    subject: Subject,
    split: TokenSplit,
    config: Config,
    known: Sequence[EvaluationRow] = (),
) -> list[EvaluationRow]:
    sizes = np.arange(V) % 3 + 1
    asked = Evaluation(
        subject=subject,
        split=split,
        tokenizer=types.SimpleNamespace(token_bytes=sizes, encode=None),
        settings=config.evaluation,
        checkpoint_step=7,
        dtype="fp32",
        device=torch.device("cpu"),
    )
    return list(evaluate(asked, known))


@pytest.fixture
def config(tiny_config):
    return evaluation_with(tiny_config, ratios=(1, 2, 4, 8, 16), blocks=32)


def evaluation_with(config: Config, **fields: Any) -> Config:
    return changed(config, evaluation=fields)


def test_a_uniform_models_perplexity_is_the_vocabulary_size(config):
    rows = rows_of(Planted(None), periodic(48), config)
    assert len(rows) == 5 + 4 + 5
    for row in rows:
        # without a training text there is no n-gram model
        assert row.status == "ok"
        assert row.ngram_nll is None
        assert row.perplexity == pytest.approx(V, rel=1e-6)
        assert row.nll == pytest.approx(math.log(V), rel=1e-6)
        assert row.bits_per_byte == pytest.approx(
            row.n_tokens * math.log2(V) / row.n_bytes, rel=1e-6
        )
        assert 1 < row.n_bytes / row.n_tokens < 3
    # what is known is not computed again
    assert rows_of(Planted(None), periodic(48), config, known=rows) == []
    more = evaluation_with(
        config, ratios=(1, 3), longest=16, protocols=("fixed_target",)
    )
    added = rows_of(Planted(None), periodic(48), more, known=rows)
    assert [(row.length, row.window) for row in added] == [(3 * L, None), (3 * L, L)]
    assert {row.targets_sha256 for row in added} == {rows[0].targets_sha256}
    changed = rows_of(
        Planted(None), periodic(48), evaluation_with(config, targets=4), known=rows
    )
    # on other targets it is
    assert {row.protocol for row in changed} == {"fixed_target"}
    assert len(changed) == 9


def test_a_model_that_copies_from_three_train_lengths_back_improves_only_from_4x_on(
    config,
):
    rows = rows_of(Planted(3 * L), periodic(3 * L), config)
    nll = {
        row.length_ratio: row.nll
        for row in rows
        if row.protocol == "fixed_target" and not row.window
    }
    assert nll[1] == pytest.approx(math.log(V), rel=1e-6)
    assert nll[2] == pytest.approx(math.log(V), rel=1e-6)
    assert max(nll[4], nll[8], nll[16]) < 1e-3


@pytest.mark.parametrize(
    ("documents", "starts"),
    [("doc", [*range(0, 2700, 300), 2700]), ("concat", [0, 700, 720, 1500, 2700])],
)
def test_a_row_has_its_sums_by_document(config, documents, starts):
    """A block belongs to the document of its first target; of fewer than eight
    documents the units are segments.
    """
    ids = np.random.default_rng(0).integers(0, V, 2700).astype(np.uint16)
    split = TokenSplit(ids, np.array(starts, dtype=np.int64))
    wanted = evaluation_with(
        config, protocols=("fixed_target",), documents=documents, targets=4
    )
    windows = protocols.plan(
        "fixed_target", split, [L], 4, 32, documents, longest=16 * L
    )[L]
    expected = (
        np.searchsorted(starts, windows.starts + L - 3, side="right") - 1
    ).tolist()
    for row in rows_of(Planted(3 * L), split, wanted):
        assert row.units is not None
        assert row.documents == documents
        assert row.units["document"] == sorted(row.units["document"])
        assert {*row.units["document"]} == {*expected}
        assert row.ci_over == ("documents" if len(set(expected)) >= 8 else "segments")
        if row.ci_over == "documents":
            assert row.units["tokens"] == [
                4 * expected.count(document) for document in row.units["document"]
            ]
        assert sum(row.units["tokens"]) == row.n_tokens == 4 * row.n_blocks
        assert sum(row.units["nll"]) / row.n_tokens == pytest.approx(row.nll, abs=1e-4)
        assert row.ci_low <= row.nll <= row.ci_high
    # held out of two documents
    stretches = TokenSplit(split.ids, np.arange(0, 2701, 270), np.repeat([0, 1], 5))
    assert {
        len(row.units["tokens"]) for row in rows_of(Planted(3 * L), stretches, wanted)
    } <= {9, 10}


def test_equal_documents_are_one_unit_of_an_interval(config):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, V, 300).astype(np.uint16) for _ in range(10)]
    once = TokenSplit(np.concatenate(texts), np.arange(0, 3001, 300))
    twice = TokenSplit(np.concatenate([*texts, *texts]), np.arange(0, 6001, 300))
    wanted = evaluation_with(config, protocols=("fixed_target",), blocks=200)

    (row, *_) = rows_of(Planted(3), once, wanted)
    (copied, *_) = rows_of(Planted(3), twice, wanted)

    assert row.n_documents == copied.n_documents == 10
    assert copied.units["document"] == list(range(10))
    assert copied.nll == pytest.approx(row.nll)
    assert copied.ci_high == pytest.approx(row.ci_high)


def test_what_has_no_number_is_a_row_that_says_why(config):
    rows = rows_of(Planted(None, max_length=2 * L), periodic(48), config)
    beyond = [row for row in rows if row.length > 2 * L]
    assert {(row.status, row.units, row.nll, row.bits_per_byte) for row in beyond} == {
        ("undefined", None, None, None)
    }
    assert len(beyond) == 3 + 3 + 3
    assert all(str(2 * L) in row.reason for row in beyond)
    rows = rows_of(Planted(None), periodic(48, repeats=4), config)
    status = {row.length: row.status for row in rows if row.protocol == "fixed_target"}
    assert status == {
        L: "ok",
        2 * L: "ok",
        4 * L: "ok",
        8 * L: "ok",
        16 * L: "too_short",
    }


def test_options_of_probes_change_what_is_read_and_stand_in_the_rows_task(config):
    ids = np.arange(65)
    assert not probes.of("shuffle:keep=20", 20, 8, 32)
    (probe,) = probes.of("shuffle:keep=20", 64, 8, 32)
    assert probe.rewrite is not None
    changed = probe.rewrite(ids)
    assert (changed[44:] == ids[44:]).all()
    assert (changed[:44] != ids[:44]).any()
    assert sorted(changed[:44]) == list(range(44))
    # in 6 tokens there is no room
    assert not probes.of("repeat", 6, 3, 32)
    copied, control = probes.of("repeat", 64, 3, 32)
    assert copied.rewrite is not None
    assert control.rewrite is None
    assert copied.targets == control.targets == 3
    np.testing.assert_array_equal(copied.rewrite(ids), [*range(61, 65), *range(4, 65)])
    wanted = evaluation_with(config, tasks=("shuffle:keep=32",), windowed=False)
    rows = rows_of(Planted(3 * L), periodic(3 * L), wanted)
    plain = {row.length: row for row in rows if row.protocol == "fixed_target"}
    shuffled = [row for row in rows if row.task == "shuffle:keep=32"]
    assert [row.length // L for row in shuffled] == [4, 8, 16]
    for row in shuffled:
        assert row.targets_sha256 == plain[row.length].targets_sha256
        assert row.nll > plain[row.length].nll + 1


def test_a_passage_that_is_moved_costs_a_relative_scheme_nothing_and_others_what_positions_do(
    config,
):
    config = evaluation_with(
        config, tasks=("offset",), protocols=("fixed_target",), windowed=False
    )
    nll = {}
    for name in ("rope", "alibi", "none", "sinusoidal", "learned"):
        rows = [
            row
            for row in rows_of(gpt(config, name), periodic(48), config)
            if row.task == "offset"
        ]
        assert [row.offset or 0 for row in rows] == [0, L, 3 * L, 7 * L, 15 * L]
        assert {row.length for row in rows} == {L}
        assert len({row.targets_sha256 for row in rows} - {None}) == 1
        nll[name] = [row.nll for row in rows]
    for name in ("rope", "alibi", "none"):
        assert nll[name] == pytest.approx([nll[name][0]] * 5, abs=1e-5), name
    # it reads training lengths all the same, also from 0 on
    far = evaluation_with(config, ratios=(2.0, 4.0))
    assert [
        row.offset for row in rows_of(gpt(config, "rope"), periodic(48), far) if row.nll
    ] == [None] * 3 + [L, 3 * L]
    assert max(nll["sinusoidal"]) - min(nll["sinusoidal"]) > 1e-4
    assert nll["learned"][1:] == [None] * 4


def test_the_windowed_baseline_and_its_sinks_narrow_the_model_and_have_rows_of_their_own(
    config,
):
    subject = Planted(None)
    longer = [2 * L, 4 * L, 8 * L, 16 * L]
    rows = rows_of(
        subject,
        periodic(48),
        evaluation_with(config, sinks=4, protocols=("fixed_target",)),
    )
    assert {(variant.window, variant.sinks) for _, variant in subject.passes} == {
        (None, 0),
        (L, 0),
        (L, 4),
    }
    assert {length for length, variant in subject.passes if variant.window == L} == set(
        longer
    )
    narrowed, sinks = (
        [row for row in rows if row.kind == kind] for kind in ("windowed", "sinks")
    )
    assert [row.length for row in narrowed] == [row.length for row in sinks] == longer
    assert {
        (row.window, row.mean_context, str(row.extension_options)) for row in sinks
    } == {(L, L + 4, "{'sinks': 4}")}


def test_a_run_trained_at_four_times_the_length_pairs_with_the_others_at_equal_lengths(
    config,
):
    rows = rows_of(Planted(None), periodic(48), config)
    longer = evaluation_with(config, ratios=(1, 2, 4))
    subject = Planted(None)
    subject.train_length = 4 * L
    others = rows_of(subject, periodic(48), longer)
    # of plain and windowed rows
    digests = {(row.protocol, row.targets_sha256) for row in (*rows, *others)}
    # one for each protocol
    assert len(digests) == len({digest for _, digest in digests}) == 2
    assert {row.length for row in others} == {4 * L, 8 * L, 16 * L}


def test_extensions_are_evaluated_at_every_length_and_say_where_a_scheme_has_none(
    config,
):
    wanted = evaluation_with(
        config,
        extensions=("pi", "pi:factor=4"),
        protocols=("fixed_target",),
        windowed=False,
    )
    rows = rows_of(gpt(config, "rope"), periodic(48), wanted)
    extended = [(row.extension, row.length // L) for row in rows if row.extension]
    assert extended == [
        (name, ratio) for name in ("pi", "pi:factor=4") for ratio in (1, 2, 4, 8, 16)
    ]
    assert {row.status for row in rows} == {"ok"}
    assert all(row.extension_options for row in rows if row.extension)
    read = [
        EvaluationRow.from_json(json.loads(json.dumps(row.to_json()))) for row in rows
    ]
    assert rows_of(gpt(config, "rope"), periodic(48), wanted, known=read) == []
    rows = rows_of(gpt(config, "none"), periodic(48), wanted)
    assert {row.status for row in rows if row.extension} == {"undefined"}


@pytest.fixture
def trained(tiny_config, tmp_path, tmp_path_factory):
    base = tmp_path_factory.getbasetemp() / "evaluated"
    config = changed(
        tiny_config,
        data={"path": str(base / "text.txt")},
        runtime={"cache": str(base / "cache")},
    )
    if not base.exists():  # trained once for all tests of this process
        base.mkdir()
        write_words(base)
        train(config, base / "run", ["test"])
    shutil.copytree(base / "run", tmp_path / "run")
    return config, tmp_path / "run"


def test_a_finished_run_gets_every_protocol_and_probe_and_only_what_is_missing(trained):
    config, folder = trained
    first = evaluation_rows(folder)
    asked = apply(
        config,
        [
            "protocol=fixed_target,nonoverlap",
            "probe=repeat,shuffle",
            "sinks=2",
            "extension=ntk",
        ],
    )
    evaluate_run(folder, asked)
    rows = evaluation_rows(folder)
    assert rows[: len(first)] == first
    counts = collections.Counter((row.protocol, row.task) for row in rows)
    varied = 3 + 2 + 2 + 3  # plain, windowed, sinks, ntk
    assert counts == {
        ("fixed_target", None): varied,
        ("nonoverlap", None): 3,
        ("task", "repeat"): varied,
        ("task", "repeat_control"): varied,
        ("task", "shuffle"): 2 * 4,
    }
    assert {row.status for row in rows} == {"ok"}
    before = (folder / "rows.jsonl").read_bytes()
    evaluate_run(folder, asked)
    assert (folder / "rows.jsonl").read_bytes() == before


def test_a_run_whose_text_is_another_now_is_not_evaluated(trained):
    config, folder = trained
    before = (folder / "rows.jsonl").read_bytes()
    text = pathlib.Path(str(config.data.path))
    original = text.read_text(encoding="utf-8")
    try:
        text.write_text(original + " more", encoding="utf-8")
        with pytest.raises(UserError, match="was trained on another text"):
            evaluate_run(folder, apply(config, ["length=96"]))
    finally:
        text.write_text(original, encoding="utf-8")
    assert (folder / "rows.jsonl").read_bytes() == before


# of a grown curve: whether a point is measured on the targets of all others
Point = tuple[str, int, int | None, str | None, str | None]


def points_of(rows: Sequence[EvaluationRow]) -> set[Point]:
    points = set()
    for row in rows:
        if row.measured:
            point = (row.protocol, row.length, row.window, row.extension, row.task)
            points.add(point)
    return points


def digests_of(rows: Sequence[EvaluationRow], protocol: str) -> set[str | None]:
    return {row.targets_sha256 for row in rows if row.protocol == protocol}


def curve_of(folder: pathlib.Path) -> list[EvaluationRow]:
    """The rows that a reader of the run gets."""
    return on_shared_targets(evaluation_rows(folder))


def test_a_longer_length_gives_a_curve_on_one_set_of_targets(trained):
    config, folder = trained
    evaluate_run(folder, apply(config, ["extension=pi", "probe=repeat", "sinks=2"]))
    before = curve_of(folder)

    evaluate_run(folder, apply(config, ["length=128"]))

    curve = curve_of(folder)
    assert points_of(before) < points_of(curve)
    assert {row.length for row in curve} == {16, 32, 64, 128}
    for protocol in ("fixed_target", "nonoverlap"):
        assert len(digests_of(curve, protocol)) == 1
        assert digests_of(curve, protocol) != digests_of(before, protocol)
    assert digests_of(curve, "task").isdisjoint(digests_of(before, "task"))


def test_a_grown_curve_is_that_of_a_run_that_asked_for_all_lengths_at_once(trained):
    config, folder = trained
    at_once = folder.with_name("at_once")
    shutil.copytree(folder, at_once)
    for path in (folder, at_once):
        (path / "rows.jsonl").write_text("", encoding="utf-8")
    evaluate_run(folder, apply(config, []))

    evaluate_run(folder, apply(config, ["ratio=8"]))
    evaluate_run(at_once, apply(config, ["ratio=1,2,4,8"]))

    grown = {row.key: row.nll for row in curve_of(folder)}
    expected = {row.key: row.nll for row in curve_of(at_once)}
    assert grown == expected


def test_a_line_says_what_a_longer_length_did_to_the_curve(trained, caplog):
    config, folder = trained
    was = headline_of(folder)["nll_1x"]
    caplog.set_level("INFO")

    evaluate_run(folder, apply(config, ["length=128"]))

    now = headline_of(folder)["nll_1x"]
    losses = f"loss at 1x was {was:.3f}, is {now:.3f}"
    line = f"new targets for 8x: 3 lengths scored again; {losses}"
    assert line in caplog.messages
    assert headline_of(folder)["rise_8x"] is not None


@pytest.mark.parametrize("words", [["length=48"], ["length=65536"], ["length=16"]])
def test_a_length_that_needs_no_other_targets_leaves_the_curve_as_it_was(
    trained, caplog, words
):
    config, folder = trained
    first = curve_of(folder)
    before = headline_of(folder)
    caplog.set_level("INFO")

    evaluate_run(folder, apply(config, words))

    assert curve_of(folder)[: len(first)] == first
    assert headline_of(folder)["rise_4x"] == before["rise_4x"]
    assert "new targets" not in caplog.text


def test_shorter_lengths_asked_for_later_score_the_targets_of_the_longest(trained):
    config, folder = trained
    evaluate_run(folder, apply(config, ["length=128"]))
    curve = curve_of(folder)

    evaluate_run(folder, apply(config, ["length=32,96"]))

    added = [row for row in curve_of(folder) if row not in curve]
    assert {row.length for row in added} == {96}
    assert digests_of(added, "fixed_target") == digests_of(curve, "fixed_target")


def test_an_extension_after_a_longer_length_has_all_lengths_of_the_curve(trained):
    config, folder = trained
    evaluate_run(folder, apply(config, ["ratio=8"]))

    words = ["extension=pi"]
    evaluate_run(folder, apply(config_with_measured_lengths(folder), words))

    extended = [row for row in curve_of(folder) if row.extension == "pi"]
    assert [row.length for row in extended] == [16, 32, 64, 128]
    curves = compare.curves(read([folder])).set_index(["variant", "length"])
    assert curves.loc[("pi", 128), "rise"] != 0


def test_training_again_with_more_ratios_gives_one_curve(trained, caplog):
    config, folder = trained
    longer = evaluation_with(config, ratios=(1, 2, 4, 8))
    caplog.set_level("INFO")

    train(longer, folder, ["test"])

    assert {row.length for row in curve_of(folder)} == {16, 32, 64, 128}
    assert len(digests_of(curve_of(folder), "fixed_target")) == 1
    assert "new targets for 8x: 3 lengths scored again" in caplog.text


def test_a_study_grows_with_its_runs_and_one_run_alone_stays_in_it(trained, capsys):
    _, folder = trained
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    before = digests_of(curve_of(folder), "fixed_target")

    evaluate_runs([folder], ["ratio=8"])
    shared = read([folder, other])
    evaluate_runs([folder, other], ["ratio=8"])
    grown = read([folder, other])

    main = shared[shared["main"] & (shared["protocol"] == "fixed_target")]
    assert {*main["targets_sha256"]} == before
    main = grown[grown["protocol"] == "fixed_target"]
    assert main["main"].all()
    assert {*main["length"]} == {16, 32, 64, 128}
    assert main["targets_sha256"].nunique() == 1
    assert "not shown" not in capsys.readouterr().out


@pytest.mark.parametrize("rows_before_the_end", [1, 5, 8, 9, 10])
def test_a_curve_is_whole_wherever_its_growth_is_stopped_and_is_finished_later(
    trained, monkeypatch, rows_before_the_end
):
    config, folder = trained
    before = points_of(curve_of(folder))
    asked = apply(config, ["ratio=8"])
    stop_after(rows_before_the_end, monkeypatch)
    with pytest.raises(Stopped):
        evaluate_run(folder, asked)
    monkeypatch.undo()
    stopped = curve_of(folder)

    evaluate_run(folder, asked)

    assert before <= points_of(stopped)
    assert len(digests_of(stopped, "fixed_target")) == 1
    assert {row.length for row in curve_of(folder)} == {16, 32, 64, 128}
    assert len(digests_of(curve_of(folder), "fixed_target")) == 1
    assert len(digests_of(curve_of(folder), "nonoverlap")) == 1


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM as soon as so many rows are written."""
    log = Run.log
    written = []

    def logged(run: Run, row: Any) -> None:
        log(run, row)
        written.append(row)
        if len(written) == count:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Run, "log", logged)


def test_a_precision_that_is_named_replaces_rows_of_another_and_auto_takes_what_is_there(
    trained,
):
    config, folder = trained
    first = evaluation_rows(folder)
    evaluate_run(folder, apply(config, ["precision=bf16"]))
    half = evaluation_rows(folder)
    assert {row.dtype for row in half} == {"bf16"}
    assert [row.key for row in half] == [row.key for row in first]
    assert (
        0
        < max(abs(row.nll - other.nll) for row, other in zip(half, first, strict=True))
        < 0.02
    )
    evaluate_run(folder, apply(config, []))
    assert evaluation_rows(folder) == half


def test_rows_say_what_the_best_ngram_model_of_the_trained_tokens_has_on_their_targets(
    trained,
):
    config, folder = trained
    evaluate_run(folder, apply(config, ["task=repeat", "protocol=fixed_target"]))
    rows = evaluation_rows(folder)
    tokens = data.prepare(config.data, config.runtime.cache)
    readers = Readers(
        tokens.train.ids,
        tokens.batches(config.training, config.seed).spans(config.training.steps),
        257,
        tokens.test.ids,
        tokens.validation.ids,
    )
    windows = protocols.plan("fixed_target", tokens.test, [16, 32, 64], 8, 16, "auto")
    targets = targets_of(windows[16])
    order, nll = readers.ngram(targets.indices)
    assert 0.5 < nll.mean() < math.log(9)  # thirty words of random letters
    of_window = readers.with_window(targets.indices, targets.context)
    for row in rows:  # what a paired interval of the difference rests on
        assert row.units is not None
        assert ("ngram" in row.units) == (row.task is None)
        if row.protocol == "fixed_target":
            assert row.targets_sha256 == targets.sha256(tokens.test)
            assert row.ngram_nll == pytest.approx(nll.mean())
            assert row.ngram_order == order
            assert sum(row.units["ngram"]) == pytest.approx(
                row.ngram_nll * row.n_tokens, rel=1e-5
            )
        if "cached_ngram" in row.units:
            assert row.length == 16
            total = sum(row.units["cached_ngram"])
            assert total == pytest.approx(of_window.sum(), rel=1e-5)
    # as trained, at the training length
    assert sum("cached_ngram" in (row.units or {}) for row in rows) == 1


def test_an_evaluation_that_ends_early_keeps_its_rows(trained, monkeypatch):
    config, folder = trained
    first = evaluation_rows(folder)
    log = Run.log

    def logged(run: Run, row: Any) -> None:
        log(run, row)
        if row["length"] == 128:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Run, "log", logged)
    with pytest.raises(Stopped):
        evaluate_run(
            folder,
            apply(
                config, ["length=96,128,160", "protocol=fixed_target", "windowed=false"]
            ),
        )
    assert [row.length for row in evaluation_rows(folder)[len(first) :]] == [96, 128]
    # since that is what became of its training
    assert load_record(folder)["status"] == "done"


def test_an_unfinished_run_is_to_be_continued_before_it_is_evaluated(trained):
    config, folder = trained
    shutil.rmtree(folder / "checkpoint" / "step-00000012")
    with pytest.raises(
        UserError,
        match=r"is not finished, 10 of 12 updates are made: go on with 'test' first",
    ):
        evaluate_run(folder, config)
