import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_study import (
    BLOCKS,
    RATIOS,
    SCHEMES,
    Truth,
    configured,
    group_of,
    groups_of,
    read_csv,
    read_rows,
    write_rows,
    write_run,
    write_study,
)
from support import posbench

from posbench import report
from posbench.config import plain_yaml, shipped
from posbench.config.identity import run_id
from posbench.config.schema import Config, StartConfig
from posbench.errors import UserError
from posbench.report import captions, figures, on_the_way, tables, text
from posbench.report.answer import answer
from posbench.report.comparison import claims, load, summary
from posbench.run_folder import finding

HOSTILE = "</script><img src=x onerror=alert(1)>|`=cmd()\x1b[2J\u202e\u2028$x^2$ \\input{x} [a](javascript:b)"


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    """Small pictures are drawn faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 30)
        yield


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "save", lambda group, summaries, folder: [])


@pytest.fixture(scope="module")
def study(template: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six schemes of five seeds, and a seventh of which one run diverged."""
    folder = write_study(tmp_path_factory.mktemp("outputs") / "fake", template)
    failed = {"reason": "diverged", "message": "loss is nan at step 12"}
    write_run(folder, configured(template, "fire", 0), None, "failed", **failed)
    for seed in range(1, 5):
        write_run(folder, configured(template, "fire", seed), Truth(3.67, 0.03))
    return folder


def by_label(group: load.Group) -> dict[str, summary.Summary]:
    return {one.scheme.label: one for one in summary.summarise(group)}


def summarised(*paths: Path) -> dict[str, summary.Summary]:
    return by_label(group_of(*paths))


@pytest.fixture(scope="module")
def group(study: Path) -> load.Group:
    return group_of(study)


@pytest.fixture(scope="module")
def found(group: load.Group) -> dict[str, summary.Summary]:
    return by_label(group)


def reported(folder: Path) -> str:
    """The Markdown of a report on a study."""
    report.main([folder])
    return (folder / "report" / "report.md").read_text()


# -- statistics of a study ---------------------------------------------------------------------------------------------


def test_intervals_hold_the_truth_that_the_runs_were_made_of(found: dict[str, summary.Summary]) -> None:
    for scheme in ("rope", "alibi", "none", "t5", "sinusoidal"):
        for point in found[scheme].plain.points:
            assert point.rise is not None
            truth = SCHEMES[scheme].rise * (point.ratio - 1 and {2: 1, 4: 2, 8: 3, 16: 4}[int(point.ratio)])
            # Twice the 95 % half width: of the 20 intervals here one is expected to miss at once its half width.
            half = point.rise.high - point.rise.low
            assert abs(point.rise.mean - truth) <= half + 1e-12, (scheme, point.ratio)


def test_verdicts_follow_from_the_two_primary_endpoints(found: dict[str, summary.Summary]) -> None:
    verdicts = {label: one.endpoints.verdict.text for label, one in found.items() if one.endpoints}
    assert verdicts["alibi"].startswith("rises less")
    assert verdicts["sinusoidal"] == "extrapolates worse; worse at 1x"
    assert verdicts["none"] == "rises less; worse at 1x"  # it holds better from a worse start: no praise for that
    assert verdicts["learned"] == "undefined at 4x"
    assert verdicts["fire"] == "4 seeds: no verdict"
    assert "rope" not in verdicts


def test_pairing_by_seed_and_text_removes_what_is_common(found: dict[str, summary.Summary]) -> None:
    rope = found["rope"]
    at_four = next(point for point in rope.plain.points if point.ratio == 4)
    assert at_four.rise is not None
    # The text's own spread, 1.1 nats a block, is in the level and not in the paired difference.
    assert rope.nll_of_checkpoints is not None and found["alibi"].endpoints is not None
    paired = found["alibi"].endpoints.rise
    assert paired is not None and rope.nll_of_checkpoints.error > 0.1 > 3 * paired.error


def test_reach_needs_every_shorter_length_to_hold(found: dict[str, summary.Summary]) -> None:
    assert found["rope"].reach == claims.Reach(64, longest_measured=False, breaks=128)
    assert found["learned"].reach == claims.Reach(64, longest_measured=False)  # undefined beyond
    assert found["alibi"].reach is not None and found["alibi"].reach.length >= 256


def test_distance_to_the_windowed_baseline_is_near_the_rise_since_that_is_flat(
    found: dict[str, summary.Summary],
) -> None:
    sinusoidal = found["sinusoidal"]
    assert sinusoidal.above_windowed is not None
    assert sinusoidal.above_windowed.mean == pytest.approx(4 * (0.34 - 0.002), abs=0.1)


