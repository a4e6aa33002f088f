"""What a report lacks for verdicts, and the command that supplies it."""

import os
import shlex
import socket
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import support
from fake_study import (
    Truth,
    configured,
    demo_config,
    rows_of_study,
    write_run,
    write_study,
)

from posbench import machine
from posbench.reports.missing import (
    Missing,
    command_line,
    missing_on_text,
    time_needed,
)
from posbench.results.compare import compare
from posbench.results.frame import read
from posbench.run import speed, sweeps

SEEDS = Missing(["seeds"], {"seed": "0,1,2"})
LENGTHS = Missing(["lengths"], {"evaluation.ratios": "1,2,4"})
REFERENCE = Missing(["a reference"], reference="rope")
UNLEARNED = {"rope": Truth(3.6, 0.1, ngram=4.0), "none": Truth(4.4, 0.0, ngram=4.0)}


def swept(folder: Path, *words: str) -> pd.DataFrame:
    """Return a frame of one run, which a sweep with these words made."""
    run = folder / "run"
    sweeps.record([run], [*words], None)
    return pd.DataFrame({"folder": [str(run)]})


def parts_of(frame: pd.DataFrame) -> list[str]:
    return missing_on_text(frame, compare(frame)).parts


def test_a_command_has_the_words_of_the_sweep_with_other_seeds(tmp_path):
    frame = swept(tmp_path, "encoding=a,b", "seed=0", "ratio=1,2,4,8", "study=mine")

    line = command_line(frame, SEEDS)

    expected = "posbench sweep encoding=a,b seed=0,1,2 ratio=1,2,4,8 study=mine"
    assert line == expected


def test_a_command_can_be_pasted_into_a_shell(tmp_path):
    path = "data.path=my text's $HOME.txt"
    frame = swept(tmp_path, "encoding=a,b", path)

    line = command_line(frame, SEEDS)

    assert shlex.split(line)[3] == path


def test_a_command_keeps_the_folder_of_own_configurations(tmp_path):
    run = tmp_path / "run"
    sweeps.record([run], ["encoding=c"], Path("mine"))

    frame = pd.DataFrame({"folder": [str(run)]})
    line = command_line(frame, Missing())

    assert line == "posbench sweep encoding=c --config-dir=mine"


CHANGED = [
    ("ratio=1,2", LENGTHS, "encoding=a ratio=1,2,4"),
    ("length=16,32", LENGTHS, "encoding=a ratio=1,2,4"),
    ("seed=0", REFERENCE, "encoding=a,rope seed=0"),
    ("encoding=all", REFERENCE, "encoding=all"),
    ("encoding=[a,b]", REFERENCE, "encoding=a,b,rope"),
    ("encoding=a,rope", REFERENCE, "encoding=a,rope"),
    ("encoding.base=5", REFERENCE, ""),
    ("start=outputs/x/a-s0-1", SEEDS, ""),
]


@pytest.mark.parametrize(("word", "missing", "expected"), CHANGED)
def test_what_is_missing_takes_the_place_of_what_was_typed(
    tmp_path, word, missing, expected
):
    frame = swept(tmp_path, "encoding=a", word)

    line = command_line(frame, missing)

    assert line.removeprefix("posbench sweep ") == expected


def runs_of(folder: Path, *commands: str) -> pd.DataFrame:
    """Return a frame of a run for each command; the last word names its encoding."""
    runs = []
    for number, command in enumerate(commands):
        encoding = command.rpartition("=")[2]
        path = folder / str(number)
        run = {"folder": str(path), "command": command, "seed": 0}
        run["encoding"] = encoding
        runs.append(run)
    return pd.DataFrame(runs)


def test_runs_of_several_sweeps_that_differ_otherwise_have_no_command(tmp_path):
    frame = runs_of(
        tmp_path,
        "posbench train training.tokens=1e5 encoding=a",
        "posbench train training.tokens=2e5 encoding=b",
    )
    first, second = map(Path, frame["folder"])
    sweeps.record([first], ["training.tokens=1e5", "encoding=a"], None)
    sweeps.record([second], ["training.tokens=2e5", "encoding=b"], None)

    assert command_line(frame, SEEDS) == ""


def test_runs_of_several_commands_that_differ_in_encoding_and_seed_have_one(tmp_path):
    frame = runs_of(
        tmp_path,
        "posbench train 'data.path=my text' encoding=a",
        "posbench train 'data.path=my text' seed=1 encoding=b",
    )
    second = Path(frame["folder"][1])
    sweeps.record([second], ["seed=1", "encoding=b"], None)

    line = command_line(frame, Missing())

    assert line == "posbench sweep encoding=a,b seed=0,1 'data.path=my text'"


def test_one_run_without_a_sweep_has_a_command(tmp_path):
    frame = runs_of(tmp_path, "posbench train encoding=a")

    assert command_line(frame, SEEDS) == "posbench sweep encoding=a seed=0,1,2"


def test_runs_that_begin_from_others_have_no_command(tmp_path):
    frame = runs_of(
        tmp_path,
        "posbench train start=outputs/x/a-s0-1 encoding=a",
        "posbench train start=outputs/x/b-s0-1 encoding=b",
    )

    assert command_line(frame, SEEDS) == ""


