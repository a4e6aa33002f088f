"""Training speed of posbench beside other implementations of the same models, in one process and by turns.

    python scripts/bench_peers.py --shape 12m --threads 2
    python scripts/bench_peers.py llama mpt --shape 3m --compile

All contenders have the same layers, heads, width, vocabulary, tied head and batch, no dropout and no key-value cache,
and parameters within 2 % of posbench's model. All take the steps of `posbench train`: its batches, clipping, finite
checks, fused AdamW, precision, threads and allocator. A peer's loss is torch's cross-entropy, as in these libraries.
With --compile all run under torch.compile, peers as a whole, posbench by `runtime.compile`. Needs the dependency group
`peers`.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench import bench
from posbench.bench import Sizes
from posbench.errors import PosbenchError, unknown
from posbench.model.gpt import build

PARAMETERS_APART = 0.02  # largest difference, as a fraction of posbench's
Build = Callable[[Sizes, str], nn.Module]  # (sizes, attention) -> a model that maps ids (B, T) to logits (B, T, V)


# -- peers -------------------------------------------------------------------------------------------------------------


class NanoGPT(nn.Module):
    """GPT-2 as nanoGPT describes itself: one packed projection, fused attention, learned positions, no biases."""

    def __init__(self, sizes: Sizes, attention: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.positions = nn.Embedding(sizes.train_length, sizes.d_model)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*(NanoBlock(sizes.d_model, sizes.n_heads) for _ in range(sizes.n_layers)))
        self.norm = nn.LayerNorm(sizes.d_model, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
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
        heads = (part.unflatten(-1, (self.n_heads, -1)) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        q, k, v = (head.transpose(1, 2) for head in heads)  # each (B, H, T, Dh)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class HuggingFace(nn.Module):
    """A decoder of `transformers` that returns only logits."""

    def __init__(self, config: object, attention: str) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def llama(sizes: Sizes, attention: str) -> nn.Module:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.d_model,
        intermediate_size=-(-sizes.d_model * 8 // 96) * 32,  # as posbench: 8/3 of the width, in steps of 32
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=sizes.n_heads,
        max_position_embeddings=sizes.train_length,
        tie_word_embeddings=True,
    )
    return HuggingFace(config, attention)


def mpt(sizes: Sizes, attention: str) -> nn.Module:
    from transformers import MptConfig

    config = MptConfig(
        vocab_size=sizes.vocab_size,
        d_model=sizes.d_model,
        n_layers=sizes.n_layers,
        n_heads=sizes.n_heads,
        max_seq_len=sizes.train_length,
        emb_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return HuggingFace(config, attention)


def x_transformers(**scheme: object) -> Build:
    def build(sizes: Sizes, attention: str) -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        head_dim = sizes.d_model // sizes.n_heads
        layers = Decoder(
            dim=sizes.d_model,
            depth=sizes.n_layers,
            heads=sizes.n_heads,
            attn_dim_head=head_dim,
            attn_flash=attention == "flash",
            **({"rotary_emb_dim": head_dim} if "rotary_pos_emb" in scheme else {}),  # all channels, as posbench
            **scheme,
        )
        return TransformerWrapper(
            num_tokens=sizes.vocab_size,
            max_seq_len=sizes.train_length,
            attn_layers=layers,
            tie_embedding=True,
            use_abs_pos_emb=False,
        )

    return build


@dataclasses.dataclass(frozen=True)
class Peer:
    build: Build
    encoding: str  # the posbench encoding to compare with
    attentions: tuple[str, ...]  # those it offers
    overrides: tuple[str, ...] = ()  # overrides that make posbench's model the same

    @property
    def ours(self) -> str:
        """The posbench contender to compare with."""
        return f"posbench {self.encoding}{' llama' if self.overrides else ''}"


LLAMA = ("model=llama", "model.tie_embeddings=true")
PEERS = {
    "nanogpt": Peer(NanoGPT, "learned", ("sdpa",)),
    "llama": Peer(llama, "rope", ("sdpa", "eager"), LLAMA),
    "mpt": Peer(mpt, "alibi", ("eager",)),
    "x-none": Peer(x_transformers(), "none", ("eager", "flash")),
    "x-rope": Peer(x_transformers(rotary_pos_emb=True), "rope", ("eager", "flash")),
    "x-alibi": Peer(x_transformers(alibi_pos_bias=True), "alibi", ("eager", "flash")),
    "x-t5": Peer(x_transformers(rel_pos_bias=True), "t5", ("eager",)),  # it refuses flash here
}


class LikePosbench(nn.Module):
    """A peer called as `posbench train` calls its model."""

    def __init__(self, peer: nn.Module) -> None:
        super().__init__()
        self.peer = peer

    def forward(self, ids: Tensor, labels: Tensor, **_: object) -> Tensor:
        return F.cross_entropy(self.peer(ids).flatten(0, 1), labels.flatten())  # fp32, under autocast too


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(names: list[str], sizes: Sizes, rounds: int, threads: int | None, compiled: bool) -> pd.DataFrame:
    """Return a row per peer and attention: its tokens per second, and posbench's speed over its own, with quartiles."""
    for name in names:
        if name not in PEERS:
            raise unknown("peer", name, PEERS)
    contenders, pairs = {}, {}
    for name in names:
        peer = PEERS[name]
        given = ["runtime.device=cpu", f"runtime.compile={str(compiled).lower()}", *peer.overrides]
        config = bench.configurations([peer.encoding], sizes, threads, given)[peer.encoding]
        ours = build(config, sizes.vocab_size)
        contenders[peer.ours] = bench.update_of(ours, config, sizes.vocab_size)
        for attention in peer.attentions:
            theirs = peer.build(sizes, attention)
            ratio = sum(p.numel() for p in theirs.parameters()) / sum(p.numel() for p in ours.parameters())
            if abs(ratio - 1) > PARAMETERS_APART:
                raise PosbenchError(f"{name} has {ratio:.3f} times as many parameters as {peer.ours}")
            model = LikePosbench(torch.compile(theirs) if compiled else theirs)
            contenders[f"{name} {attention}"] = bench.update_of(model, config, sizes.vocab_size)
            pairs[f"{name} {attention}"] = peer.ours
    seconds = bench.take_turns(contenders, rounds, torch.device("cpu"))
    ratios = pd.DataFrame({name: seconds[name] / seconds[ours] for name, ours in pairs.items()})
    speeds = sizes.train_length * sizes.batch_size / seconds[list(pairs)].median()
    quartiles = ratios.quantile([0.25, 0.5, 0.75]).T.add_prefix("posbench / peer, quantile ")
    return pd.DataFrame({"against": pd.Series(pairs), "tokens/s": speeds.round()}).join(quartiles.round(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help=f"default all: {', '.join(PEERS)}")
    parser.add_argument("--shape", default="3m", help=", ".join(bench.SHAPES))
    parser.add_argument("--length", type=int, help="training length, at equal tokens per batch")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="all contenders under torch.compile")
    given = parser.parse_args()
    try:
        sizes = bench.sizes_of(given.shape, given.length)
        frame = measure(given.peers or list(PEERS), sizes, given.rounds, given.threads, given.compile)
        print(f"{frame.to_string()}\n{sizes}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    except PosbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
