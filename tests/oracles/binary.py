"""Binary digits, as Python writes them."""

import torch

CASES = [{}, {"digits": 7, "scale": 1.0}, {"combine": "concat", "scale": 2.0}]
POSITIONS = ("consecutive", "offset", "gaps")  # seven digits end at 127
GRAPH_BREAKS = "looks at the positions' values, to refuse those that it has no digits for"


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    scale = shape.token_rms if options["scale"] == "token" else options["scale"]
    digits = options["digits"] or 6  # 64 positions
    rows = []
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            text = format(positions[b % len(positions), i].item(), "b")[::-1].ljust(digits, "0")
            code = [scale * float(digit) for digit in text]
            if options["combine"] == "concat":
                rows.append(torch.cat([x[b, i, : shape.d_model - digits], x.new_tensor(code)]))
            else:
                rows.append(x[b, i] + x.new_tensor(code + [0.0] * (shape.d_model - digits)))
    return {"embedded": torch.stack(rows).view(x.shape[0], x.shape[1], shape.d_model)}
