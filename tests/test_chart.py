"""The curve in the terminal: what it says, and that it fits."""

import itertools
import json
import pathlib
from typing import Any

import pytest
import yaml

from posbench.config.schema import Config, to_container
from posbench.evaluation import curve

LENGTHS = [16, 32, 64, 128, 256, 512, 1024]


def row(length: int, nll: float | None, **more: Any) -> dict[str, Any]:
    status = "ok" if nll is not None else "undefined"
    return {
        "protocol": "fixed_target", "length": length, "length_ratio": length / 16, "window": None, "extension": None,
        "task": None, "split": "test", "documents": "doc", "checkpoint_step": 1, "status": status, "reason": None,
        "stride": None, "nll": nll, "ci_low": nll and nll - 0.1, "ci_high": nll and nll + 0.1,
        "perplexity": nll and 2.718281828**nll, "bits_per_byte": nll and nll / 2, **more,
    }  # fmt: skip


@pytest.fixture
def draw(tiny_config: Config, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Any:
    def drawn(rows: list[dict[str, Any]], width: int = 80, split: str | None = None) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_container(tiny_config)), encoding="utf-8")
        lines = "".join(json.dumps(one) + "\n" for one in rows)
        (tmp_path / "evaluation.jsonl").write_text(lines, encoding="utf-8")
        curve.print_curves(tmp_path, split)
        return capsys.readouterr().out

    return drawn


def test_the_numbers_stand_in_the_table_and_the_curve_rises_with_them(draw: Any) -> None:
    out = draw([row(16, 4.0), row(32, 4.5), row(64, 5.0)])
    assert "16 (1x)" in out and "64 (4x)" in out and "148.41" in out  # perplexity at 64
    marks = [line for line in out.splitlines() if "●" in line and "│" in line]
    assert [line.index("●") for line in marks] == sorted((line.index("●") for line in marks), reverse=True)
    assert marks[0].strip().startswith("5.00 ") and marks[-1].strip().startswith("4.00 ")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_every_line_fits_the_console_and_the_chart_fills_it(draw: Any, width: int) -> None:
    rows = [row(length, 4.0 + index / 10) for index, length in enumerate(LENGTHS)]
    rows += [row(length, 4.0, window=16) for length in LENGTHS[1:]]
    rows += [row(length, 4.1, protocol="nonoverlap") for length in LENGTHS]
    rows += [row(length, 4.1, extension="yarn") for length in LENGTHS]
    lines = draw(rows, width).splitlines()
    assert max(len(line.rstrip()) for line in lines if not line.startswith("Run folder")) <= width
    axis = next(line for line in lines if line.split()[:1] == ["16"] and line.split()[-1] == "1024" and "." not in line)
    assert len(axis) == width  # the lengths stand on one line, under their marks
    chart = [line for line in lines if line[8:9] == "│"]
    assert max(len(line.rstrip()) for line in chart) == width - len("1024") + 1
    highest = next(line for line in chart if "●" in line)
    assert highest.rstrip()[-1] == "●" and 4.6 <= float(chart[0][:7]) <= 5.0  # round numbers need some room


def test_every_length_stands_under_its_mark_and_those_without_room_are_left_out(draw: Any) -> None:
    lengths = [16 * n for n in range(1, 21)]
    lines = draw([row(length, 4.0 + length / 1000) for length in lengths], 40).splitlines()
    axis = next(line for line in lines if line.split()[:1] == ["16"] and "." not in line)
    shown = [int(word) for word in axis.split()]
    assert set(shown) < set(lengths) and len(shown) >= 4
    marks = sorted(at for line in lines if line[8:9] == "│" for at, sign in enumerate(line) if sign == "●")
    assert len(marks) == 20
    assert all(axis[marks[lengths.index(length)] :].startswith(str(length)) for length in shown)


