"""A small GPT without a positional encoding of its own: it calls the hooks of one
`Encoding`.

Pre-norm blocks without biases; LayerNorm + GELU (GPT-2) or RMSNorm + SwiGLU (Llama);
tied head by default.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posbench.config.schema import Config, ModelConfig
from posbench.encodings.base import Encoding, Layer, Rotation, exact, narrower
from posbench.model import IGNORED
from posbench.model.attention import attention, make_layer
from posbench.model.compiled import compiled
from posbench.model.loss import linear_cross_entropy
from posbench.randomness import derive, generator

RMS_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class ChangedReading:
    """Changes to how a model reads, for baselines and extensions in evaluation."""

    # used in place of the model's own; it has the same shape
    encoding: Encoding | None = None
    # keys a query may see; the model's own window holds where it is narrower
    window: int | None = None
    sinks: int = 0  # keys at the beginning that every query sees beside that window


_AS_TRAINED = ChangedReading()


class GPT(nn.Module):
    """A language model from token ids (B, T) to logits (B, T, vocab_size), or to the
    loss of labels.
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, encoding: Encoding
    ) -> None:
        super().__init__()
        self.config = config
        self.encoding = encoding
        # whether training keeps only each block's input and computes the rest again
        # backwards
        self.recomputes = False
        # whether training compiles its blocks: all but attention, and on CUDA also
        # attention that no fused kernel computes
        self.compiles = False
        self.window = config.attention.window
        self.sinks = config.attention.sinks
        width = encoding.token_dim()
        self.tokens = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = _norm(config)
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        *,
        n_scored: int | None = None,
        positions: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return logits (B, T, vocab_size), or the mean negative log-likelihood of
        labels in nats, 0 if none is scored.

        Args:
            ids: (B, T).
            labels: (B, T), the token that should follow each token, or `IGNORED` where
                it is not scored.
            n_scored: how many labels are scored. None: they are counted, and the host
                waits for the device.
            positions, generator: as for `hidden`.
        """
        hidden = self.hidden(ids, positions, generator)
        if labels is None:
            return self.logits(hidden)
        return self.loss(hidden, labels, n_scored)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        generator: torch.Generator | None = None,
        last: int | None = None,
        reading: ChangedReading = _AS_TRAINED,
    ) -> Tensor:
        """Return the final normalised states (B, T, D), which the head reads.

        Args:
            ids: (B, T).
            positions: (1|B, T); None = the encoding's own. Random ones are drawn from
                `generator`.
            last: how many of the last states to return, (B, last, D); the last block
                computes no others. None = all T.
            reading: another encoding, or a narrower window.
        """
        encoding = reading.encoding or self.encoding
        consecutive = positions is None and "positions" not in encoding.hooks
        with torch.autocast(ids.device.type, enabled=False):
            if positions is None:
                positions = encoding.positions(ids, generator)
            x = encoding.embed(self.tokens(ids), positions, ids)
        # `Layer` is what hooks read: this is what it has for every block
        common = make_layer(encoding, positions, consecutive=consecutive)
        training = torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            layer = self.limited(encoding, common.replace(index=index), reading)
            is_last = index == len(self.blocks) - 1
            rows = last if is_last else None
            compiles = self.compiles and training
            rotation = None
            if compiles:
                used, layer_of_used = encoding.at(layer)
                rotation = used.rotation(layer_of_used)
                layer = layer.replace(rotated=rotation is not None)
            attend = functools.partial(_attention, encoding, layer, rows, compiles)
            arguments = x, attend, compiles, rotation
            if self.recomputes and training:  # Chen et al. (2016), arXiv:1604.06174
                x = checkpoint(
                    block,
                    *arguments,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    # A compiled piece saves all its tensors at its end, and an early
                    # stop would have to be inside of it.
                    early_stop=not self.compiles,
                )
            else:
                x = block(*arguments)
        return self.norm(x)  # type: ignore[no-any-return]

    def limited(
        self, encoding: Encoding, layer: Layer, reading: ChangedReading = _AS_TRAINED
    ) -> Layer:
        """Return the layer with the window and sinks of its queries."""
        window = narrower(self.window, reading.window)
        sinks = self.sinks
        if reading.sinks:
            used, _ = encoding.at(layer)
            trained_limit = narrower(self.window, used.window)
            is_narrowed = narrower(trained_limit, reading.window) != trained_limit
            # a layer whose own limit is as narrow has learned without sinks
            if is_narrowed:
                sinks = max(sinks, reading.sinks)
        return layer.replace(window=window, sinks=sinks)

    def rows_of_parts(self) -> dict[Tensor, list[int]]:
        """Return the matrices of the blocks, and how many rows each part of them has:
        queries, keys and values are parts of one.
        """
        rows: dict[Tensor, list[int]] = {}
        for weight in self.blocks.parameters():
            if weight.dim() == 2:
                rows[weight] = [len(weight)]
        width = self.config.d_model // self.config.n_heads
        for module in self.blocks.modules():
            if isinstance(module, Attention):
                rows[module.qkv.weight] = [width * n for n in module.heads_of_qkv]
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocab_size)."""
        return F.linear(*self._into_head(hidden))

    def _into_head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's input and weight. It does not read a concatenated position
        code.
        """
        weight = (self.head or self.tokens).weight
        return hidden[..., : weight.shape[1]], weight

    def loss(
        self, hidden: Tensor, labels: Tensor, n_scored: int | None = None
    ) -> Tensor:
        """Return the loss as `forward` does, but from hidden states (B, T, D). The head
        runs on scored rows alone.
        """
        if n_scored is None:
            n_scored = int((labels != IGNORED).sum())
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        if n_scored < len(labels):
            # A stable sort puts scored rows first, in their order; a mask would need
            # their number from the device.
            rows = (labels == IGNORED).int().argsort(stable=True)[:n_scored]
            hidden = hidden.index_select(0, rows)
            labels = labels.index_select(0, rows)
        states, weight = self._into_head(hidden)
        return linear_cross_entropy(states, weight, labels)


class Block(nn.Module):
    """Attention and the feed-forward part: each reads the normalised residual stream
    and adds its output to it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.has_mlp = config.hidden_width > 0
        if self.has_mlp:
            self.mlp_norm = _norm(config)
            self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        attend: Callable[..., Tensor],
        compiles: bool = False,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Return the block's output for states (B, T, D): (B, T, D), or its last rows
        alone.

        Args:
            attend: returns attention's output for queries, keys, values (B, H, T, Dh)
                and their input (B, T, D).
            compiles: run what comes before and after attention as compiled pieces.
            rotation: what the encoding does to queries and keys; the piece before
                attention does it.
        """
        if compiles:
            attended = attend(*_before_compiled(self, x, rotation))
            return _after_compiled(self, x, attended)
        return _added(self, x, self.attention(self.attention_norm(x), attend))


def _added(block: Block, x: Tensor, update: Tensor) -> Tensor:
    """Return the block's output for states (B, T, D) and what attention adds to them,
    (B, T, D) or its last rows.
    """
    x = x[:, -update.shape[1] :] + update
    if block.has_mlp:
        x = x + block.mlp(block.mlp_norm(x))
    return x


def _before(
    block: Block, x: Tensor, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, H, T, Dh) of states (B, T, D), and their
    normalised input (B, T, D).
    """
    inputs = block.attention_norm(x)
    q, k, v = block.attention.heads(inputs)
    if rotation is not None:
        q, k = rotation(exact(q), exact(k))
        q, k = q.to(v.dtype), k.to(v.dtype)
    return q, k, v, inputs


