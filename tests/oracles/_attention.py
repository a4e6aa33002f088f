"""Plain softmax attention on what an oracle says of a layer, and what stands for another project's projections."""

import torch

from oracles import third_party


def output_of(found, q, k, v, causal, window=None, chunk=None):
    """Output (B, H, T, Dh) from an oracle's "q", "k" and "bias", each as raw where it is missing."""
    if "output" in found and window is None and chunk is None:
        return found["output"]
    logits = found.get("q", q) @ found.get("k", k).mT * v.shape[-1] ** -0.5 + found.get("bias", 0)
    index = torch.arange(v.shape[2])
    gap = index[:, None] - index
    if causal:
        hidden = (gap < 0) | (gap >= window) if window else gap < 0
        logits = logits.masked_fill(hidden, -torch.inf)
    if chunk:  # transformers' mask of Llama 4
        overlay = third_party("transformers.masking_utils").chunked_overlay(chunk, torch.zeros(1, dtype=torch.long))
        logits = logits.masked_fill(~overlay(0, 0, index[:, None], index), -torch.inf)
    return logits.softmax(-1) @ v


class Take(torch.nn.Module):
    """Some channels of one wide input, in the place of a projection."""

    def __init__(self, start, stop):
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, x):
        return x[..., self.start : self.stop].contiguous()