def test_a_narrow_table_keeps_the_headline_and_loses_what_matters_least(draw: Any) -> None:
    rows = [row(length, 4.0) for length in LENGTHS] + [row(length, 4.0, window=16) for length in LENGTHS[1:]]

    def heads(width: int) -> list[str]:
        return next(line.split() for line in draw(rows, width).splitlines() if line.split()[:1] == ["context"])

    assert heads(80) == ["context", "nll", "95", "%", "perplexity", "bits/byte", "windowed"]  # nonoverlap: no value
    assert heads(60) == ["context", "nll", "95", "%", "perplexity", "windowed"]
    assert heads(30) == ["context", "nll"]


def test_a_scheme_that_a_ngram_model_beats_at_the_training_length_has_not_learned(draw: Any) -> None:
    out = draw([row(16, 16.123, ngram_nll=15.2, ngram_order=2), row(32, 14.0, ngram_nll=15.2)])
    told = "Not learned: 16.123 nats at 1x, an n-gram model of order 2 has 15.200 on the same targets."
    assert told in " ".join(out.split()) and out.count("earned") == 1
    other = [row(32, 6.0, ngram_nll=5.0), row(16, 6.0, ngram_nll=5.0, window=16)]
    for rows in ([row(16, 4.0, ngram_nll=5.0)], [row(16, 6.0)], [row(16, None, ngram_nll=5.0)], []):
        assert "learned" not in draw([*rows, *other])


def test_what_is_undefined_is_named_and_not_drawn(draw: Any) -> None:
    out = draw([row(16, 4.0), row(32, None), row(64, None)]).partition("Run folder")[0]
    assert out.count("undefined") == 2 and "│" not in out


def test_a_flat_curve_looks_flat(draw: Any) -> None:
    out = draw([row(length, 4.0 + 0.001 * index) for index, length in enumerate(LENGTHS)])
    assert len([line for line in out.splitlines() if "●" in line and "│" in line]) <= 2  # of 12: noise stays noise


def test_extensions_are_listed_below_the_curve(draw: Any) -> None:
    out = draw([row(16, 4.0), row(32, 4.5), row(16, 4.0, extension="yarn"), row(32, 4.2, extension="yarn")])
    (line,) = [line for line in out.splitlines() if line.strip().startswith("yarn")]
    assert line.split() == ["yarn", "4.000", "4.200"]


def test_two_splits_or_two_checkpoints_are_never_one_curve(draw: Any) -> None:
    rows = [row(16, 4.0, split="validation"), row(16, 4.1), row(32, 4.2), row(32, 4.3, checkpoint_step=0)]
    out = " ".join(draw(rows, split="validation").split())
    assert "on validation text" in out and "4.000" in out and "4.200" not in out and "4.300" not in out
    assert "Not in this curve: test text at step 0 (1 rows), test text at step 1 (2 rows)." in out
    out = draw(rows)
    assert "4.100" in out and "4.200" in out and "4.000" not in out and "4.300" not in out
    assert "validation text at step 1 (1 rows)" in " ".join(out.split())
    assert "Not in this curve" not in draw(rows[1:3])


def test_a_curve_of_a_run_that_is_not_finished_says_so(draw: Any) -> None:
    assert "Not finished: evaluated as it stood after step 5 of 12." in draw([row(16, 4.0, checkpoint_step=5)])
    assert "Not finished" not in draw([row(16, 4.0, checkpoint_step=12)])


def test_numbers_beside_the_chart_are_round(draw: Any) -> None:
    for least, most in ((95.768, 112.31), (3.2, 3.9), (4.0, 4.0), (0.2, 0.97)):
        lines = [line for line in draw([row(16, least), row(32, most)]).splitlines() if line[8:9] == "│"]
        numbers = [float(line[:7]) for line in lines if line[:7].strip()]
        steps = {round(above - below, 9) for above, below in itertools.pairwise(numbers)}
        assert len(steps) == 1 and f"{steps.pop():.3e}"[:4] in ("1.00", "2.00", "2.50", "5.00")
        assert numbers[-1] <= least and most <= numbers[0] and len(numbers) >= 3
