"""The numbers an evaluation gives, on models whose perplexity is known beforehand."""

import collections
import copy
import json
import math
import shutil
import signal
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from fake_study import headline_of
from support import change_record, changed, encoded, write_words
from torch import Tensor

from posbench.config.overrides import apply
from posbench.config.schema import Config
from posbench.data.tokens import TokenSplit
from posbench.errors import RowsFailed, Stopped, Undefined, UserError
from posbench.evaluation import probes, protocols
from posbench.evaluation.evaluate import Evaluation, evaluate
from posbench.evaluation.job import evaluate_run
from posbench.evaluation.protocols import Windows
from posbench.evaluation.subjects import Facts, Subject, TrainedGPT, Variant
from posbench.launch.execute import evaluate_runs
from posbench.model.gpt import build
from posbench.reports.one_run import print_results
from posbench.results import compare
from posbench.results.frame import read
from posbench.run.folder import Run, evaluated_config
from posbench.run.rows import (
    PLAIN,
    EvaluationRow,
    evaluation_rows,
    every_row,
)
from posbench.run.saved import load_record
from posbench.training.train import train

# of a finished run: its configuration and its folder
Trained = tuple[Config, Path]
Rows = Sequence[EvaluationRow]
# what a row is about: protocol, length, window, extension, task
Point = tuple[str, int, int | None, str | None, str | None]
V = 37
L = 16
RATIOS = (1, 2, 4, 8, 16)
CPU = torch.device("cpu")


