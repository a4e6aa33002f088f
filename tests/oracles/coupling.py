"""Plain loops over the tokens of a text; the oracle of the encoding inside."""

import torch

from oracles import _inner

VOCABULARY = ("<|endoftext|>", "1", "2", "+", "=", "3", "a", "x=")
CASES = [{}, {"answer": "plain", "inner": "rope"}, {"answer": "plain", "longer": 0, "max_position": 6}]
PARTLY_UNUSED = "rows of the table beyond the longest problem"
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles


def parameter_count(shape, options):
    return (last_of(shape, options) + 1) * shape.d_model


def reads_positions(options):
    return options["inner"] != "none"


def last_of(shape, options):
    return 2 * shape.train_length if options["max_position"] is None else options["max_position"]


def coupled(tokens, options):
    """Positions of the tokens of a text: of a question upwards, of an answer as the option says."""
    begin = 2 if options["answer"] == "reversed" else 2 + options["longer"]
    numbers, size, following = [], 0, None  # `size`: tokens of the part so far; `following`: an answer's next position
    for text in tokens:
        if text == "<|endoftext|>":
            numbers.append(0)
            size, following = 0, None
        elif text == "=":
            following = size + 2 if options["answer"] == "reversed" else 1
            numbers.append(following)
            size = 1
        elif following is not None and size > 0:
            following += -1 if options["answer"] == "reversed" else 1
            numbers.append(max(1, following))
            size += 1
        else:
            following = None
            numbers.append(begin + size)
            size += 1
        if text == "+":
            size, following = 0, None
    return numbers


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal, ids):
    embedded = []
    for b, row in enumerate(ids.tolist()):
        for t, number in enumerate(coupled([VOCABULARY[token] for token in row], options)):
            embedded.append(x[b, t] + parameters["table"][min(number, last_of(shape, options))])
    told = {"embedded": torch.stack(embedded).view(x.shape)}
    return told | _inner.found(parameters, shape, options, q, k, v, x, positions, layer, causal)