def _after(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    """Return the block's output for states (B, T, D) and attention's output, (B, H, T,
    Dh) or its last rows.
    """
    return _added(block, x, block.attention.joined(attended))


# Attention itself stays outside: the compiler would make a graph of it for every
# length, window and block of rows. On CUDA it compiles its blocks by itself.
_before_compiled = compiled(_before, dynamic=False)
_after_compiled = compiled(_after, dynamic=False)


def _attention(
    encoding: Encoding,
    layer: Layer,
    last: int | None,
    compiles: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
) -> Tensor:
    return attention(encoding, q, k, v, layer.replace(x=x), last, compiles)


class Attention(nn.Module):
    """The projections to queries, keys and values, norms of queries and keys, and the
    projection of the output. A compiled block calls `heads` and `joined` itself: a
    forward hook on this module fires only in blocks that are not compiled.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d_model, n_heads = config.d_model, config.n_heads
        width = d_model // n_heads
        kv_heads = config.n_kv_heads or n_heads
        self.heads_of_qkv = [n_heads, kv_heads, kv_heads]
        self.qkv = nn.Linear(d_model, sum(self.heads_of_qkv) * width, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(width, RMS_EPS)
            self.k_norm = nn.RMSNorm(width, RMS_EPS)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Return what attention adds to the residual stream, (B, T, D) or its last
        rows, for normalised states (B, T, D); `attend` as in `Block.forward`.
        """
        return self.joined(attend(*self.heads(x), x))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, H, T, Dh) of states (B, T, D); keys and
        values may have fewer heads.
        """
        n_heads = sum(self.heads_of_qkv)
        by_token = self.qkv(x).unflatten(-1, (n_heads, -1))  # (B, T, heads, Dh)
        by_head = by_token.transpose(1, 2)
        q, k, v = by_head.split(self.heads_of_qkv, dim=1)
        return self.q_norm(q), self.k_norm(k), v

    def joined(self, attended: Tensor) -> Tensor:
        """Return the projected output (B, T, D) of heads (B, H, T, Dh)."""
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The feed-forward part: GELU as in GPT-2, or a gate as in Llama."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.d_model, config.hidden_width
        self.gate: nn.Linear | None = None
        if config.mlp == "swiglu":
            self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            # Not GPT-2's tanh form: on CPUs torch's exact GELU is six times as fast
            # forward, three times backward.
            return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def build(config: Config, vocab_size: int, vocabulary: tuple[str, ...] = ()) -> GPT:
    """Build a run's model with its initial weights.

    The encoding and every model weight draw from their own random streams, so runs of a
    seed start from equal weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "encoding"))
        gpt = GPT(config.model, vocab_size, config.build_encoding(vocabulary))
    gpt.recomputes = config.runtime.checkpointing

    for name, weight in gpt.named_parameters():
        if name.startswith("encoding.") or weight.dim() < 2:
            continue
        if name == "tokens.weight":
            std = config.model.token_rms
        elif config.model.init == "fan_in":
            std = weight.shape[1] ** -0.5
        # as in GPT-2: the more projections into the residual stream, the smaller they
        # start
        elif name.endswith(("attention.out.weight", "mlp.down.weight")):
            std = 0.02 / math.sqrt(2 * config.model.n_layers)
        else:
            std = 0.02
        nn.init.normal_(weight, 0, std, generator(config.seed, "weights", name))
    return gpt


