"""A model's own head, applied to hidden states in pieces.

Each kind of model has its own way from hidden states to logits: a scale (Granite, Cohere), a cap (Gemma 2), or more. So
the model's own forward pass is run, and the part that makes the hidden states returns the given ones. If the last
matrix is a plain linear layer, it is computed in fp32 in every precision of the model.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.errors import Undefined


class _States(tuple[Tensor]):
    """The output of a model without head. A head reads its hidden states; every other field is None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class Head:
    """The head of a model of the library: hidden states (N, D) to logits (N, V), in fp32."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.body = _body(model)  # the name of the part that makes the hidden states
        self._linear = model.get_output_embeddings()
        self._weights: tuple[Tensor, Tensor | None] | None = None
        if type(self._linear) is nn.Linear:
            bias = self._linear.bias
            self._weights = self._linear.weight.float(), None if bias is None else bias.float()

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with contextlib.ExitStack() as stack:
            states = _States((hidden[None],))
            stack.enter_context(_instead(self._model.get_submodule(self.body), lambda *args, **options: states))
            if self._weights is not None:
                matrix = self._weights
                stack.enter_context(_instead(self._linear, lambda x: F.linear(x.float(), *matrix)))
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits[0].float()


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Any) -> Iterator[None]:
    """Within it, a module computes something else."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # of this object; that of its class is back


@torch.no_grad()
def _body(model: Any) -> str:
    """The name of the outermost part of a model that returns hidden states; Undefined if there is none."""
    names = {module: name for name, module in model.named_modules() if name}
    returned: list[str] = []

    def noted(module: nn.Module, args: Any, output: Any) -> None:
        if getattr(output, "last_hidden_state", None) is not None:
            returned.append(names[module])

    hooks = [module.register_forward_hook(noted) for module in names]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not returned:
        raise Undefined("no part of it returns the hidden states that its head reads")
    return returned[-1]
