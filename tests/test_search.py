"""`extension=search`: the ranks of candidates, and what is said of the chosen one."""

import contextlib
import io
import re
from pathlib import Path

import hf_models
import pandas as pd
import pytest
from support import posbench

from posbench.huggingface.search import ranked

pytest.importorskip("transformers")
WORDS = ["data.path=text.txt", "targets=16", "blocks=16", "device=cpu", "threads=1"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> str:
    """What a search for a model of random weights prints."""
    folder = tmp_path_factory.mktemp("search")
    hf_models.save("llama", folder / "llama")
    hf_models.write_text(folder / "text.txt")
    asked = ["extension=search", "length=192", *WORDS]
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        assert posbench("evaluate", "./llama", *asked) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def ranking(shown) -> list[list[str]]:
    """The lines of the table of candidates, as words."""
    lines = re.findall(r"^(?:none|dynamic|\w+:factor=).*", shown, re.MULTILINE)
    return [line.split() for line in lines[:12]]


@pytest.mark.slow
def test_where_none_retrieves_candidates_are_ranked_by_loss(shown, ranking):
    """No token of this tokenizer is a digit."""
    assert "by loss: in passkey none" in shown
    losses = [float(words[1]) for words in ranking]
    assert losses == sorted(losses)
    assert len(losses) == 12


@pytest.mark.slow
def test_the_best_two_are_compared_on_validation_text(shown, ranking):
    best = ranking[0][0]
    second = ranking[1][0]
    compared = f"{best} less {second} at 192 tokens of validation text: "
    assert re.search(rf"^{compared}[-+].* segments\.$", shown, re.MULTILINE)


@pytest.mark.slow
def test_the_best_is_compared_with_the_plain_model_on_test_text(shown, ranking):
    assert "trained at 48 tokens" in shown
    is_plain = ranking[0][0] == "none"
    assert ("none at 48 tokens of test" in shown) is not is_plain
    assert ("None of these" in shown) is is_plain


ROWS = [
    {"extension": None, "protocol": "fixed_target", "nll": 1.0},
    {"extension": "pi", "protocol": "fixed_target", "nll": 1.1},
    {"extension": "yarn", "protocol": "fixed_target", "nll": 1.2},
    {"extension": None, "protocol": "task", "task": "passkey", "accuracy": 0.1},
    {"extension": "pi", "protocol": "task", "task": "passkey", "accuracy": 0.5},
    {"extension": "yarn", "protocol": "task", "task": "passkey", "accuracy": 0.4},
]


def frame_of(problems: int) -> pd.DataFrame:
    """Return the rows of a model at 192 tokens, its probe on so many problems."""
    frame = pd.DataFrame(ROWS)
    return frame.assign(
        variant="plain",
        length=192,
        length_ratio=4.0,
        unit_nll=None,
        unit_tokens=None,
        ci_over="",
        chance=0.1,
        n_blocks=problems,
        newest=True,
    )


TRIED = ["pi", "yarn", "none"]
ORDERS = [(100, ["pi", "none", "yarn"]), (5, ["none", "pi", "yarn"])]


@pytest.mark.parametrize(("problems", "order"), ORDERS)
def test_the_worse_rank_counts_where_one_beats_chance_else_the_loss(problems, order):
    """The share of right answers of `pi` is beyond chance in 100 problems, not in 5."""
    frame = frame_of(problems)
    ranks = ranked(frame, 192, TRIED)
    assert list(ranks["extension"]) == order


NO_CANDIDATES = [
    {"variant": "sinks", "extension": "sinks"},
    {"variant": "rerope", "extension": "rerope"},
    {"newest": False},
]


@pytest.mark.parametrize("changes", NO_CANDIDATES)
def test_what_was_not_tried_and_rows_on_other_targets_are_no_candidates(changes):
    frame = frame_of(100)
    others = frame.assign(nll=0.5, **changes)
    both = pd.concat([frame, others], ignore_index=True)

    ranks = ranked(both, 192, TRIED)

    expected = ranked(frame, 192, TRIED)
    pd.testing.assert_frame_equal(ranks, expected)


def test_who_lacks_the_probe_ranks_last_in_it():
    frame = frame_of(100)
    has_no_probe = (frame["extension"] == "yarn") & (frame["protocol"] == "task")
    frame.loc[frame["extension"] == "yarn", "nll"] = 0.5

    ranks = ranked(frame[~has_no_probe], 192, TRIED)

    assert list(ranks["extension"]) == ["none", "yarn", "pi"]


REFUSED = [
    ("", "needs one length beyond 48, such as length=192"),
    ("length=48", "needs one length beyond 48"),
    ("length=96,192", "needs one length beyond 48"),
    ("length=192 probe=induction", "evaluation.probes cannot be set"),
    ("length=9k train_length=10k", "needs one length beyond 10000"),
    ("length=9k", "data.path: no file matches 'text.txt'"),
    ("length=192 data=task/copy", "data=task/copy is a task"),
    ("length=192 split=test", "evaluation.split cannot be set"),
    ("length=192 protocol=nonoverlap", "evaluation.protocols cannot be set"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_words_that_a_search_cannot_follow_are_refused(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    hf_models.save("llama", Path("llama"))
    asked = ["extension=search", "data.path=text.txt", *words.split()]
    assert posbench("evaluate", "./llama", *asked) == 2
    assert message in capsys.readouterr().err
