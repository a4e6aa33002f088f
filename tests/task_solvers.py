"""Problems of the synthetic tasks, solved by plain loops from their definitions.
Imports nothing of posbench.

A solver reads the words of one problem and returns its answer: {index of a word: the
word that must stand there}. It fails with an assertion on words that the definition
does not allow.
"""

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


def copy(words, options, order=list):
    question, at = parted(words)
    assert all(is_one(word, "s") for word in question)
    return answered(at, [*order(question), END])


def reverse(words, options):
    return copy(words, options, reversed)


def sort(words, options):
    return copy(
        words,
        options,
        lambda question: sorted(question, key=lambda word: int(word[1:])),
    )


def repeat(words, options):
    assert words[0] == END
    assert all(is_one(word, "s") for word in words[1:])
    again = next(number for number in range(2, len(words)) if words[number] == words[1])
    length = again - 1
    assert len(words) == 1 + 2 * length
    return {number: words[number - length] for number in range(again + 1, len(words))}


def addition(words, options):
    question, at = parted(words)
    plus = question.index("+")
    terms = [question[:plus], question[plus + 1 :]]
    hints = []
    if options.get("hints"):
        hints = terms[0][0::2]
        assert terms[1][0::2] == hints
        assert [int(hint[1:]) - int(hints[0][1:]) for hint in hints] == list(
            range(len(hints))
        )
        terms = [term[1::2] for term in terms]
        assert terms[0][0] == terms[1][0] == "0"
    assert len(terms[0]) == len(terms[1])
    digits = list(
        str(int("".join(terms[0])) + int("".join(terms[1]))).zfill(
            len(hints) or len(terms[0]) + 1
        )
    )
    if options.get("answer") == "reversed":
        digits = digits[::-1]
        hints = hints[::-1]
    if hints:
        digits = [word for pair in zip(hints, digits, strict=True) for word in pair]
    return answered(at, [*digits, END])


def induction(words, options):
    assert words[0] == END
    assert words.count("!") == 2
    assert words[-2] == "!"
    assert all(is_one(word, "s") for word in words[1:] if word != "!")
    return {len(words) - 1: words[words.index("!") + 1]}


def passkey(words, options):
    question, at = parted(words)
    start = question.index("key")
    end = start + 1 + options.get("digits", 3)
    key = question[start + 1 : end]
    fillers = question[:start] + question[end:]
    assert all(len(word) == 1 and word.isdigit() for word in key)
    assert all(is_one(word, "f") for word in fillers)
    if "depth" in options:
        assert abs(start - options["depth"] * len(fillers)) <= 0.5
    return answered(at, key)


def recall(words, options):
    slots = options.get("slots", 2)
    pairs = (len(words) - 1) // (2 * (1 + slots))
    assert words[0] == END
    assert len(words) == 1 + 2 * pairs * (1 + slots)
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
    assert all(is_one(word, "s") for word in tokens)
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
    return answered(at, [str(" ".join(question).rpartition("reset")[2].count("x"))])


def parity(words, options):
    question, at = parted(words)
    assert set(question) <= {"0", "1"}
    return answered(at, [str(question.count("1") % 2)])
