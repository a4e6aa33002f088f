"""Shared by encodings whose layers start like all layers of their authors' models: with small normal weights."""

from typing import Literal

from torch import nn

Start = Literal["normal", "torch"]
STD = 0.02  # of the authors' models, whatever their width


def start(encoding: nn.Module, kind: Start) -> None:
    """Initialise the linear maps and convolutions inside an encoding.

    Args:
        kind: normal = weights with mean 0 and deviation 0.02, and biases of 0; torch = keep torch's own.
    """
    if kind == "torch":
        return
    for layer in encoding.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d):
            nn.init.normal_(layer.weight, std=STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
