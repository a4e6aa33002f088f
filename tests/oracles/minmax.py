"""The index between 0 and 1: plain loops."""

from oracles.index import embedded, parameter_count

CASES = [{}, {"norm": "length", "scale": 1.0}, {"direction": "learned", "scale": 2.0}, {"combine": "concat"}]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    rows = []
    for row in positions.tolist():
        low, high = (min(row), max(row)) if options["norm"] == "batch" else (0, shape.train_length - 1)
        rows.append([(i - low) / (high - low) if high > low else 0.0 for i in row])
    return {"embedded": embedded(x, rows, parameters, shape, options)}
