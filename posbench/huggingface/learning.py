"""Training on of a model of transformers: its loss, and its weights rounded as saved."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputing

from posbench.huggingface import rope
from posbench.kernels.cross_entropy import cross_entropy


class Learning(nn.Module):
    """The loss of a model as training calls it. It trains without dropout, as it is evaluated.

    The state dict has each parameter once, under the library's name for it, and no buffers: those follow from the
    configuration.

    Args:
        first_token: replaces the first token of every window; None: it is read as it stands.
        recomputed: keep only the input of each block for the backward pass, which computes the rest again.
    """

    def __init__(self, model: Any, first_token: int | None, recomputed: bool = False) -> None:
        super().__init__()
        self.model = model
        self.first_token = first_token
        self.eval()
        for block in self._blocks() if recomputed else ():
            block.forward = functools.partial(
                recomputing, block.forward, use_reentrant=False, preserve_rng_state=False
            )  # not by the library's own switch, which also turns on dropout
        self.register_state_dict_post_hook(_without_duplicates)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_duplicates)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> "Learning":
        super().train(False)
        return self

    def forward(self, ids: Tensor, labels: Tensor, **unused: Any) -> Tensor:
        """Mean negative log-likelihood, in nats per token, of labels (B, T) after ids (B, T)."""
        if self.first_token is not None:
            ids = ids.clone()
            ids[:, 0] = self.first_token
        rope.restore(self.model)
        return cross_entropy(self.model(input_ids=ids, use_cache=False).logits, labels)

    def _blocks(self) -> list[Any]:
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _without_duplicates(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    own = dict(module.named_parameters())
    for name in [name for name in state if name not in own]:
        del state[name]


def _with_duplicates(module: nn.Module, state: dict[str, Any], *unused: Any) -> None:
    """Give tied parameters the value that the state has under another name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if names[id(parameter)] in state:
            state.setdefault(name, state[names[id(parameter)]])


def rounded(model: Any, *dtypes: torch.dtype, device: torch.device | None = None) -> Any:
    """A copy whose weights took these dtypes one after the other; the model itself if that changes nothing."""
    here = next(model.parameters())
    device = device or here.device
    if device == here.device and all(dtype == here.dtype for dtype in dtypes):
        return model
    made = {}
    for weight in model.parameters():
        value = weight.detach()
        for dtype in dtypes:
            value = value.to(dtype)
        made[id(weight)] = nn.Parameter(value.to(device), requires_grad=False)
    return copy.deepcopy(model, made).to(device)
