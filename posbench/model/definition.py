"""A model computed by the definition of attention: in each layer all rows at once, in
fp32, without a kernel; and the weights with which it attends.
"""

import dataclasses

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, check_length
from posbench.model.attention import block_logits
from posbench.model.gpt import GPT
from posbench.model.standalone import prepared_block


@dataclasses.dataclass(frozen=True, eq=False)
class Attended:
    """Attention of one layer: each row of `output` is the sum of `values` by a row of
    `weights`.
    """

    encoding: Encoding  # that of the layer
    layer: Layer
    logits: Tensor  # (B, H, T, T)
    values: Tensor  # (B, H, T, Dh), after `map_values`
    output: Tensor  # (B, H, T, Dh), before `map_outputs`

    @property
    def weights(self) -> Tensor:
        """The attention weights (B, H, T, T)."""
        return attention_weights(self.encoding, self.logits, self.values, self.layer)


def by_definition(
    model: GPT, ids: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, list[Attended]]:
    """Return the final states (B, T, D) of ids (B, T), as `GPT.hidden` does, and the
    attention of each layer.

    `positions`: (1|B, T); None = the encoding's own, random ones from a fixed seed.
    """
    encoding = model.encoding
    if positions is None:
        positions = encoding.positions(ids, None)
    x = encoding.embed(model.tokens(ids), positions, ids)
    check_length(encoding, positions.shape[-1])
    # not `make_layer`: torch's device `meta`, for `posbench check`, has no autocast
    common = Layer(0, positions, tables=encoding.make_tables(positions))
    layers: list[Attended] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        layer = model.limited(encoding, common.replace(index=len(layers), x=x))
        used, q, k, v, block = prepared_block(encoding, q, k, v, layer)
        logits = block_logits(used, q, k, block)
        output = used.attend(logits, v, block)
        layers.append(Attended(used, block, logits, v, output))
        return used.map_outputs(output, block)

    for block in model.blocks:
        x = block(x, attend)
    return model.norm(x), layers


def attention_weights(
    encoding: Encoding, logits: Tensor, values: Tensor, layer: Layer
) -> Tensor:
    """Return the attention weights (B, H, Tq, Tk) of a block with these masked logits;
    values (B, H, Tk, Dh).

    If an encoding turns logits into outputs itself, they are its outputs for one-hot
    values. Then a row need not sum to 1: with a sink it sums to less.
    """
    if "attend" not in encoding.hooks:
        return logits.softmax(-1)
    n_keys, width = values.shape[-2:]
    zero_output = encoding.attend(logits, torch.zeros_like(values), layer)
    parts = []
    # the weights of as many keys at a time as values have channels
    for start in range(0, n_keys, width):
        one_hot = torch.eye(n_keys, start + width, device=values.device)[:, start:]
        output = encoding.attend(logits, one_hot.expand_as(values), layer)
        parts.append(output - zero_output)
    return torch.cat(parts, dim=-1)[..., :n_keys]
