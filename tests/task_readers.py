"""Trivial readers of the synthetic tasks, by plain loops. Imports nothing of posbench.

A reader gets the words of one problem with their answer, and the numbers of the answer's words. It returns what it
says there: {number of the word: word}. It uses only words before the one it says.
"""

END = "<|endoftext|>"


def commonest_left(words, places, options, bag=None):
    """The word that the bag has most often and the answer has not used; of several the one of the least number."""
    left, guesses = list(words[1 : words.index("=")] if bag is None else bag), {}
    for at in places:
        guesses[at] = max(sorted(left, key=lambda word: int(word.lstrip("s"))), key=left.count, default=END)
        if words[at] in left:
            left.remove(words[at])
    return guesses


copy = reverse = commonest_left


def repeat(words, places, options):
    return commonest_left(words, places, options, words[2 : words.index(words[1], 2)])


def selective_copy(words, places, options):
    return commonest_left(words, places, options, [word for word in words[1 : words.index("=")] if word != "."])


def passkey(words, places, options):
    return commonest_left(words, places, options, [word for word in words[1 : words.index("=")] if word.isdigit()])


def induction(words, places, options):
    return commonest_left(words, places, options, [word for word in words[1:-2] if word != "!"])


def sort(words, places, options):
    return {at: words[at - 1] for at in places}


def flip_flop(words, places, options):
    return {at: [word for word in words[:at] if word in ("0", "1")][-1] for at in places}


parity = flip_flop


def counting(words, places, options):
    return dict.fromkeys(places, "0")


def recall(words, places, options):
    values = [word for word in words if word[0] == "v"][: len(places)]  # of the pairs, in their order
    return {
        at: next(v for v in values if v not in [words[before] for before in places if before < at]) for at in places
    }


def addition(words, places, options):
    hints = words[1 : words.index("+") : 2] if options.get("hints") else []
    if options.get("answer") == "reversed":
        hints = hints[::-1]
    number = len(places) // (2 if hints else 1)
    answer = [word for hint in hints for word in (hint, "0")] if hints else ["0"] * (number - 1)
    return dict(zip(places, [*answer, END], strict=True))
