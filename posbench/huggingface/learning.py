"""Training on of a model of transformers: its loss, the memory that it needs, and its weights rounded as saved."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputing

from posbench import machine
from posbench.config.external import TrainedOn
from posbench.errors import UserError
from posbench.huggingface import rope
from posbench.huggingface.folder import Checkpoint
from posbench.kernels.cross_entropy import cross_entropy

_OF_WEIGHTS = 16  # bytes of a parameter: its value, its gradient and AdamW's two averages, in fp32
_VECTORS = 14  # of the model's width, which a block keeps per token for backward: norms, queries, keys, values, sums


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
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self.model.get_output_embeddings()(hidden)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return cross_entropy(logits if cap is None else cap * torch.tanh(logits / cap), labels)

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


def refuse_too_large(
    checkpoint: Checkpoint, library: Any, config: TrainedOn, dtype: torch.dtype, device: str
) -> tuple[str, bool]:
    """Estimate the memory of training before anything is allocated.

    Args:
        library: the library's configuration of the model.

    Returns:
        The estimate in words, and whether blocks must be computed again in the backward pass.

    Raises:
        UserError: it does not fit in either way.
    """
    training, width, layers = config.training, library.hidden_size, library.num_hidden_layers
    tokens = training.batch_size * training.train_length
    inner = getattr(library, "intermediate_size", None) or getattr(library, "ffn_dim", None) or 4 * width
    size = 4 if dtype == torch.float32 else 3  # bytes of a number kept for the backward pass; half of them stay in fp32
    block = (_VECTORS * width + 4 * inner) * size * tokens
    if not checkpoint.family.narrows:  # all scores, their softmax and its gradient
        block += 3 * 4 * library.num_attention_heads * training.train_length * tokens
    head = 2 * library.vocab_size * (4 if dtype == torch.float32 else 2) * tokens
    weights = _OF_WEIGHTS * checkpoint.weights.learned
    limit = machine.memory_limit(device)
    kept = [(True, layers * 4 * width * tokens + block)]
    if not config.runtime.checkpointing:
        kept.insert(0, (False, layers * block))
    for recomputed, activations in kept:
        needed = weights + head + activations
        told = (
            f"about {_gib(needed)}: {_gib(weights)} for weights, gradients and AdamW's averages, {_gib(head)} for "
            f"logits and {_gib(activations)} for activations of {tokens:,} tokens"
        )
        if limit is None or needed <= limit[0]:
            return told + (", which each block computes again in the backward pass" if recomputed else ""), recomputed
    assert limit is not None
    raise UserError(
        f"training {checkpoint.folder} needs {told}, there are {_gib(limit[0])} ({limit[1]}): lower "
        f"training.batch_size or training.train_length; {machine.MEMORY}=GIB sets another limit"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