def parameter_counts(model: GPT) -> dict[str, int]:
    """Count parameters: of the whole model, of its encoding, and of all but the token
    table and the head.
    """
    total = sum(weight.numel() for weight in model.parameters())
    encoding = sum(weight.numel() for weight in model.encoding.parameters())
    tables = model.tokens.weight.numel()
    if model.head is not None:
        tables += model.head.weight.numel()
    return {"total": total, "encoding": encoding, "non_embedding": total - tables}


def train_flops_per_token(model: GPT, length: int) -> int:
    """Count floating-point operations per token, forward and backward, without those of
    an encoding.

    The sum is 6 N + 6 n_layers d_model (T + 1). N counts the weights in matrix
    products, in the blocks and the head: each takes 2 operations forward and 4
    backward. In attention a token sees (T + 1) / 2 keys on average: each takes 2
    d_model operations in q·k and 2 d_model in the sum of values, and twice as many
    backward.
    """
    weights = (model.head or model.tokens).weight.numel()
    for weight in model.blocks.parameters():
        if weight.dim() >= 2:
            weights += weight.numel()
    pairs = model.config.n_layers * model.config.d_model * (length + 1)
    return 6 * weights + 6 * pairs


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, RMS_EPS)
    return nn.LayerNorm(config.d_model, bias=False)
