"""Plain loops over heads with complex logits; no package has it."""

import torch

CASES = [{}, {"layout": "half", "base": 500.0}]
DTYPE = torch.float64


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    pairs = shape.head_dim // 2
    frequencies = options["base"] ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    turns = torch.exp(1j * (positions[:, :, None] - positions[:, None, :])[..., None] * frequencies)  # (1|B, T, T, P)
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1) & causal

    def as_complex(a):
        first, second = (a[..., 0::2], a[..., 1::2]) if options["layout"] == "interleaved" else a.chunk(2, dim=-1)
        return torch.complex(first, second)

    out = []
    for head in range(shape.n_heads):
        shared = head - head % 2
        query, key = as_complex(q[:, shared]), as_complex(k[:, shared])
        logits = torch.einsum("bip,bjp,bijp->bij", query, key.conj(), turns.expand(len(q), -1, -1, -1))
        logits = (logits.imag if head % 2 else logits.real) * shape.head_dim**-0.5
        out.append(logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, shared])
    return {"output": torch.stack(out, dim=1)}