class Planted:
    """A subject that is no model: expects the token `distance` before the one to come,
    where it can see that far.
    """

    name = "planted"
    train_length = L

    def __init__(self, distance: int | None, max_length: int | None = None) -> None:
        self.distance = distance
        self.max_length = max_length
        self.variant = Variant()
        # length and variant, of the changed copies too
        self.passes: list[tuple[int, Variant]] = []

    def logits(self, ids, scored, first):
        length = ids.shape[1] - 1
        self.passes.append((length, self.variant))
        read = torch.from_numpy(ids[:, :-1])
        logits = self.expects(read)
        yield logits[torch.from_numpy(scored)]

    def shifted(self, offset: int) -> Subject:
        return self

    def in_variant(self, variant: Variant, length: int) -> tuple[Subject, Facts]:
        if self.max_length is not None and length > self.max_length:
            raise Undefined(f"beyond the end of 'planted' ({self.max_length})")
        changed = copy.copy(self)
        changed.variant = variant
        facts = {"sinks": variant.sinks} if variant.sinks else None
        return changed, facts

    def expects(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V) of token ids (B, T)."""
        logits = torch.zeros(*ids.shape, V)
        if self.distance is None or ids.shape[1] < self.distance:
            return logits
        n_seen = ids.shape[1] - self.distance + 1
        seen = torch.nn.functional.one_hot(ids[:, :n_seen], V)
        logits[:, self.distance - 1 :] = 20.0 * seen
        return logits


class Exhausting(Planted):
    """Has no memory for some lengths."""

    def __init__(self, too_long: set[int]) -> None:
        super().__init__(None)
        self.too_long = too_long

    def expects(self, ids: Tensor) -> Tensor:
        if ids.shape[1] in self.too_long:
            raise MemoryError("no room")
        return super().expects(ids)


def random_ids(count: int) -> np.ndarray:
    ids = np.random.default_rng(0).integers(0, V, count)
    return ids.astype(np.uint16)


def periodic(period: int, repeats: int = 80) -> TokenSplit:
    ids = np.tile(random_ids(period), repeats)
    starts = np.array([0, len(ids)])
    return TokenSplit(ids, starts)


TEXT = periodic(48)


def gpt(config: Config, encoding: str) -> TrainedGPT:
    """A model with its initial weights."""
    model = build(encoded(config, encoding), V).eval()
    return TrainedGPT(model, L, CPU, torch.float32)


def rows_of(
    subject: Subject, split: TokenSplit, config: Config, known: Rows = ()
) -> list[EvaluationRow]:
    evaluation = evaluation_of(subject, split, config)
    return list(evaluate(evaluation, known))


def uniform(config: Config, known: Rows = ()) -> list[EvaluationRow]:
    """The rows of a model to which all tokens are equally likely."""
    return rows_of(Planted(None), TEXT, config, known)


def gpt_rows(name: str, config: Config, known: Rows = ()) -> list[EvaluationRow]:
    """The rows of a model with its initial weights."""
    return rows_of(gpt(config, name), TEXT, config, known)


def lengths_in(rows: Rows) -> list[int]:
    return [row.length for row in rows]


def of_kind(rows: Rows, kind: str) -> list[EvaluationRow]:
    return [row for row in rows if row.variant == kind]


def in_tokens(*ratios: int) -> list[int]:
    return [ratio * L for ratio in ratios]


def evaluation_of(subject: Subject, split: TokenSplit, config: Config) -> Evaluation:
    sizes = np.arange(V) % 3 + 1
    tokenizer: Any = types.SimpleNamespace(token_bytes=sizes, encode=None)
    return Evaluation(
        subject=subject,
        split=split,
        tokenizer=tokenizer,
        settings=config.evaluation,
        checkpoint_step=7,
        dtype="fp32",
        device=CPU,
    )


@pytest.fixture
def config(tiny_config: Config) -> Config:
    return evaluation_with(tiny_config, ratios=RATIOS, blocks=32)


def evaluation_with(config: Config, **fields: Any) -> Config:
    return changed(config, evaluation=fields)


def fixed_target(config: Config, **fields: Any) -> Config:
    """The evaluation with plain rows of the main protocol alone, and these settings."""
    plain = evaluation_with(config, protocols=("fixed_target",), windowed=False)
    return evaluation_with(plain, **fields)


def test_a_uniform_models_perplexity_is_the_vocabulary_size(config):
    rows = uniform(config)

    assert len(rows) == 5 + 4 + 5
    for row in rows:
        bits = row.n_tokens * math.log2(V)
        bytes_per_token = row.n_bytes / row.n_tokens
        assert row.status == "ok"
        assert row.perplexity == pytest.approx(V, rel=1e-6)
        assert row.nll == pytest.approx(math.log(V), rel=1e-6)
        assert row.bits_per_byte == pytest.approx(bits / row.n_bytes, rel=1e-6)
        assert 1 < bytes_per_token < 3
        # without a training text there is no n-gram model
        assert row.ngram_nll is None


STARTS = {
    "doc": [*range(0, 2700, 300), 2700],
    "concat": [0, 700, 720, 1500, 2700],
}


def text_of(starts: Sequence[int], sources: np.ndarray | None = None) -> TokenSplit:
    return TokenSplit(random_ids(2700), np.array(starts), sources)


def first_documents(split: TokenSplit, windows: Windows) -> list[int]:
    """The document of each block's first of four targets."""
    first_target = windows.starts + windows.length - 3
    found = np.searchsorted(split.starts, first_target, side="right") - 1
    return [int(document) for document in found]


@pytest.mark.parametrize("documents", STARTS)
def test_a_row_has_its_sums_by_document(config, documents):
    """A block belongs to the document of its first target; of fewer than eight
    documents the units are segments.
    """
    split = text_of(STARTS[documents])
    wanted = fixed_target(config, documents=documents, targets=4, windowed=True)
    sizes = ([L], 4, 32, documents)
    windows = protocols.place_windows("fixed_target", split, *sizes, longest=16 * L)
    expected = first_documents(split, windows[L])
    over = "documents" if len(set(expected)) >= 8 else "segments"

    rows = rows_of(Planted(3 * L), split, wanted)

    for row in rows:
        units = row.units
        assert row.documents == documents
        assert row.ci_over == over
        assert units["document"] == sorted(units["document"])
        assert set(units["document"]) == set(expected)
        assert sum(units["tokens"]) == row.n_tokens
        assert row.n_tokens == 4 * row.n_blocks
        mean = sum(units["nll"]) / row.n_tokens
        assert mean == pytest.approx(row.nll, abs=1e-4)
        assert row.ci_low <= row.nll <= row.ci_high
        if over == "documents":
            blocks = [expected.count(document) for document in units["document"]]
            assert units["tokens"] == [4 * count for count in blocks]


