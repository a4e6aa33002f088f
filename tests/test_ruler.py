"""RULER through lm-evaluation-harness, where it is installed: its problems, scores by length, and what is refused."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import hf_models
import pandas as pd
import pytest
import tokenizers
from support import posbench

from posbench.data.tokens import from_file, train_bpe
from posbench.evaluation import printed, probes
from posbench.run.rows import evaluation_rows
from posbench.serving import ruler

pytest.importorskip("transformers")
WORDS = [
    "data=text",
    "data.path=text.txt",
    "protocol=fixed_target",
    "windowed=false",
    "targets=8",
    "blocks=8",
    "device=cpu",
]


def model(folder: Path, **more: Any) -> None:
    """Write a Llama of random weights, whose tokenizer has whole words of this file."""
    words = (Path(__file__).read_text() + "special magic number mentioned in the provided text 0123456789 ") * 3
    tokenizer = train_bpe([words], 1000)
    hf_models.save("llama", folder, vocab_size=tokenizer.vocab_size, max_position_embeddings=512, **more)
    tokenizers.Tokenizer.from_str(tokenizer._inner.to_str()).save(str(folder / "tokenizer.json"))
    (folder.parent / "text.txt").write_text(words * 20)


def test_a_missing_harness_and_short_lengths_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model(Path("llama"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nltk" else name)
    assert posbench("evaluate", "./llama", "task=ruler", "length=512", *WORDS) == 2
    assert "pip install 'lm_eval[ruler]>=0.4.13'" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(ruler.metadata, "version", lambda name: "0")
    monkeypatch.setattr(probes, "BENCHMARKS", {})
    assert posbench("evaluate", "./llama", "tasks=[ruler]", "length=128", "train_length=128", *WORDS) == 2
    assert "a length of 512 tokens or more" in capsys.readouterr().err
    assert posbench("evaluate", "./llama", "task=rules", "length=512", *WORDS) == 2


def test_the_average_is_over_tasks_that_have_every_length_and_the_effective_length_is_the_longest_enough() -> None:
    scores = {"vt": [1, 0.9, 0.7], "cwe": [1, 0.82, 0.9], "fwe": [1, None, 1]}
    rows = pd.DataFrame([
        {"task": task, "length": length, "accuracy": score, "variant": variant}
        for variant in ("plain", "yarn") for task, of_task in scores.items()
        for length, score in zip((512, 1024, 2048), of_task, strict=True)
    ])  # fmt: skip
    rows.loc[rows["variant"] == "yarn", "accuracy"] = 0.5
    plain, yarn = printed._about_ruler(rows)
    assert plain.startswith("RULER, 2 of 3 tasks: 100.0% at 512 tokens, 86.0% at 1,024 tokens, 80.0% at 2,048 tokens")
    assert plain.endswith(": 1,024 tokens.")
    assert yarn.startswith("RULER with yarn, 3 of 3") and yarn.endswith(": none of these.")


@pytest.mark.full
def test_the_harness_scores_a_reader_that_finds_the_number_and_a_random_model_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "nltk/tokenizers/punkt_tab").mkdir(parents=True)  # what is there is not downloaded
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setattr(ruler, "TASKS", ["niah_single_1", "vt"])
    monkeypatch.chdir(tmp_path)
    model(Path("llama"))
    asked = ["evaluate", "./llama", "task=ruler", "length=1024", *WORDS]
    assert posbench(*asked) == 0
    (folder,) = Path("outputs/models").glob("llama-*")
    scores = {row.task: row for row in evaluation_rows(folder) if row.protocol == "ruler"}
    assert scores["niah_single_1"].accuracy == 0 and scores["niah_single_1"].n_blocks == 8
    assert scores["vt"].status == "undefined" and "no room" in str(scores["vt"].reason)
    assert "RULER, 1 of 2 tasks: 0.0% at 1,024 tokens" in capsys.readouterr().out
    seen: list[int] = []  # the same call computes nothing again
    monkeypatch.setattr(ruler, "_answer", lambda subject, ids, most: seen.append(most))
    assert posbench(*asked) == 0 and not seen
    tokenizer = from_file(Path("llama/tokenizer.json"))

    def finds(subject: Any, ids: list[int], most: int) -> list[int]:
        text = tokenizer.decode(ids)
        key = re.findall(r"magic number for (\S+) mentioned", text)[-1]
        return tokenizer.encode([re.findall(rf"for {key} is: (\d+)", text)[0]])[0].tolist()

    monkeypatch.setattr(ruler, "_answer", finds)
    assert posbench(*[word.replace("blocks=8", "blocks=9") for word in asked]) == 0
    scores = {row.task: row for row in evaluation_rows(folder) if row.protocol == "ruler"}
    assert scores["niah_single_1"].accuracy == 1