def test_one_run_gets_intervals_over_documents_and_no_verdict(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"], "alibi": SCHEMES["alibi"]}, seeds=1)
    found = summarised(folder)
    point = next(point for point in found["rope"].plain.points if point.ratio == 4)
    assert point.rise is not None and point.band is None
    assert (point.rise.over, point.rise.units) == ("documents", BLOCKS)
    assert tables.signed(point.rise).text.endswith(tables.ONE)
    endpoints = found["alibi"].endpoints
    assert endpoints is not None and endpoints.rise is not None
    assert endpoints.verdict.text == "one checkpoint: no verdict"
    assert endpoints.rise.over == "documents" and endpoints.rise.high < 0  # paired by block, ALiBi rises less


@pytest.mark.sample(2)
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("a1" * 32, "b2" * 32, "Not all runs were scored on the same target tokens"),
        ('"dtype": "fp32"', '"dtype": "bf16"', "Evaluated in bf16, fp32: levels of different"),
    ],
    ids=["targets", "precision"],
)
def test_runs_on_other_targets_or_of_another_precision_are_not_paired(
    template: Config, tmp_path: Path, was: str, now: str, said: str
) -> None:
    folder = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"], "alibi": SCHEMES["alibi"]})
    for run in folder.glob("alibi-*"):
        for name in ("evaluation.jsonl", "evaluation_blocks.jsonl"):
            path = run / name
            path.write_text(path.read_text().replace(was, now))
    assert said in reported(folder)
    alibi = summarised(folder)["alibi"]
    assert alibi.endpoints is not None
    assert alibi.endpoints.verdict.text == "not paired with rope: no verdict"
    assert alibi.endpoints.nll is None


def test_what_has_not_learned_is_not_ranked(template: Config, tmp_path: Path) -> None:
    """Two models of 6.3 nats do not 'extrapolate better' for rising by less than nothing."""
    schemes = {
        "rope": Truth(4.0, 0.1, ngram=5.1),
        "alibi": Truth(4.01, 0.003, ngram=5.1),
        "none": Truth(6.3, -0.001, ngram=5.1),
    }
    group = group_of(write_study(tmp_path / "fake", template, schemes))
    found = by_label(group)
    assert list(found) == ["alibi", "rope", "none"]  # last, although it rises least
    verdicts = {label: one.endpoints.verdict for label, one in found.items() if one.endpoints}
    assert verdicts["none"].text == "not learned: not ranked" and verdicts["alibi"].beyond == "less"
    assert found["none"].endpoints is not None and found["none"].endpoints.rise_bounds is None  # nor is it tested
    said = " ".join(answer(group, list(found.values())))
    assert "Not ranked, since an n-gram model has no more nats at 1x (5.100): none (6.3" in said
    assert "none hold" not in said
    for table in tables.main_tables(group, list(found.values()))[:2]:
        at = table.columns.index("learned")
        assert {row[0].text: row[at].text for row in table.rows} == {"alibi": "yes", "rope": "yes", "none": "no"}
    assert [row[-1].text for row in table.rows if row[0].text == "none"] == [""]  # no reach
    unlearned = {**schemes, "rope": Truth(5.4, 0.1, ngram=5.1)}
    against = summarised(write_study(tmp_path / "other", template, unlearned))["alibi"].endpoints
    assert against is not None and against.verdict.text == "rope has not learned"


def test_where_it_is_not_resolved_whether_a_scheme_has_learned_nothing_is_claimed(
    template: Config, tmp_path: Path
) -> None:
    """The two numbers differ by less than other seeds and other documents would change them."""
    schemes = {name: Truth(nll, 0.0, ngram=4.2, paired=True) for name, nll in (("rope", 3.9), ("alibi", 4.2))}
    group = group_of(write_study(tmp_path / "fake", template, schemes))
    found = by_label(group)
    assert (found["rope"].learned, found["alibi"].learned) == ("yes", "not resolved")
    assert found["rope"].reach is not None and found["alibi"].reach is None
    alibi = found["alibi"].endpoints
    assert alibi is not None and alibi.verdict.text == "learned: not resolved, not ranked" and alibi.rise_bounds is None
    said = " ".join(answer(group, list(found.values())))
    assert "Not ranked, since at 1x they are not resolved from an n-gram model (4.200): alibi (4." in said


def test_a_difference_that_is_too_small_is_neither_better_nor_worse(template: Config, tmp_path: Path) -> None:
    schemes = {"rope": Truth(4.0, 0.1), "alibi": Truth(4.08, 0.05), "t5": Truth(4.0, 0.0)}
    for scheme, truth in schemes.items():
        for seed in range(5):
            write_run(tmp_path / "fake", configured(template, scheme, seed), truth, seed_sd=0.0001)
    group = group_of(tmp_path / "fake")

    def verdict(label: str, least: float) -> summary.Verdict:
        (endpoints,) = (one.endpoints for one in summary.summarise(group, least) if one.scheme.label == label)
        assert endpoints is not None
        return endpoints.verdict

    assert verdict("alibi", 0.02).text == "rises less; worse at 1x"
    assert verdict("alibi", 0.09).text == "rises less; not resolved at 1x"  # worse, by less than 0.09 as it seems
    assert verdict("alibi", 0.2).text == "not resolved at 4x; not resolved at 1x"
    assert verdict("t5", 0.02).text == "rises less; not resolved at 1x"