def test_equal_documents_are_one_unit_of_an_interval(config):
    ids = random_ids(3000)
    once = TokenSplit(ids, np.arange(0, 3001, 300))
    both = np.tile(ids, 2)
    twice = TokenSplit(both, np.arange(0, 6001, 300))
    wanted = fixed_target(config, blocks=200)

    row = rows_of(Planted(3), once, wanted)[0]
    copied = rows_of(Planted(3), twice, wanted)[0]

    assert row.n_documents == 10
    assert copied.n_documents == 10
    assert copied.units["document"] == list(range(10))
    assert copied.nll == pytest.approx(row.nll)
    assert copied.ci_high == pytest.approx(row.ci_high)


def test_beyond_the_end_of_a_model_rows_are_undefined_and_say_why(config):
    rows = rows_of(Planted(None, max_length=2 * L), TEXT, config)

    beyond = [row for row in rows if row.length > 2 * L]
    assert len(beyond) == 3 + 3 + 3
    for row in beyond:
        assert row.status == "undefined"
        assert row.units is None
        assert row.nll is None
        assert row.bits_per_byte is None
        assert str(2 * L) in row.reason


def test_where_the_text_has_too_few_windows_rows_are_too_short(config):
    short = periodic(48, repeats=4)

    rows = rows_of(Planted(None), short, fixed_target(config))

    too_short = [row.length for row in rows if row.status == "too_short"]
    assert lengths_in(rows) == in_tokens(*RATIOS)
    assert too_short == [16 * L]


def test_a_length_that_has_no_room_costs_no_other_row_and_is_tried_again(config):
    wanted = fixed_target(config)
    subject = Exhausting({4 * L, 8 * L})
    evaluation = evaluation_of(subject, TEXT, wanted)
    rows = []

    with pytest.raises(RowsFailed, match="at 64 tokens: out of memory: no room"):
        for row in evaluate(evaluation):
            rows.append(row)  # noqa: PERF402 what comes before the error is kept

    statuses = [row.status for row in rows]
    assert statuses == ["ok", "ok", "failed", "failed", "ok"]
    again = uniform(wanted, known=rows)
    assert lengths_in(again) == in_tokens(4, 8)
    assert {row.status for row in again} == {"ok"}


def test_shuffle_permutes_what_comes_before_the_tokens_that_it_keeps():
    ids = np.arange(65)

    (probe,) = probes.of("shuffle:keep=20", 64, 8, 32)

    shuffled = probe.rewrite(ids)
    assert (shuffled[44:] == ids[44:]).all()
    assert (shuffled[:44] != ids[:44]).any()
    assert sorted(shuffled[:44]) == list(range(44))


def test_repeat_copies_the_targets_to_the_front_and_its_control_does_not():
    ids = np.arange(65)

    copied, control = probes.of("repeat", 64, 3, 32)

    assert copied.targets == 3
    assert control.targets == 3
    expected = [*range(61, 65), *range(4, 65)]
    assert copied.rewrite(ids).tolist() == expected
    assert control.rewrite is None


@pytest.mark.parametrize(("text", "length"), [("shuffle:keep=20", 20), ("repeat", 6)])
def test_a_window_without_room_has_no_probe(text, length):
    assert probes.of(text, length, 3, 32) == []


