"""RULER through lm-evaluation-harness, where it is installed: its problems, scores by
length, and what is refused.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import hf_models
import pandas as pd
import pytest
from support import posbench

from posbench.data.tokenizer import from_file, train_bpe
from posbench.evaluation import printed
from posbench.run.rows import EvaluationRow, evaluation_rows
from posbench.serving import ruler

pytest.importorskip("transformers")
ASKED = [
    "evaluate",
    "./llama",
    "data=text",
    "data.path=text.txt",
    "protocol=fixed_target",
    "targets=8",
    "blocks=8",
]


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama of random weights, whose tokenizer knows words of this file, in the
    current folder.
    """
    monkeypatch.chdir(tmp_path)
    words = (
        Path(__file__).read_text()
        + "special magic number mentioned in the provided text 0123456789 " * 9
    )
    tokenizer = train_bpe([words], 1000)
    hf_models.save(
        "llama",
        Path("llama"),
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=512,
    )
    tokenizer.save(Path("llama/tokenizer.json"))
    Path("text.txt").write_text(words * 60)


def test_a_missing_harness_and_short_lengths_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "nltk" else name
    )
    assert posbench(*ASKED, "task=ruler", "length=512") == 2
    assert "pip install 'lm_eval[ruler]>=0.4.13'" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert posbench(*ASKED, "tasks=[ruler]", "length=128", "train_length=128") == 2
    assert "a length of 512 tokens or more" in capsys.readouterr().err


def test_the_average_is_over_tasks_that_have_every_length_and_the_effective_length_is_the_longest_enough() -> (
    None
):
    scores = {"vt": [1, 0.9, 0.7], "cwe": [1, 0.82, 0.9], "fwe": [1, None, 1]}
    frame = pd.DataFrame(scores, [512, 1024, 2048]).rename_axis("length").reset_index()
    rows = frame.melt("length", var_name="task", value_name="accuracy").assign(
        variant="plain"
    )
    plain, yarn = printed._about_ruler(
        pd.concat([rows, rows.assign(variant="yarn", accuracy=0.5)])
    )
    assert plain.startswith(
        "RULER, 2 of 3 tasks: 100.0% at 512 tokens, 86.0% at 1,024 tokens, 80.0% at"
        " 2,048 tokens"
    )
    assert plain.endswith(": 1,024 tokens.")
    assert yarn.startswith("RULER with yarn, 3 of 3") and yarn.endswith(
        ": none of these."
    )


@pytest.mark.slow
def test_a_reader_finds_the_number_and_a_random_model_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    # what is there is not downloaded
    (tmp_path / "nltk/tokenizers/punkt_tab").mkdir(parents=True)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setattr(ruler, "TASKS", ["niah_single_1", "vt"])
    tokenizer, seen = from_file(Path("llama/tokenizer.json")), list[int]()

    def scored(*words: str) -> dict[str | None, EvaluationRow]:
        assert posbench(*ASKED, "task=ruler", "length=1024", *words) == 0
        (folder,) = Path("outputs/models").glob("llama-*")
        return {
            row.task: row for row in evaluation_rows(folder) if row.protocol == "ruler"
        }

    def finds(subject: Any, ids: list[int], most: int) -> list[int]:
        seen.append(most)
        text = tokenizer.decode(ids)
        key = re.findall(r"magic number for (\S+) mentioned", text)[-1]
        return tokenizer.encode([re.findall(rf"for {key} is: (\d+)", text)[0]])[
            0
        ].tolist()

    rows = scored()
    assert (rows["niah_single_1"].accuracy, rows["niah_single_1"].n_blocks) == (0, 8)
    assert rows["vt"].status == "undefined" and "too few tokens" in str(
        rows["vt"].reason
    )
    monkeypatch.setattr(ruler, "_answer", finds)
    assert scored() and not seen  # the same call computes nothing again
    assert scored("blocks=9")["niah_single_1"].accuracy == 1
