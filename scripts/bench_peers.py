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
        self.blocks = nn.Sequential(
            *(NanoBlock(sizes.d_model, sizes.n_heads) for _ in range(sizes.n_layers))
        )
        self.norm = nn.LayerNorm(sizes.d_model, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(
            torch.arange(ids.shape[1], device=ids.device)
        )
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
        heads = (
            part.unflatten(-1, (self.n_heads, -1))
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        q, k, v = (head.transpose(1, 2) for head in heads)  # each (B, H, T, Dh)
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
    of = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.d_model,
        "num_hidden_layers": sizes.n_layers,
    }
    of |= {
        "num_attention_heads": sizes.n_heads,
        "max_position_embeddings": sizes.train_length,
    }
    # as in posbench: 8/3 of the width, in steps of 32
    width = -(-sizes.d_model * 8 // 96) * 32
    return HuggingFace(
        "llama", attention, **of, intermediate_size=width, tie_word_embeddings=True
    )


def mpt(sizes: Sizes, attention: str) -> nn.Module:
    of = {
        "vocab_size": sizes.vocab_size,
        "d_model": sizes.d_model,
        "n_layers": sizes.n_layers,
    }
    of |= {"n_heads": sizes.n_heads, "max_seq_len": sizes.train_length}
    return HuggingFace("mpt", attention, **of, emb_pdrop=0.0, resid_pdrop=0.0)


def x_transformers(**scheme: object) -> Callable[[Sizes, str], nn.Module]:
    def build(sizes: Sizes, attention: str) -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        head_dim = sizes.d_model // sizes.n_heads
        if "rotary_pos_emb" in scheme:
            scheme["rotary_emb_dim"] = head_dim  # all channels, as in posbench
        of = {
            "dim": sizes.d_model,
            "depth": sizes.n_layers,
            "heads": sizes.n_heads,
            "attn_dim_head": head_dim,
        }
        layers = Decoder(**of, attn_flash=attention == "flash", **scheme)
        whole = {
            "num_tokens": sizes.vocab_size,
            "max_seq_len": sizes.train_length,
            "tie_embedding": True,
        }
        return TransformerWrapper(**whole, attn_layers=layers, use_abs_pos_emb=False)

    return build


LLAMA = ("model=llama", "model.tie_embeddings=true")
# By name: what builds the peer (ids -> logits), posbench's encoding and words for the
# same model, the peer's kernels.
PEERS: dict[
    str, tuple[Callable[[Sizes, str], nn.Module], str, tuple[str, ...], tuple[str, ...]]
] = {
    "nanogpt": (NanoGPT, "learned", (), ("sdpa",)),
    "llama": (llama, "rope", LLAMA, ("sdpa", "eager")),
    "mpt": (mpt, "alibi", (), ("eager",)),
    "x-none": (x_transformers(), "none", (), ("eager", "flash")),
    "x-rope": (x_transformers(rotary_pos_emb=True), "rope", (), ("eager", "flash")),
    "x-alibi": (x_transformers(alibi_pos_bias=True), "alibi", (), ("eager", "flash")),
    # it refuses flash here
    "x-t5": (x_transformers(rel_pos_bias=True), "t5", (), ("eager",)),
}


class LikePosbench(nn.Module):
    """A peer that can be called as `posbench train` calls its model."""

    def __init__(self, peer: nn.Module) -> None:
        super().__init__()
        self.peer = peer

    def forward(self, ids: Tensor, labels: Tensor, **_: object) -> Tensor:
        # fp32, under autocast too
        return F.cross_entropy(self.peer(ids).flatten(0, 1), labels.flatten())


def measure(
    sizes: Sizes, rounds: int, threads: int | None, compiled: bool
) -> pd.DataFrame:
    """Return a row per peer and attention: its tokens per second, and quartiles of
    posbench's speed relative to it.
    """
    contenders, pairs = {}, {}
    for name, (make, encoding, words, attentions) in PEERS.items():
        given = [
            "runtime.device=cpu",
            f"runtime.compile={str(compiled).lower()}",
            *words,
        ]
        config = bench.configurations([encoding], sizes, threads, given)[encoding]
        ours = build(config, sizes.vocab_size)
        against = f"posbench {encoding}{' llama' if words else ''}"
        contenders[against] = bench.update_of(ours, config, sizes.vocab_size)
        for attention in attentions:
            theirs = make(sizes, attention)
            ratio = sum(p.numel() for p in theirs.parameters()) / sum(
                p.numel() for p in ours.parameters()
            )
            assert abs(ratio - 1) <= 0.02, (
                f"{name} has {ratio:.3f} times as many parameters as {against}"
            )
            model = LikePosbench(torch.compile(theirs) if compiled else theirs)
            contenders[f"{name} {attention}"] = bench.update_of(
                model, config, sizes.vocab_size
            )
            pairs[f"{name} {attention}"] = against
    seconds = bench.take_turns(contenders, rounds, torch.device("cpu"))
    ratios = pd.DataFrame(
        {name: seconds[name] / seconds[ours] for name, ours in pairs.items()}
    )
    speeds = sizes.train_length * sizes.batch_size / seconds[list(pairs)].median()
    quartiles = ratios.quantile([0.25, 0.5, 0.75]).T.add_prefix(
        "posbench / peer, quantile "
    )
    return pd.DataFrame({"against": pd.Series(pairs), "tokens/s": speeds.round()}).join(
        quartiles.round(2)
    )


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
    sizes = bench.sizes_of(asked.shape, asked.length)
    print(measure(sizes, asked.rounds, asked.threads, asked.compile).to_string())
    print(f"{sizes}, {torch.get_num_threads()} threads, torch {torch.__version__}")