@pytest.mark.parametrize("command", [None, ""])
def test_runs_without_a_command_have_none(tmp_path, command):
    """Trials of learning rates have an empty one."""
    frame = runs_of(tmp_path, "encoding=a").assign(command=command)

    assert command_line(frame, SEEDS) == ""


def test_a_reference_that_failed_is_to_do_once(tmp_path):
    study = write_study(tmp_path / "fake", {"none": UNLEARNED["none"]}, seeds=2)
    for seed in range(2):
        write_run(study, configured("rope", seed), None, "failed", reason="diverged")
    frame = read([study])

    assert time_needed(frame, REFERENCE).startswith("2 runs to do for this table.")


def test_seeds_and_tokens_are_one_command(tmp_path):
    study = write_study(tmp_path / "fake", UNLEARNED, seeds=2)
    runs = list(study.glob("*-s*"))
    sweeps.record(runs, ["encoding=none,rope", "seed=0,1"], None)
    frame = read([study])

    missing = missing_on_text(frame, compare(frame))

    tokens = 4 * demo_config().training.tokens
    words = f"encoding=none,rope seed=0,1,2,3,4 training.tokens={tokens}"
    assert missing.parts == ["seeds (2 of 5)", "tokens (4 times as many)"]
    assert command_line(frame, missing) == f"posbench sweep {words}"


def attempt_here() -> dict[str, Any]:
    """Return what the record of a demo that this machine trains says of its attempt."""
    device = machine.resolve("auto")
    dtype = machine.resolve_precision(demo_config().training.precision, device)
    return {
        "host": socket.gethostname(),
        "device": str(device),
        "dtype": machine.dtype_name(dtype),
        "processes": 1,
    }


def test_the_time_is_known_where_newer_runs_are_of_another_size(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "RECENT", 1)
    study = write_study(tmp_path / "fake", {"rope": UNLEARNED["rope"]}, seeds=1)
    (run,) = study.glob("*-s*")
    support.change_record(run, attempt=attempt_here())
    os.utime(run / "run.json", (0, 0))
    wider = support.changed(configured("rope", 0), model={"d_model": 256})
    write_run(study, wider, None, attempt=attempt_here(), tokens=64)

    assert "About 2 min" in time_needed(read([run]), SEEDS)


OTHERS = [{"device": "cuda:7"}, {"dtype": "fp16"}, {"processes": 2}, {"host": "other"}]


@pytest.mark.parametrize("other", OTHERS)
def test_runs_that_were_made_otherwise_say_no_time(tmp_path, other):
    study = write_study(tmp_path / "fake", {"rope": UNLEARNED["rope"]}, seeds=1)
    (run,) = study.glob("*-s*")
    support.change_record(run, attempt=attempt_here() | other)

    assert "How long is not known" in time_needed(read([run]), SEEDS)


def test_the_time_of_what_is_missing_is_that_of_runs_made_here(tmp_path):
    study = write_study(tmp_path / "fake", UNLEARNED, seeds=2)
    frame = read([study])
    kept = frame.assign(folder="kept/" + frame["run"])
    tokens = str(4 * demo_config().training.tokens)
    longer = Missing(["tokens"], {"seed": "0,1,2", "training.tokens": tokens})
    elsewhere = time_needed(frame, SEEDS)
    for run in study.glob("*-s*"):  # half are of none: 40 s, the others 44 s
        support.change_record(run, attempt=attempt_here())

    assert "How long is not known" in elsewhere
    assert time_needed(kept, SEEDS) == ""
    assert time_needed(frame, LENGTHS) == ""
    assert time_needed(frame, SEEDS).startswith(
        "2 runs to do for this table. About 2 min"
    )
    # 1,006 s
    assert time_needed(frame, longer).startswith(
        "6 runs to do for this table. About 17 min"
    )


def test_a_seed_that_failed_is_replaced_by_a_further_one(tmp_path):
    study = write_study(tmp_path / "fake", UNLEARNED, seeds=2)
    failed = configured("rope", 2)
    write_run(study, failed, None, "failed", reason="diverged")
    frame = read([study])

    missing = missing_on_text(frame, compare(frame))

    assert missing.changes["seed"] == "0,1,2,3,4,5"


def test_a_study_without_the_reference_or_long_contexts_lacks_them():
    six = rows_of_study("six_reader")
    learned = six[six["encoding"].isin(["rope", "alibi", "fox", "t5"])]
    others = learned[learned["encoding"] != "rope"]
    short = others[others["length_ratio"] <= 2]

    assert parts_of(learned) == []
    assert parts_of(others) == ["a reference (rope)"]
    assert parts_of(short) == ["a reference (rope)", "lengths (4x)"]


@pytest.mark.parametrize(("first", "in_common"), [(2, 3), (5, 0)])
def test_seeds_that_the_reference_has_not_are_none_for_a_verdict(
    tmp_path, first, in_common
):
    for seed in range(5):
        write_run(tmp_path, configured("rope", seed), Truth(3.6, 0.1))
        write_run(tmp_path, configured("alibi", first + seed), Truth(3.6, 0.1))
    frame = read([tmp_path])

    missing = missing_on_text(frame, compare(frame))

    assert missing.parts == [f"seeds ({in_common} of 5)"]
    all_seeds = ",".join(map(str, range(first + 5)))
    assert missing.changes == {"seed": all_seeds}
