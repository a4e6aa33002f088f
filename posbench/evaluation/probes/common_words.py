"""Common words: which word of a long list is the most common?

    text           reads  a b c d e f g h i j k l m n o p q r s t u
    common_words   reads  a b | river | oak | river | stone | river | The most common word is: |
                   scores river    (among river oak stone ...)        (| a line end)

The list fills the window, but for a few of its first tokens, and has `words` words in random order. One of them stands
there `ratio` times as often as each of the others, and is the answer. Each is so in one of every `words` windows, in
shuffled order; which words these are is drawn for each window. Guessing gets 1 of `words`. The trivial reader says the
last word of the list: ratio / (ratio + words - 1) of them, 46 % by default.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
arXiv:2404.06654, section 3.3: common words extraction. Ten words stand there six times as often as all others in lists
below 4,096 tokens, and ten times in longer ones.
Deviates: one common word, so that there is one right answer; a longer list has more of each word, not other words; its
lines have no numbers, and no worked example stands before it.
"""

import functools

import numpy as np

from posbench.evaluation.probes import Probe, balanced, expect
from posbench.evaluation.probes._sentences import WORDS, Spare, Story, in_words
from posbench.randomness import derive

_MOST_RATIO = 100


def rows(lengths: list[int], targets: int, train_length: int, *, words: int = 8, ratio: int = 6) -> list[Probe]:
    """One row per length."""
    expect(2 <= words <= len(WORDS), "common_words", "words", words, f"2 to {len(WORDS)}")
    expect(2 <= ratio <= _MOST_RATIO, "common_words", "ratio", ratio, f"2 to {_MOST_RATIO}")
    return in_words("common_words", lengths, targets, functools.partial(_story, words=words, ratio=ratio))


def _story(number: int, spare: Spare, words: int, ratio: int) -> Story:
    drawn = np.random.default_rng(derive(0, "common_words", number)).permutation(WORDS)[:words].tolist()
    common = drawn[balanced("common_words", number, words)]

    def told(times: int) -> Story:
        rng = np.random.default_rng(derive(0, "common_words order", number))
        listed = rng.permutation([*drawn, *[common] * (ratio - 1)] * times).tolist()
        return Story(
            told=("\n" + "\n".join(listed),),
            places=(1.0,),
            question="\nThe most common word is:\n",
            answers=(common,),
            candidates=tuple(drawn),
            trivial=(listed[-1],),
        )

    left = spare(told(1))
    times = max(1, 1 + left // max(1, left - spare(told(2))))
    while times > 1 and spare(told(times)) < 0:  # a tokenizer may join across lines
        times -= 1
    return told(times)
