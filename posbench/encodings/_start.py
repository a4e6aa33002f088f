"""First weights of encodings whose layers start like all layers of their authors' models."""

from typing import Literal

from torch import nn

Start = Literal["normal", "torch"]


def start(encoding: nn.Module, kind: Start) -> None:
    """Draw the linear maps and convolutions of an encoding anew: N(0, 0.02), biases 0; `torch` keeps torch's own."""
    for layer in encoding.modules() if kind == "normal" else ():
        if isinstance(layer, nn.Linear | nn.Conv1d):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
