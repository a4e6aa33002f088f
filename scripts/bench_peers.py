"""Compare the training speed of posbench with other implementations of the same models,
by turns in one process.

    python scripts/bench_peers.py --shape 12m --compile

All contenders have the same layers, heads, width, vocabulary, tied head and batch, no
dropout and no key-value cache, and parameters within 2 % of posbench's model. All take
the steps of `posbench train`: its batches, clipping, finite checks, fused AdamW,
precision, threads and allocator. A peer's loss is torch's cross-entropy, as in these
libraries. With --compile all run under torch.compile. Needs the dependency group
`peers`.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench import bench
from posbench.bench import Sizes
from posbench.model.gpt import build


class NanoGPT(nn.Module):
    """GPT-2 as nanoGPT describes itself: one packed projection, fused attention,
    learned positions, no biases.
    """

    def __init__(self, sizes: Sizes, attention: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.positions = nn.Embedding(sizes.train_length, sizes.d_model)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential()
        for _ in range(sizes.n_layers):
            self.blocks.append(NanoBlock(sizes.d_model, sizes.n_heads))
        self.norm = nn.LayerNorm(sizes.d_model, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class NanoBlock(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.mlp_norm = nn.LayerNorm(d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = packed.permute(2, 0, 3, 1, 4)  # (B, H, T, Dh) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class HuggingFace(nn.Module):
    """A decoder of `transformers` that returns only logits."""

    def __init__(self, kind: str, attention: str, **options: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        config = AutoConfig.for_model(kind, **options)
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def llama(sizes: Sizes, attention: str) -> nn.Module:
    # as in posbench: 8/3 of the width, in steps of 32
    width = math.ceil(sizes.d_model * 8 / 96) * 32
    return HuggingFace(
        "llama",
        attention,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.d_model,
        intermediate_size=width,
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=sizes.n_heads,
        max_position_embeddings=sizes.train_length,
        tie_word_embeddings=True,
    )


def mpt(sizes: Sizes, attention: str) -> nn.Module:
    return HuggingFace(
        "mpt",
        attention,
        vocab_size=sizes.vocab_size,
        d_model=sizes.d_model,
        n_layers=sizes.n_layers,
        n_heads=sizes.n_heads,
        max_seq_len=sizes.train_length,
        emb_pdrop=0.0,
        resid_pdrop=0.0,
    )


def x_transformers(sizes: Sizes, attention: str, **scheme: object) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    head_dim = sizes.d_model // sizes.n_heads
    layers = Decoder(
        dim=sizes.d_model,
        depth=sizes.n_layers,
        heads=sizes.n_heads,
        attn_dim_head=head_dim,
        rotary_emb_dim=head_dim,  # all channels, as in posbench
        attn_flash=attention == "flash",
        **scheme,
    )
    return TransformerWrapper(
        num_tokens=sizes.vocab_size,
        max_seq_len=sizes.train_length,
        tie_embedding=True,
        attn_layers=layers,
        use_abs_pos_emb=False,
    )


@dataclasses.dataclass
class Peer:
    """What builds a peer (ids -> logits) with one of its attention kernels, and
    posbench's encoding and words for the same model.
    """

    build: Callable[[Sizes, str], nn.Module]
    encoding: str
    kernels: tuple[str, ...]
    words: tuple[str, ...] = ()


LLAMA = ("model=llama", "model.tie_embeddings=true")
BOTH = ("eager", "flash")
X_ROPE = functools.partial(x_transformers, rotary_pos_emb=True)
X_ALIBI = functools.partial(x_transformers, alibi_pos_bias=True)
X_T5 = functools.partial(x_transformers, rel_pos_bias=True)
PEERS = {
    "nanogpt": Peer(NanoGPT, "learned", ("sdpa",)),
    "llama": Peer(llama, "rope", ("sdpa", "eager"), LLAMA),
    "mpt": Peer(mpt, "alibi", ("eager",)),
    "x-none": Peer(x_transformers, "none", BOTH),
    "x-rope": Peer(X_ROPE, "rope", BOTH),
    "x-alibi": Peer(X_ALIBI, "alibi", BOTH),
    "x-t5": Peer(X_T5, "t5", ("eager",)),  # it refuses flash here
}


class LikePosbench(nn.Module):
    """A peer that can be called as `posbench train` calls its model."""

    def __init__(self, peer: nn.Module) -> None:
        super().__init__()
        self.peer = peer

    def forward(self, ids: Tensor, labels: Tensor, **_: object) -> Tensor:
        logits = self.peer(ids).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten())  # fp32, under autocast too


def measure(
    sizes: Sizes, rounds: int, threads: int | None, compiled: bool
) -> pd.DataFrame:
    """Return a row per peer and attention: its tokens per second, and quartiles of
    posbench's speed relative to it.
    """
    contenders: dict[str, Any] = {}
    ours_of = {}  # by the peer: posbench's model beside it
    typed = [
        "training.optimizer=adamw",  # whose step a peer takes, too
        "runtime.device=cpu",
        f"runtime.compile={str(compiled).lower()}",
        f"runtime.threads={threads or 'null'}",
    ]
    for name, peer in PEERS.items():
        encoding = peer.encoding
        words = [*typed, *peer.words]
        config = bench.configurations([encoding], sizes, words)[encoding]
        model = build(config, sizes.vocab_size)
        ours = f"posbench {encoding}"
        if peer.words:
            ours += " llama"
        contenders[ours] = bench.update_of(model, config, sizes.vocab_size)
        for kernel in peer.kernels:
            theirs = peer.build(sizes, kernel)
            ratio = _n_parameters(theirs) / _n_parameters(model)
            assert abs(ratio - 1) <= 0.02, (
                f"{name} has {ratio:.3f} times as many parameters as {ours}"
            )
            if compiled:
                theirs = torch.compile(theirs)
            update = bench.update_of(LikePosbench(theirs), config, sizes.vocab_size)
            contenders[f"{name} {kernel}"] = update
            ours_of[f"{name} {kernel}"] = ours

    seconds = bench.take_turns(contenders, rounds, torch.device("cpu"))
    tokens = sizes.train_length * sizes.batch_size
    speeds = tokens / seconds[list(ours_of)].median()
    ratios = {name: seconds[name] / seconds[ours] for name, ours in ours_of.items()}
    quartiles = pd.DataFrame(ratios).quantile([0.25, 0.5, 0.75]).T
    quartiles = quartiles.add_prefix("posbench / peer, quantile ").round(2)
    table = pd.DataFrame({"against": pd.Series(ours_of), "tokens/s": speeds.round()})
    return table.join(quartiles)


def _n_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="3m", choices=bench.SHAPES)
    parser.add_argument(
        "--length", type=int, help="training length, at equal tokens per batch"
    )
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--compile", action="store_true", help="all contenders under torch.compile"
    )
    asked = parser.parse_args()
    sizes = bench.sizes_of(asked.shape)
    if asked.length:
        tokens = sizes.train_length * sizes.batch_size
        batch_size = max(1, tokens // asked.length)
        sizes = dataclasses.replace(
            sizes, train_length=asked.length, batch_size=batch_size
        )
    print(measure(sizes, asked.rounds, asked.threads, asked.compile).to_string())
    print(f"{sizes}, {torch.get_num_threads()} threads, torch {torch.__version__}")