@pytest.mark.usefixtures("without_pictures")
def test_the_report_opens_with_the_answer_in_words(
    study: Path, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    markdown = (written / "report.md").read_text()
    opening = markdown.split("![")[0]
    assert "alibi hold" in opening and "learned is undefined beyond 64" in opening
    assert "none, t5, rope and sinusoidal break at 128 tokens" in opening and "does not hold" not in opening
    assert "rises less: alibi" in opening and "worse: " in opening and "Not resolved, which is not equal: " in opening
    assert "Fewer than 5 seeds, which speak for these checkpoints only: fire." in opening
    report.main([study], written.parent / "again", least=0.5)
    assert "at least 0.5 nats" in " ".join(capsys.readouterr().out.split())


def test_every_seed_counts_once_and_strides_splits_and_targets_never_mix(template: Config, tmp_path: Path) -> None:
    for seed in range(2):
        folder = write_run(tmp_path / "fake", configured(template, "rope", seed), SCHEMES["rope"])
        first = read_rows(folder / "evaluation.jsonl")[0]
        probe = first | {"protocol": "task", "nll": 1.0}
        other = first | {"protocol": "nonoverlap", "nll": 4.0 + seed, "targets_sha256": "c3" * 32}
        rows = [
            other, other | {"split": "validation", "nll": 9.0 + seed}, other | {"checkpoint_step": 6, "nll": 7.0},
            *(other | {"protocol": "sliding", "stride": stride, "nll": float(stride)} for stride in (8, 64)),
            probe | {"task": "repeat", "targets_sha256": f"d{seed}" * 32},
            *(probe | {"task": task} for task in ("shuffle:keep=16", "repeat_control", "mine_x")),
        ]  # fmt: skip
        write_rows(folder / "evaluation.jsonl", rows, "a")
    group = group_of(tmp_path / "fake")
    (table,) = [t for t in tables.more_tables(group, summary.summarise(group)) if t.title.startswith("Other protocols")]
    assert {row[1].text: row[2].text for row in table.rows} == {
        "nonoverlap": "4.500 ±0.707",
        "nonoverlap, validation": "9.500 ±0.707",
        "sliding, stride 8": "8.000 ±0.000",
        "sliding, stride 64": "64.000 ±0.000",
        "repeated text": "other targets per seed",
        "far tokens shuffled (keep=16)": "1.000 ±0.000",
        "repeated text, control without the copy": "1.000 ±0.000",
        "mine x": "1.000 ±0.000",
    }


@pytest.mark.usefixtures("without_pictures")
def test_levels_of_different_precision_are_not_subtracted(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"]}, seeds=1)
    for path in folder.glob("*/evaluation.jsonl"):
        path.write_text(path.read_text().replace('"dtype": "fp32"', '"dtype": "bf16"', 1))
    points = summarised(folder)["rope"].plain.points
    assert all(point.nll is not None for point in points) and points[2].rise is None
    assert "Evaluated in bf16, fp32: levels of different" in reported(folder)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("share", "judged"), [(0.375, True), (0.625, False)])
def test_where_one_document_has_half_of_the_targets_no_word_is_said(
    share: float, judged: bool, template: Config, tmp_path: Path
) -> None:
    folder = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"], "alibi": SCHEMES["alibi"]})
    for path in folder.glob("*/evaluation_blocks.jsonl"):
        lines = read_rows(path)
        write_rows(path, [line | ({"document": 0} if line["block"] < share * BLOCKS else {}) for line in lines])
    alibi, told = summarised(folder)["alibi"], reported(folder)
    assert alibi.endpoints is not None and (alibi.reach is not None) == judged
    why = f"one document has {share:.0%} of the targets: no verdict"
    assert (alibi.endpoints.verdict.text == why) == (alibi.endpoints.rise_bounds is None) == (not judged)
    assert ("ne document has" in told) == (not judged)
    assert any(word in told for word in ("holds to", "hold to", "rises less:")) == judged
    assert f"{share:.0%} of the targets behind each figure stand in one of" in told  # the numbers stay, with a warning


def test_a_number_that_was_not_finite_is_a_failed_cell_and_no_zero(template: Config, tmp_path: Path) -> None:
    folder = write_run(tmp_path, configured(template, "rope", 0), SCHEMES["rope"])
    rows = read_rows(folder / "evaluation.jsonl")
    rows[-2] |= {"nll": None}
    write_rows(folder / "evaluation.jsonl", rows)
    point = summarised(tmp_path)["rope"].plain.points[-1]
    assert (point.status, point.nll, point.rise) == ("failed", None, None)


# -- which runs are compared -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_runs_of_another_corpus_or_initialisation_are_a_set_of_their_own(
    template: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2 = dataclasses.replace(template, model=dataclasses.replace(template.model, init="gpt2"))
    other = {"name": "text", "sha256": "d1ff" * 16, "split": "document"}
    write_run(tmp_path / "fake", configured(template, "rope", 0), SCHEMES["rope"])
    write_run(tmp_path / "fake", configured(gpt2, "rope", 0), SCHEMES["rope"])
    write_run(tmp_path / "fake", configured(template, "alibi", 0), SCHEMES["alibi"], data=other)
    report.main([tmp_path / "fake"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 sets by data.sha256, model.init" in printed
    assert "model.init gpt2" in printed and "d1ff" in printed
    assert "Against rope" not in printed  # each set holds one scheme
    assert "No rope among these runs" in printed
    assert (tmp_path / "fake" / "report" / "set-2" / "curves.png").is_file()


def test_a_set_of_failed_runs_only_comes_last(template: Config, tmp_path: Path) -> None:
    gpt2 = dataclasses.replace(template, model=dataclasses.replace(template.model, init="gpt2"))
    for seed in range(3):
        write_run(tmp_path, configured(gpt2, "rope", seed), None, status="failed")
    write_run(tmp_path, configured(template, "rope", 0), SCHEMES["rope"])
    first, last = groups_of(tmp_path)
    assert [len(group.runs) for group in (first, last)] == [1, 3]


def test_a_run_that_failed_before_it_knew_its_corpus_is_counted_with_those_like_it(
    template: Config, tmp_path: Path
) -> None:
    write_run(tmp_path, configured(template, "rope", 0), None, "failed", reason="oom", data=None)
    write_run(tmp_path, configured(template, "rope", 1), SCHEMES["rope"])
    assert summarised(tmp_path)["rope"].outcomes == {"oom": 1, "done": 1}


def test_options_tell_schemes_of_one_name_apart(template: Config, tmp_path: Path) -> None:
    for base in (10000, 16, 1000):
        write_run(tmp_path, configured(template, "rope", 0, base=base), SCHEMES["rope"])
    group = group_of(tmp_path)
    assert [scheme.label for scheme in group.schemes] == ["rope base=1000", "rope base=10000", "rope base=16"]
    assert group.reference is not None and group.reference.label == "rope base=10000"


def test_of_several_variants_of_the_reference_the_one_with_most_seeds_is_taken_and_said(
    template: Config, tmp_path: Path
) -> None:
    folder = write_study(tmp_path / "fake", template, {name: SCHEMES[name] for name in ("rope", "alibi")})
    before = summarised(folder)["alibi"].endpoints
    faster = dataclasses.replace(template.training, learning_rate=1e-4)
    write_run(folder, dataclasses.replace(configured(template, "rope", 0), training=faster), SCHEMES["rope"])
    group = group_of(folder)
    assert group.reference is not None and len(group.reference.runs) == 5
    after = summarised(folder)["alibi"].endpoints
    assert before and after and after.verdict.text == before.verdict.text
    (note,) = [one for one in captions.notes_on_text(group) if "--reference" in one]
    assert note.startswith(f"The reference is '{group.reference.label}'; ") and "learning_rate=0.0001" in note


def test_a_run_that_lacks_what_verdicts_need_is_named(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, {name: SCHEMES[name] for name in ("rope", "alibi")})
    assert not any("Without a row" in note for note in captions.notes_on_text(group_of(folder)))
    path = next(folder.glob("rope-s4-*/evaluation.jsonl"))
    write_rows(path, [row for row in read_rows(path) if row["length_ratio"] != 4])
    (note,) = [one for one in captions.notes_on_text(group_of(folder)) if "Without a row" in one]
    assert note.startswith(f"Without a row at 4x, so without a part in verdicts: {path.parent.name}.")


def test_what_a_scheme_holds_to_is_the_longest_of_all_only_if_it_was_measured_there(
    template: Config, tmp_path: Path
) -> None:
    truths = {"alibi": Truth(3.66, -0.1), "t5": Truth(3.66, -0.1), "rope": Truth(3.66, 0.2)}
    folder = write_study(tmp_path / "fake", template, truths)
    for path in folder.glob("alibi-*/evaluation.jsonl"):
        write_rows(path, [row for row in read_rows(path) if row["length_ratio"] <= 4])
    group = group_of(folder)
    first = answer(group, summary.summarise(group))[0]
    assert "t5 holds to 1,024 tokens, 16 times the training length, the longest measured; alibi holds to 256 " in first
    assert "alibi holds to 256 tokens, 4 times the training length, not measured beyond;" in first


def test_a_length_that_one_seed_has_shortens_no_reach_and_changes_no_order(template: Config, tmp_path: Path) -> None:
    truths = {"alibi": Truth(3.66, 0.001, paired=True), "rope": Truth(3.66, 0.2, paired=True)}
    write_study(tmp_path, template, truths)
    for path in tmp_path.glob("*/evaluation.jsonl"):
        if not path.parent.name.startswith("alibi-s0"):
            write_rows(path, [row for row in read_rows(path) if row["length_ratio"] <= 4])
    found = summary.summarise(group_of(tmp_path))
    assert [one.scheme.label for one in found] == ["alibi", "rope"]
    assert found[0].reach == claims.Reach(4 * template.training.train_length, longest_measured=True)


def test_one_number_spelt_in_two_ways_is_one_scheme(template: Config, tmp_path: Path) -> None:
    for seed, base in enumerate((500000, 5e5)):
        write_run(tmp_path, configured(template, "rope", seed, base=base), SCHEMES["rope"])
    assert [(one.label, len(one.runs)) for one in group_of(tmp_path).schemes] == [("rope", 2)]


def test_runs_that_begin_from_others_are_told_apart_by_where_and_how_they_began(
    template: Config, tmp_path: Path
) -> None:
    budget = template.training.tokens

    def begun(encoding: str = "rope", tokens: int = budget // 2, warmup: int = 0) -> Config:
        start = StartConfig(f"outputs/x/{encoding}-s0-0123abcd", encoding, "t", "c", 0, 32, 8, 10, tokens, 0)
        training = dataclasses.replace(template.training, tokens=budget - tokens, warmup_tokens=warmup)
        return dataclasses.replace(configured(template, "ntk", 0), training=training, start=start)

    def labels(*configs: Config) -> list[str]:
        study = tmp_path / str(len(list(tmp_path.iterdir())))
        for config in configs:
            write_run(study, config, SCHEMES["rope"])
        return [one.label for one in group_of(study).schemes]

    whole = configured(
        dataclasses.replace(template, training=dataclasses.replace(template.training, warmup_tokens=0)), "ntk", 0
    )
    assert labels(begun(), begun("yarn")) == ["ntk start.encoding=rope", "ntk start.encoding=yarn"]
    assert labels(begun(), begun(warmup=64)) == ["ntk start.warmup_tokens=0", "ntk start.warmup_tokens=64"]
    assert labels(whole, begun()) == ["ntk", "ntk start=32"]
    tokens = [f"ntk start=32 start.tokens={each}" for each in (budget // 2, budget // 4)]
    assert sorted(labels(whole, begun(), begun(tokens=budget // 4))) == sorted(["ntk", *tokens])


def test_a_pattern_of_layers_has_its_name_in_tables(template: Config, tmp_path: Path) -> None:
    pattern = plain_yaml.load(shipped.nested("encoding")["layered/gemma3"])
    for layers in (pattern["layers"], [{"name": "rope"}]):
        write_run(tmp_path, configured(template, "layered", 0, layers=layers), SCHEMES["rope"])
    assert [one.label for one in group_of(tmp_path).schemes] == ['layered layers=[{"name": "rope"}]', "layered/gemma3"]


def test_an_option_that_is_off_is_not_spelt_out(template: Config, tmp_path: Path) -> None:
    plain = configured(template, "alibi", 0)
    attention = dataclasses.replace(plain.model.attention, window=16, sinks=4)
    narrow = dataclasses.replace(plain, model=dataclasses.replace(plain.model, attention=attention))
    for one in (plain, narrow):
        write_run(tmp_path, one, SCHEMES["alibi"])
    assert [scheme.label for scheme in group_of(tmp_path).schemes] == ["alibi", "alibi sinks=4 window=16"]


@pytest.mark.usefixtures("without_pictures")
def test_the_same_run_in_two_folders_counts_once(
    template: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = [tmp_path / name / "fake" for name in ("one", "two")]
    for study in studies:
        write_run(study, configured(template, "rope", 0), SCHEMES["rope"])
    write_run(studies[1], configured(template, "rope", 1), SCHEMES["rope"])
    report.main(studies)
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 runs: 2 done" in printed and "repeats a run" in printed
    assert (tmp_path / "report" / "index.html").is_file()  # in the folder above both


@pytest.mark.usefixtures("without_pictures")
def test_runs_of_several_versions_of_an_own_encoding_are_told(template: Config, tmp_path: Path) -> None:
    for seed, digest in enumerate(["a" * 64, "a" * 64, "b" * 64, None]):  # None: of before this was recorded
        trained = {"installed_encodings": {"alibi": digest}} if digest else {}
        write_run(tmp_path / "fake", configured(template, "alibi", seed), SCHEMES["alibi"], **trained)
    runs = [load.read(folder) for folder in finding.run_folders([tmp_path])]
    assert load.mixed_code([run for run in runs if run.seed != 2]) == []
    (told,) = load.mixed_code(runs)
    assert told.startswith("'alibi' was trained with 2 versions of its file, ")
    assert re.search("2 runs of sha256 aaaaaaaaaaaa, as alibi-s0-.*; 1 run of sha256 bbbbbbbbbbbb, as alibi-s2-", told)
    assert text.markdown(told) in reported(tmp_path / "fake")


def test_folders_moved_aside_and_what_tuning_tried_are_left_out(template: Config, tmp_path: Path) -> None:
    kept = write_run(tmp_path / "fake", configured(template, "rope", 0), SCHEMES["rope"])
    aside = write_run(tmp_path / "fake", configured(template, "rope", 1), SCHEMES["rope"])
    aside.rename(aside.with_name(f"{aside.name}.old-1"))
    write_run(tmp_path / "fake" / "tuning", configured(template, "rope", 2), SCHEMES["rope"])
    for named in (tmp_path / "fake", tmp_path, kept, tmp_path / "fake" / "rope-*", Path(f"{tmp_path}/*/rope-s0*")):
        assert finding.run_folders([named]) == [kept]


def test_a_path_without_runs_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("report", str(tmp_path / "nowhere")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "does not exist" in error
    with pytest.raises(UserError, match="no run folder in"):
        report.main([tmp_path])


@pytest.mark.usefixtures("without_pictures")
def test_an_unreadable_run_is_named_and_the_rest_goes_on(
    template: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, configured(template, "rope", 0), SCHEMES["rope"])
    broken = write_run(tmp_path, configured(template, "rope", 1), SCHEMES["rope"])
    (broken / "run.json").write_text("{")
    report.main([tmp_path])
    printed = "".join(capsys.readouterr().out.split())
    assert "Leftout,unreadable" in printed and broken.name in printed


def test_cells_that_a_sweep_lost_are_named(template: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path, configured(template, "rope", 0), SCHEMES["rope"])
    levels = [{"id": run.name, "status": "done"}, {"id": "alibi-s0-00000000", "status": "failed", "reason": "oom"}]
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": levels}))
    assert load.failures([load.read(run)]) == [load.Failure("oom, without a run folder", "", ["alibi-s0-00000000"])]


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    report.main([study], out)
    return out


@pytest.mark.full
def test_all_files_are_written_into_the_study_unless_told_otherwise(template: Config, tmp_path: Path) -> None:
    write_run(tmp_path / "fake", configured(template, "rope", 0), SCHEMES["rope"])
    report.main([tmp_path / "fake"])
    names = {path.name for path in (tmp_path / "fake" / "report").iterdir()}
    expected = {"report.md", "runs.csv", "evaluation.csv", "table.tex", "index.html"}
    expected |= {"curves.png", "curves.svg", "curves.pdf"}
    assert names == expected
    report.main([tmp_path / "fake"])  # and again: what it wrote is not taken for runs


def test_no_run_is_missing_from_the_csv_files(written: Path) -> None:
    runs = read_csv(written / "runs.csv")
    assert len(runs) == 7 * 5
    assert [row["reason"] for row in runs if row["status"] == "failed"] == ["diverged"]
    rows = read_csv(written / "evaluation.csv")
    assert len(rows) == (7 * 5 - 1) * (2 * len(RATIOS) - 1)
    undefined = [row for row in rows if row["status"] == "undefined"]
    assert undefined and all(row["nll"] == "" for row in undefined)


def test_failed_runs_are_counted_and_named_in_the_report(written: Path) -> None:
    markdown = (written / "report.md").read_text()
    assert "35 runs: 34 done, 1 diverged" in markdown
    assert "loss is nan at step 12" in markdown
    assert "(1 of 5 runs not done)" in markdown
    assert re.search(r"\| fire \| 4 of 5 \|", markdown)


def test_the_caption_says_what_the_figures_rest_on(written: Path) -> None:
    markdown = (written / "report.md").read_text()
    for fact in (
        "c0ffee000000", "1,000,000 tokens", "seeds 0, 1, 2, 3, 4", f"{BLOCKS} blocks", "initialisation fan_in",
        "fixed_target", "nats per token", "bits per byte", "split test",
        f"{BLOCKS} documents, effectively {BLOCKS}.0 (doc)", "learning rate 0.006", "Command: posbench train",
    ):  # fmt: skip
        assert fact in markdown, fact
    assert "n.s." not in markdown


@pytest.mark.full
def test_the_same_runs_give_the_same_files(study: Path, written: Path, tmp_path: Path) -> None:
    report.main([study], tmp_path)
    for path in written.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_curves_of_the_pdf_are_lines_in_fonts_that_print(written: Path) -> None:
    pdf = (written / "curves.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-")
    assert b"/CIDFontType2" in pdf and b"/Type3" not in pdf and b"/Subtype /Image" not in pdf


def test_markdown_tables_have_as_many_cells_in_each_row(written: Path) -> None:
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", (written / "report.md").read_text(), re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_a_study_whose_runs_all_failed_still_has_its_report(template: Config, tmp_path: Path) -> None:
    write_run(tmp_path, configured(template, "rope", 0), None, "failed", reason="diverged")
    write_run(tmp_path, configured(template, "alibi", 0), None, "running")
    assert "2 runs: 1 died, 1 diverged" in reported(tmp_path)
    assert not (tmp_path / "report" / "curves.png").exists()


@pytest.mark.full
def test_a_study_without_the_training_length_has_levels_and_no_rises(template: Config, tmp_path: Path) -> None:
    for seed in range(5):
        run = write_run(tmp_path, configured(template, "rope", seed), SCHEMES["rope"])
        rows = read_rows(run / "evaluation.jsonl")
        write_rows(run / "evaluation.jsonl", [row for row in rows if row["length_ratio"] >= 2])
    report.main([tmp_path])
    rope = summarised(tmp_path)["rope"]
    assert rope.nll is None and rope.reach is None
    assert all(point.nll is not None and point.rise is None for point in rope.plain.points)


@pytest.mark.full
def test_an_extension_is_shown_as_a_change_on_the_same_targets(template: Config, tmp_path: Path) -> None:
    for seed in range(5):
        run = write_run(tmp_path, configured(template, "rope", seed), SCHEMES["rope"])
        for name in ("evaluation.jsonl", "evaluation_blocks.jsonl"):
            lines = read_rows(run / name)
            added = [line | {"extension": "yarn"} for line in lines if line["window"] is None]
            for line in added:
                for key in ("nll", "nll_sum"):
                    if key in line:
                        line[key] -= 0.1 * (line.get("n_tokens") if key == "nll_sum" else 1)
            write_rows(run / name, added, "a")
    assert "| rope | yarn | -0.100 ±0.000 |" in reported(tmp_path)


# -- names from strangers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(template: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "fake"
    other = {"sha256": HOSTILE, "split": HOSTILE}
    write_run(folder, configured(template, "rope", 0, layout=HOSTILE), SCHEMES["rope"], command=HOSTILE, data=other)
    write_run(folder, configured(template, "rope", 1, layout="=half"), SCHEMES["rope"], data=other, command="=1+1")
    write_run(folder, configured(template, "alibi", 1), None, "failed", reason=HOSTILE, message=HOSTILE, data=other)
    return folder


@pytest.fixture(scope="module")
def printed(hostile: Path) -> str:
    """What a report of hostile runs prints; its files are beside them."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        report.main([hostile])
    return out.getvalue()


def test_hostile_names_reach_the_terminal_spelt_out(printed: str) -> None:
    assert not {"\x1b", "\u202e", "\u2028"} & set(printed)
    assert "\\x1b[2J" in "".join(printed.split())


def test_hostile_names_stay_text_in_markdown(hostile: Path, printed: str) -> None:
    markdown = (hostile / "report" / "report.md").read_text()
    assert "<img" not in markdown and "&lt;img" in markdown
    assert re.search(r"(?<!\\)\]\(javascript", markdown) is None


def test_hostile_names_stay_text_on_the_page_which_asks_for_nothing(hostile: Path, printed: str) -> None:
    html = (hostile / "report" / "index.html").read_text()
    assert html.count("<script") == html.count("</script>") == 1
    assert re.findall("<img ([^ ]*)", html) == ['alt="Curves']
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and policy[1].startswith("default-src 'none'; ")


@pytest.mark.full
def test_what_was_measured_on_the_way_is_a_table_over_tokens(template: Config, tmp_path: Path) -> None:
    """rope begins to read at two million tokens, none never does and has not learned at first."""
    reads = Truth(3.2, 0.3, used=48, earlier=(Truth(3.9, 0.1, used=16), Truth(3.4, 0.2, used=40)))
    blind = Truth(3.6, 0.1, used=16, ngram=3.7, earlier=(Truth(4.1, 0.0, used=16, ngram=3.7), Truth(3.8, 0.1, used=16)))
    folder = write_study(tmp_path / "fake", template, {"rope": reads, "none": blind}, seeds=2)
    report.main([folder])
    group = group_of(folder)
    summaries = summary.summarise(group)
    (over,) = on_the_way.over_training(group, summaries)
    rows = {(row[0].text, row[1].text): [value.text for value in row[2:]] for row in over.rows}
    assert list(rows) == [(name, f"{n}M") for name in ("none", "rope") for n in (1, 2, 3)]
    assert float(rows["rope", "1M"][2]) == pytest.approx(3.9, abs=0.05) and rows["none", "1M"][1] == "0/2"
    assert {one.label: [rows[one.label, f"{n}M"][4] for n in (1, 2, 3)] for one in group.schemes}["none"][0] == ""
    page = (folder / "report" / "index.html").read_text()
    assert "Over training" in page and "Over training" in (folder / "report" / "report.md").read_text()


def test_only_what_a_viewer_needs_of_a_hostile_name_is_in_the_svg(hostile: Path, printed: str) -> None:
    svg = (hostile / "report" / "curves.svg").read_text()
    assert "<img" not in svg and "<script" not in svg and "&lt;img" in svg


def test_a_table_without_unicode_is_still_readable(group: load.Group, found: dict[str, summary.Summary]) -> None:
    from rich.console import Console

    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    console = Console(file=out, markup=False, width=120)
    for table in tables.main_tables(group, list(found.values())):
        text.print_table(console, table)  # would raise on a character that ASCII lacks
    out.flush()
    assert b"+-" in out.buffer.getvalue()  # type: ignore[attr-defined]


def printed_at(width: int, table: tables.Table) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    text.print_table(console, table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.sample(3)
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_narrow_terminal_leaves_columns_out_and_cuts_no_number(
    found: dict[str, summary.Summary], group: load.Group, width: int
) -> None:
    for table in tables.main_tables(group, list(found.values())):
        printed = printed_at(width, table)
        assert max(map(len, printed.splitlines())) <= width
        left_out = " ".join(printed.partition("No room here for ")[2].split()).partition(": see")[0].split(", ")
        for column, name in enumerate(table.columns):
            values = [row[column].text for row in table.rows if row[column].number is not None]
            assert name in left_out or {word for value in values for word in value.split()} <= set(printed.split())
        assert not {"scheme", "nll", "4x", "rise at 4x", "verdict", "reach"} & set(left_out)
        assert width <= 120 or left_out == [""]


def test_the_least_important_columns_go_first(found: dict[str, summary.Summary], group: load.Group) -> None:
    table = tables.main_tables(group, list(found.values()))[0]
    left_out = [printed_at(width, table).partition("No room here for ")[2] for width in (120, 92, 40)]
    assert left_out[0] == "" and left_out[1] == "SE text: see report.md.\n"
    assert "tokens/s" in left_out[2] and "nll" not in left_out[2]


def test_columns_that_hold_nothing_are_left_out_everywhere(template: Config, tmp_path: Path) -> None:
    write_run(tmp_path / "one", configured(template, "rope", 0), SCHEMES["rope"])
    (one,) = summarised(tmp_path / "one").values()
    group = group_of(tmp_path / "one")
    columns = tables.main_tables(group, [one])[0].columns
    assert "nll" in columns and not {"SD seeds", "learned"} & set(columns)  # of one seed, and without a ngram model


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_pictures")
def test_the_command_writes_where_it_is_told(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    assert posbench("report", str(study / "rope-*"), str(study / "alibi-*"), "--out", str(out)) == 0
    assert "Command: posbench train" in (out / "report.md").read_text()
    assert len(read_csv(out / "runs.csv")) == 10


@pytest.mark.usefixtures("without_pictures")
def test_a_folder_that_cannot_be_written_is_one_clear_line(study: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write into"):
        report.main([study], tmp_path / "file")


@pytest.mark.usefixtures("without_pictures")
def test_each_set_names_the_command_that_its_own_runs_were_started_with(template: Config, tmp_path: Path) -> None:
    """A study that was swept twice, with other budgets."""
    folder, cells = tmp_path / "fake", []
    for tokens in (1000000, 400000):
        training = dataclasses.replace(template.training, tokens=tokens)
        for scheme in ("rope", "alibi"):
            config = configured(dataclasses.replace(template, training=training), scheme, 0)
            run = write_run(folder, config, SCHEMES[scheme], command=f"posbench train encoding={scheme}")
            cells.append({"id": run.name, "status": "done", "command": f"posbench sweep training.tokens={tokens}"})
    (folder / "sweep.json").write_text(json.dumps({"command": cells[-1]["command"], "cells": cells}))
    sets = re.split("^## ", reported(folder), flags=re.MULTILINE)[1:]
    found = {re.findall("training.tokens ([0-9]+)", one)[0]: re.findall("Command: (.*)", one) for one in sets}
    assert found == {f"{tokens}": [f"posbench sweep training.tokens={tokens}."] for tokens in (1000000, 400000)}
    for cell in cells:
        del cell["command"]  # as earlier versions wrote it
    (folder / "sweep.json").write_text(json.dumps({"command": "posbench sweep", "cells": cells}))
    assert "Command: posbench sweep" not in reported(folder)


@pytest.mark.usefixtures("without_pictures")
def test_another_reference_can_be_asked_for(template: Config, tmp_path: Path) -> None:
    schemes = {name: SCHEMES[name] for name in ("rope", "alibi", "none")}
    folder = write_study(tmp_path / "fake", template, schemes, seeds=2)
    out = tmp_path / "out"
    assert (
        posbench("report", str(folder), "--reference", "alibi", "--columns", "against_nll_1x", "--out", str(out)) == 0
    )
    markdown, latex = (out / "report.md").read_text(), (out / "table.tex").read_text()
    assert "### Against alibi: the two primary endpoints" in markdown and "Against rope" not in markdown
    assert "nll vs. alibi" in latex and "against alibi" in latex and "vs. rope" not in latex
    with pytest.raises(UserError, match=r"no scheme is called 'alibbi': expected one of alibi, none, rope$"):
        report.main([folder], out, reference="alibbi")
    report.main([folder], out)
    assert "### Against rope" in (out / "report.md").read_text()


@pytest.mark.usefixtures("without_pictures")
def test_equal_failures_are_one_line_at_the_end(
    template: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"]}, seeds=2)
    for seed in range(6):
        config = configured(template, "alibi", seed)
        message = f"no memory in {run_id(config)}:\n" + "\n".join(f"line {number}" for number in range(8))
        write_run(folder, config, None, "failed", reason="oom", message=message)
    report.main([folder])
    printed = capsys.readouterr().out
    assert printed.count("line 7") == 1 and "6 runs: oom: no memory in RUN:" in printed
    assert printed.index("Beyond the training length") < printed.index("line 7")
    markdown = (folder / "report" / "report.md").read_text()
    assert markdown.count("line 7") == 1 and markdown.index("### Beyond") < markdown.index("| 6 runs | oom |")
    (row,) = [line for line in markdown.splitlines() if line.startswith("| 6 runs")]
    assert row.count("alibi-s") == 6
    assert (folder / "report" / "index.html").read_text().partition("Every run")[0].count("line 7") == 1


def test_a_scheme_of_which_no_run_is_done_is_last(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, {"rope": Truth(6.0, 0.1, ngram=5.0)}, seeds=1)
    write_run(folder, configured(template, "alibi", 0), None, "failed", reason="oom", message="")
    assert list(summarised(folder)) == ["rope", "alibi"]


@pytest.mark.full
@pytest.mark.usefixtures("without_pictures")
def test_captions_and_notes_explain_only_the_marks_that_are_there(template: Config, tmp_path: Path) -> None:
    def said(name: str, schemes: dict[str, Truth], seeds: int) -> str:
        folder = write_study(tmp_path / name, template, schemes, seeds)
        return reported(folder)

    one = said("one", {"rope": Truth(3.7, 0.1)}, 1)
    assert "of rises of a single run" in one and "‡ one checkpoint" in one and "Dashed: attention narrowed" in one
    for mark in (
        "grey",
        "of levels over seeds",
        "† fewer",
        "≥ where nothing",
    ):
        assert mark not in one, mark
    names = ("alibi", "t5", "fox", "none", "sinusoidal", "index", "sine", "rope")
    many = said("many", {name: Truth(3.7, 0.0) for name in names} | {"learned": Truth(3.7, 0.0, 1)}, 2)
    for mark in ("grey, in the picture", "of levels over seeds", "† fewer"):
        assert mark in many, mark
    assert "‡ one checkpoint" not in many


def test_right_answers_to_probes_stand_beside_their_floors(template: Config, tmp_path: Path) -> None:
    for seed, right in ((0, 0.5), (1, 0.7)):
        run = write_run(tmp_path / "fake", configured(template, "rope", seed), SCHEMES["rope"])
        first = read_rows(run / "evaluation.jsonl")[0]
        shares = {"accuracy": right, "chance": 0.1, "trivial": 0.25, "exact_match": right / 2, "n_blocks": 128}
        row = {**first, **shares, "protocol": "task", "task": "multi_key:keys=4", "targets_sha256": "e5" * 32}
        earlier = {**row, "task": "passkey", "trivial": None, "exact_match": None}
        write_rows(run / "evaluation.jsonl", [row, earlier], "a")
    group = group_of(tmp_path / "fake")
    (table,) = [
        t for t in tables.more_tables(group, summary.summarise(group)) if t.title == "Right answers to probes, %"
    ]
    assert table.columns[:5] == ["scheme", "probe", "by chance", "trivial", "1x"]
    assert [[cell.text for cell in row[1:5]] for row in table.rows] == [
        ["key to recall", "10.0", "", "60.0 ±14.1"],
        ["one of several keys to recall (keys=4)", "10.0", "25.0", "60.0 ±14.1"],
        ["one of several keys to recall (keys=4), greedy", "", "", "30.0 ±7.1"],
    ]
