"""Write a text to train on whose documents are problems of the probes: `python scripts/retrieval_text.py FOLDER`.

FOLDER/train.jsonl has two kinds of documents. Echoes are made-up words and digits that are said again and again: from
them a model learns early to look up what followed before. The others are problems with their answers, among made-up
words. Their numbers begin where those of evaluations end, so that no problem that is asked later is among them.
valid.jsonl and test.jsonl have made-up words alone: what a probe asks there, the probe has put there. A small model
that was trained on it shows whether it can do what the probes ask; a small text of people would not teach it.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

from posbench.evaluation import probes

FIRST = 10_000  # number of the first problem; evaluations have hundreds
MOST = 400  # characters of an echo, and of a problem whose sentences are said once: 128 tokens or less
SYLLABLES = [first + second for first in "bdfklmnprst" for second in "aeiou"]


def word(number: int) -> str:
    """One of 55 made-up words, by its number."""
    return SYLLABLES[number % 55] + SYLLABLES[(7 * number) % 55]


def words(rng: np.random.Generator, number: int) -> str:
    """Made-up words, common and rare ones as in a text, in sentences."""
    drawn = map(word, np.minimum(rng.zipf(1.3, number), 200).tolist())
    return " ".join(f"{one}." if n % 9 == 8 else one for n, one in enumerate(drawn))


def echo(rng: np.random.Generator) -> str:
    """Made-up words and digits, all equally common, said again and again: what follows can only be looked up."""
    number = int(rng.integers(5, MOST // 10))
    drawn = list(map(word, rng.integers(0, 200, number).tolist()))
    for at in rng.choice(number, number // 3, replace=False).tolist():
        drawn[at] = f'"{rng.integers(10)}"'
    line = " ".join(drawn)
    return "\n".join([line] * (MOST // len(line)))


def problem(rng: np.random.Generator, task: str, number: int) -> str:
    """A problem of a probe with its answer, its sentences said one to three times, each time in another order."""
    (probe,) = probes.of(task, [1], 1, 1)
    room = int(rng.integers(MOST // 4, MOST))
    tell = probe.poses.keywords["tell"]  # type: ignore[union-attr]
    story = tell(number, lambda one: room - len("".join(one.told)) - len(one.question))
    spare = max(0, room - len("".join(story.told)) - len(story.question))
    around = words(rng, spare // 3 + 1)[:spare]
    cuts = [round(place * spare) for place in story.places]
    parts = [around[first:end] for first, end in zip([0, *cuts], [*cuts, None], strict=True)]
    told = "".join(part + sentence for part, sentence in zip(parts, story.told, strict=False))
    more = "".join(story.told[at] for _ in range(rng.integers(3)) for at in rng.permutation(len(story.told)))
    return told + parts[-1] + more + story.question + story.between.join(story.answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["passkey", "multi_key", "common_words"])
    parser.add_argument("--problems", type=int, default=40_000)
    parser.add_argument("--echoes", type=int, default=30_000)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    texts = {
        "train": itertools.chain(
            (echo(rng) for _ in range(asked.echoes)),
            (
                problem(rng, asked.tasks[n % len(asked.tasks)], FIRST + n // len(asked.tasks))
                for n in range(asked.problems)
            ),
        ),
        "valid": (words(rng, 4000) for _ in range(20)),
        "test": (words(rng, 4000) for _ in range(40)),
    }
    for name, documents in texts.items():
        with (asked.folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)


if __name__ == "__main__":
    main()