def test_options_of_a_probe_stand_in_the_rows_task(config):
    wanted = evaluation_with(config, probes=("shuffle:keep=32",), windowed=False)

    rows = rows_of(Planted(3 * L), periodic(3 * L), wanted)

    plain = {row.length: row for row in rows if row.protocol == "fixed_target"}
    shuffled = [row for row in rows if row.task == "shuffle:keep=32"]
    assert lengths_in(shuffled) == in_tokens(4, 8, 16)
    for row in shuffled:
        unshuffled = plain[row.length]
        assert row.targets_sha256 == unshuffled.targets_sha256
        assert row.nll > unshuffled.nll + 1


def offset_rows(config: Config, name: str) -> list[EvaluationRow]:
    wanted = fixed_target(config, probes=("offset",))
    rows = gpt_rows(name, wanted)
    return [row for row in rows if row.task == "offset"]


ENCODINGS = ("rope", "alibi", "none", "sinusoidal", "learned")


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_passage_is_moved_with_its_targets(config, name):
    rows = offset_rows(config, name)

    offsets = [row.offset or 0 for row in rows]
    digests = digests_of(rows, "task")
    digests.discard(None)
    assert offsets == in_tokens(0, 1, 3, 7, 15)
    assert lengths_of(rows) == {L}
    assert len(digests) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["rope", "alibi", "none"])
def test_a_passage_that_is_moved_costs_a_relative_scheme_nothing(config, name):
    rows = offset_rows(config, name)

    assert len(rows) == 5
    for row in rows:
        assert row.nll == pytest.approx(rows[0].nll, abs=1e-5)


def test_a_passage_that_is_moved_costs_absolute_positions_what_they_do(config):
    sinusoidal = [row.nll for row in offset_rows(config, "sinusoidal")]
    learned = [row.nll for row in offset_rows(config, "learned")]

    cost = max(sinusoidal) - min(sinusoidal)
    assert cost > 1e-4
    assert learned[1:] == [None, None, None, None]


def test_a_passage_is_read_from_0_on_though_1x_was_not_asked_for(config):
    far = fixed_target(config, probes=("offset",), ratios=(2.0, 4.0))

    rows = gpt_rows("rope", far)

    offsets = [row.offset for row in rows if row.nll]
    assert offsets == [None, None, None, L, 3 * L]


def test_the_windowed_baseline_and_its_sinks_narrow_the_model(config):
    subject = Planted(None)
    wanted = fixed_target(config, windowed=True, sinks=4)

    rows_of(subject, TEXT, wanted)

    variants = {(variant.window, variant.sinks) for _, variant in subject.passes}
    narrowed = {length for length, variant in subject.passes if variant.window == L}
    assert variants == {(None, 0), (L, 0), (L, 4)}
    assert sorted(narrowed) == in_tokens(2, 4, 8, 16)


def test_the_windowed_baseline_and_its_sinks_have_rows_of_their_own(config):
    wanted = fixed_target(config, windowed=True, sinks=4)

    rows = uniform(wanted)

    sinks = of_kind(rows, "sinks")
    longer = in_tokens(2, 4, 8, 16)
    assert lengths_in(of_kind(rows, "windowed")) == longer
    assert lengths_in(sinks) == longer
    for row in sinks:
        assert row.window == L
        assert row.mean_context == L + 4
        assert row.extension_options == {"sinks": 4}


def test_a_run_trained_at_four_times_the_length_pairs_with_the_others_at_equal_lengths(
    config,
):
    rows = uniform(config)
    longer = Planted(None)
    longer.train_length = 4 * L

    wanted = evaluation_with(config, ratios=(1, 2, 4))

    others = rows_of(longer, TEXT, wanted)

    # of plain and windowed rows
    fixed = digests_of([*rows, *others], "fixed_target")
    nonoverlap = digests_of([*rows, *others], "nonoverlap")
    assert len(fixed) == 1
    assert len(nonoverlap) == 1
    assert fixed != nonoverlap
    assert lengths_of(others) == set(in_tokens(4, 8, 16))


def test_where_a_scheme_has_no_such_extension_rows_are_undefined(config):
    wanted = fixed_target(config, extensions=("pi", "pi:factor=4"))

    rows = rows_of(gpt(config, "none"), TEXT, wanted)

    for row in rows:
        expected = "undefined" if row.extension else "ok"
        assert row.status == expected


