"""Problems of the synthetic tasks, solved by plain loops from their definitions.
Imports nothing of posbench.

A solver reads the words of one problem and returns its answer: {index of a word: the
word that must stand there}. It fails with an assertion on words that the definition
does not allow.
"""

import itertools

END = "<|endoftext|>"


def parted(words):
    """Return the question and the index of the only `=`."""
    assert words[0] == END
    assert words.count("=") == 1
    at = words.index("=")
    return words[1:at], at


def answered(at, answer):
    return {at + 1 + number: word for number, word in enumerate(answer)}


def is_one(word, kind):
    return word[0] == kind and word[1:].isdigit()


def check_symbols(words):
    for word in words:
        assert is_one(word, "s")


def number_of(word):
    return int(word[1:])


def copy(words, options):
    question, at = parted(words)
    check_symbols(question)
    return answered(at, [*question, END])


def reverse(words, options):
    question, at = parted(words)
    check_symbols(question)
    return answered(at, [*question[::-1], END])


def sort(words, options):
    question, at = parted(words)
    check_symbols(question)
    ordered = sorted(question, key=number_of)
    return answered(at, [*ordered, END])


def repeat(words, options):
    assert words[0] == END
    check_symbols(words[1:])
    again = words.index(words[1], 2)
    length = again - 1
    assert len(words) == 1 + 2 * length
    answer = {}
    for at in range(again + 1, len(words)):
        answer[at] = words[at - length]
    return answer


def addition(words, options):
    question, at = parted(words)
    plus = question.index("+")
    left = question[:plus]
    right = question[plus + 1 :]
    hints = []
    if options.get("hints"):
        hints = left[0::2]
        assert right[0::2] == hints
        for first, second in itertools.pairwise(hints):
            assert number_of(second) == number_of(first) + 1
        left = left[1::2]
        right = right[1::2]
        assert left[0] == "0"
        assert right[0] == "0"
    assert len(left) == len(right)

    total = int("".join(left)) + int("".join(right))
    length = len(hints) or len(left) + 1
    digits = list(str(total).zfill(length))
    if options.get("answer") == "reversed":
        digits = digits[::-1]
        hints = hints[::-1]
    if hints:
        pairs = zip(hints, digits, strict=True)
        digits = list(itertools.chain(*pairs))
    return answered(at, [*digits, END])


def induction(words, options):
    assert words[0] == END
    assert words.count("!") == 2
    assert words[-2] == "!"
    check_symbols(word for word in words[1:] if word != "!")
    first = words.index("!")
    return {len(words) - 1: words[first + 1]}


def passkey(words, options):
    question, at = parted(words)
    start = question.index("key")
    end = start + 1 + options.get("digits", 3)
    key = question[start + 1 : end]
    fillers = question[:start] + question[end:]
    for word in key:
        assert len(word) == 1
        assert word.isdigit()
    for word in fillers:
        assert is_one(word, "f")
    if "depth" in options:
        wanted = options["depth"] * len(fillers)
        assert abs(start - wanted) <= 0.5
    return answered(at, key)


def recall(words, options):
    slots = options.get("slots", 2)
    per_pair = 2 * (1 + slots)  # words
    pairs = len(words) // per_pair
    assert words[0] == END
    assert len(words) == 1 + pairs * per_pair
    value_of = {}
    for pair in range(pairs):
        key = words[1 + 2 * pair]
        value = words[2 + 2 * pair]
        assert is_one(key, "k")
        assert is_one(value, "v")
        assert key not in value_of
        assert value not in value_of.values()
        value_of[key] = value
    answer = {}
    for slot in range(pairs * slots):
        at = 1 + 2 * pairs + 2 * slot
        if words[at] in value_of:
            answer[at + 1] = value_of.pop(words[at])  # each key is asked once
        else:
            assert is_one(words[at], "f")
            assert is_one(words[at + 1], "f")
    assert not value_of
    return answer


def selective_copy(words, options):
    question, at = parted(words)
    tokens = [word for word in question if word != "."]
    assert len(tokens) == options.get("tokens", 8)
    check_symbols(tokens)
    return answered(at, tokens)


def flip_flop(words, options):
    assert words[0] == END
    assert words[1] == "w"
    assert words[-2] == "r"
    assert len(words) % 2
    memory = None
    answer = {}
    for at in range(1, len(words), 2):
        assert words[at] in ("w", "r", "i")
        assert words[at + 1] in ("0", "1")
        if words[at] == "w":
            memory = words[at + 1]
        elif words[at] == "r":
            answer[at + 1] = memory
    return answer


def counting(words, options):
    question, at = parted(words)
    assert set(question) <= {"x", ".", "reset"}
    count = 0
    for word in question:
        if word == "x":
            count += 1
        if word == "reset":
            count = 0
    return answered(at, [str(count)])


def parity(words, options):
    question, at = parted(words)
    assert set(question) <= {"0", "1"}
    rest = question.count("1") % 2
    return answered(at, [str(rest)])
