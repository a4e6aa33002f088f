"""The curve in the terminal: what it says, and that it fits."""

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