def test_an_extended_row_that_was_read_from_a_file_is_known(config):
    wanted = fixed_target(config, extensions=("pi", "pi:factor=4"))
    rows = gpt_rows("rope", wanted)
    known = []
    for row in rows:
        line = json.dumps(row.to_json())
        known.append(EvaluationRow.from_json(json.loads(line)))

    again = gpt_rows("rope", wanted, known)

    assert again == []


@pytest.fixture
def trained(tiny_config, tmp_path, tmp_path_factory) -> Trained:
    base = tmp_path_factory.getbasetemp() / "evaluated"
    text = {"path": str(base / "text.txt")}
    cache = {"cache": str(base / "cache")}
    config = changed(tiny_config, data=text, runtime=cache)
    if not base.exists():  # trained once for all tests of this process
        base.mkdir()
        write_words(base)
        train(config, base / "run", ["test"])
    shutil.copytree(base / "run", tmp_path / "run")
    return config, tmp_path / "run"


def test_a_finished_run_gets_every_protocol_and_probe(trained):
    config, folder = trained
    first = evaluation_rows(folder)
    words = ["protocol=fixed_target,nonoverlap", "probe=repeat,shuffle", "sinks=2"]

    evaluate_run(folder, apply(config, [*words, "extension=ntk"]))

    rows = evaluation_rows(folder)
    counts = collections.Counter((row.protocol, row.task) for row in rows)
    varied = 3 + 2 + 2 + 3  # plain, windowed, sinks, ntk
    assert rows[: len(first)] == first
    assert {row.status for row in rows} == {"ok"}
    assert counts["fixed_target", None] == varied
    assert counts["nonoverlap", None] == 3
    assert counts["task", "repeat"] == varied
    assert counts["task", "repeat_control"] == varied
    assert counts["task", "shuffle"] == 2 * 4
    assert len(counts) == 5


def test_a_finished_run_gets_only_what_is_missing(trained):
    config, folder = trained
    asked = apply(config, ["probe=repeat", "sinks=2", "extension=ntk"])
    evaluate_run(folder, asked)
    before = (folder / "rows.jsonl").read_bytes()

    evaluate_run(folder, asked)

    assert (folder / "rows.jsonl").read_bytes() == before


def test_a_run_whose_text_is_another_now_is_not_evaluated(trained):
    config, folder = trained
    before = (folder / "rows.jsonl").read_bytes()
    text = Path(str(config.data.path))
    original = text.read_text(encoding="utf-8")
    text.write_text(original + " more", encoding="utf-8")

    try:
        with pytest.raises(UserError, match="was trained on another text"):
            evaluate_run(folder, apply(config, ["length=96"]))
    finally:
        text.write_text(original, encoding="utf-8")

    assert (folder / "rows.jsonl").read_bytes() == before


def points_of(rows: Rows) -> set[Point]:
    """What rows with a number are about."""
    points = set()
    for row in rows:
        if row.measured:
            point = (row.protocol, row.length, row.window, row.extension, row.task)
            points.add(point)
    return points


def digests_of(rows: Rows, protocol: str) -> set[str | None]:
    return {row.targets_sha256 for row in rows if row.protocol == protocol}


def lengths_of(rows: Rows) -> set[int]:
    return {row.length for row in rows}


def curve_of(folder: Path) -> list[EvaluationRow]:
    """The rows that a reader of the run gets."""
    return evaluation_rows(folder)


def test_a_longer_length_gives_a_curve_on_one_set_of_targets(trained):
    config, folder = trained
    evaluate_run(folder, apply(config, ["extension=pi", "probe=repeat", "sinks=2"]))
    before = curve_of(folder)

    evaluate_run(folder, apply(config, ["length=128"]))

    curve = curve_of(folder)
    assert points_of(before) < points_of(curve)
    assert lengths_of(curve) == {16, 32, 64, 128}
    for protocol in ("fixed_target", "nonoverlap"):
        digests = digests_of(curve, protocol)
        assert len(digests) == 1
        assert digests != digests_of(before, protocol)
    of_task = digests_of(curve, "task")
    assert of_task.isdisjoint(digests_of(before, "task"))


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


def test_a_line_says_that_a_longer_length_gives_a_new_curve(trained, caplog):
    config, folder = trained
    caplog.set_level("INFO")

    evaluate_run(folder, apply(config, ["length=128"]))

    line = "a new curve, on other targets than the one so far"
    assert caplog.messages.count(line) == 1
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
    assert "a new curve" not in caplog.text


def test_shorter_lengths_asked_for_later_score_the_targets_of_the_longest(trained):
    config, folder = trained
    evaluate_run(folder, apply(config, ["length=128"]))
    curve = curve_of(folder)

    evaluate_run(folder, apply(config, ["length=32,96"]))

    added = [row for row in curve_of(folder) if row not in curve]
    assert lengths_of(added) == {96}
    assert digests_of(added, "fixed_target") == digests_of(curve, "fixed_target")


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM as soon as so many rows are written."""
    log = Run.log
    written = []

    def logged(run, row):
        log(run, row)
        written.append(row)
        if len(written) == count:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Run, "log", logged)


@pytest.mark.parametrize("n_rows", [1, 8, 9, 10])
def test_a_growth_that_stops_half_way_leads_to_no_third_targets(
    trained, monkeypatch, n_rows
):
    config, folder = trained
    longer = apply(config, ["ratio=6,8"])
    with monkeypatch.context() as patch:
        stop_after(n_rows, patch)
        with pytest.raises(Stopped):
            evaluate_run(folder, longer)
    evaluate_run(folder, config)  # the former command, repeated
    evaluate_run(folder, longer)

    rows = every_row(folder)
    assert len(digests_of(rows, "fixed_target")) == 2
    curve = of_kind(curve_of(folder), PLAIN)
    assert lengths_of(curve) == {16, 32, 64, 96, 128}


def test_an_extension_after_a_longer_length_has_all_lengths_of_the_curve(trained):
    config, folder = trained
    evaluate_run(folder, apply(config, ["ratio=8"]))
    with_lengths = evaluated_config(folder, [])
    assert with_lengths.evaluation.ratios == (1, 2, 4, 8)

    evaluate_run(folder, evaluated_config(folder, ["extension=pi"]))

    extended = of_kind(curve_of(folder), "pi")
    assert lengths_in(extended) == [16, 32, 64, 128]
    for row in extended:
        assert row.extension_options
    curves = compare.curves(compare.Losses.of(read([folder])))
    by_point = curves.set_index(["variant", "length"])
    assert by_point.loc[("pi", 128), "rise"] != 0


@pytest.fixture
def two(trained: Trained) -> list[Path]:
    """The folders of a study of two runs."""
    _, folder = trained
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    return [folder, other]


def main_rows_of(folders: list[Path]) -> pd.DataFrame:
    """The rows that are compared, as if copies of a run were other seeds."""
    return compare.main_rows(read(folders).assign(repeated=False))


def test_a_study_grows_with_its_runs(two, capsys):
    evaluate_runs(
        {run: evaluated_config(run, ["ratio=8"]) for run in two}, print_results
    )

    rows = main_rows_of(two)
    assert set(rows["run"]) == {"run", "other"}
    assert set(rows["length"]) == {16, 32, 64, 128}
    assert rows["targets_sha256"].nunique() == 1
    assert "not shown" not in capsys.readouterr().out


def test_a_run_that_is_not_done_does_not_hold_its_study_back(two):
    grown, other = two
    evaluate_runs({grown: evaluated_config(grown, ["ratio=8"])}, print)
    digests = digests_of(curve_of(grown), "fixed_target")
    change_record(other, status="failed")

    rows = main_rows_of(two)
    assert set(rows["run"]) == {"run"}
    assert set(rows["targets_sha256"]) == digests


def test_a_further_run_takes_no_length_from_a_study_that_has_grown(two):
    further = two[0].with_name("further")
    shutil.copytree(two[0], further)
    evaluate_runs({run: evaluated_config(run, ["ratio=8"]) for run in two}, print)

    rows = main_rows_of([*two, further])

    assert set(rows["run"]) == {"run", "other"}
    assert set(rows["length"]) == {16, 32, 64, 128}


def test_a_stop_after_any_row_leaves_a_whole_curve(trained):
    config, folder = trained
    evaluate_run(folder, apply(config, ["extension=pi", "probe=repeat"]))
    path = folder / "rows.jsonl"
    before = path.read_text(encoding="utf-8").splitlines(keepends=True)
    former = points_of(curve_of(folder))
    evaluate_run(folder, apply(config, ["ratio=8"]))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)

    for end in range(len(before), len(lines) + 1):
        path.write_text("".join(lines[:end]), encoding="utf-8")
        curve = curve_of(folder)
        assert former <= points_of(curve), end
        for protocol in ("fixed_target", "nonoverlap"):
            assert len(digests_of(curve, protocol)) == 1, end
    assert lengths_of(of_kind(curve, PLAIN)) == {16, 32, 64, 128}
    assert lengths_of(of_kind(curve, "pi")) == {16, 32, 64}


def test_an_evaluation_that_was_stopped_is_finished_later(trained, monkeypatch):
    config, folder = trained
    asked = apply(config, ["ratio=8"])
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(Stopped):
            evaluate_run(folder, asked)
    stopped = every_row(folder)

    evaluate_run(folder, asked)

    finished = curve_of(folder)
    assert every_row(folder)[: len(stopped)] == stopped
    assert lengths_of(finished) == {16, 32, 64, 128}
    assert len(digests_of(finished, "fixed_target")) == 1
    assert len(digests_of(finished, "nonoverlap")) == 1


def test_a_precision_that_is_named_replaces_rows_of_another(trained):
    config, folder = trained
    first = evaluation_rows(folder)

    evaluate_run(folder, apply(config, ["precision=bf16"]))

    half = evaluation_rows(folder)
    changes = []
    for row, other in zip(half, first, strict=True):
        assert row.dtype == "bf16"
        assert row.key == other.key
        changes.append(abs(row.nll - other.nll))
    assert 0 < max(changes) < 0.02


def test_a_record_without_an_attempt_leaves_the_precision_to_the_configuration(trained):
    config, folder = trained
    change_record(folder, attempt={})

    evaluate_run(folder, apply(config, ["length=48"]))

    assert {row.dtype for row in curve_of(folder)} == {"fp32"}


def test_the_precision_auto_takes_the_rows_that_are_there(trained):
    config, folder = trained
    evaluate_run(folder, apply(config, ["precision=bf16"]))
    half = evaluation_rows(folder)

    evaluate_run(folder, apply(config, []))

    assert evaluation_rows(folder) == half


def test_an_evaluation_that_ends_early_keeps_its_rows(trained, monkeypatch):
    config, folder = trained
    first = evaluation_rows(folder)
    words = ["length=24,40,48", "protocol=fixed_target", "windowed=false"]
    stop_after(2, monkeypatch)

    with pytest.raises(Stopped):
        evaluate_run(folder, apply(config, words))

    added = evaluation_rows(folder)[len(first) :]
    assert lengths_in(added) == [24, 40]
    # since that is what became of its training
    assert load_record(folder).status == "done"


def test_an_unfinished_run_is_to_be_continued_before_it_is_evaluated(trained):
    config, folder = trained
    shutil.rmtree(folder / "checkpoint" / "step-00000012")
    expected = "is not finished, 10 of 12 updates are made: go on with 'test' first"

    with pytest.raises(UserError, match=expected):
        evaluate_run(folder, config)
