"""Training speed of posbench beside other implementations of the same models, in one process and by turns.

    python scripts/bench_peers.py --shape 12m --threads 2
    python scripts/bench_peers.py llama mpt --shape 3m --json

All contenders have the same layers, heads, width, vocabulary, tied head and batch, no dropout and no key-value cache,
and parameters within 2 % of posbench's model. All take the steps of `posbench train`: its batches, clipping, finite
checks, fused AdamW and loss in fp32. A peer's loss is torch's cross-entropy, as in these libraries. Each peer runs with
each of its attentions in posbench's dtype (bf16 if the machine is good at it), and as it comes: in fp32 with its own
choice of attention. With --compile each also runs under torch.compile, peers as a whole, posbench by `runtime.compile`;
"first" is then the time of the first two steps, in seconds, with an existing compiler cache. Threads and allocator are
the same for all: those of `posbench train`, or with --default-malloc the defaults. Needs the dependency group `peers`.
"""

import dataclasses
import json
import time
from collections.abc import Callable

import arguments
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench import machine
from posbench.bench import speed
from posbench.bench.speed import Sizes, TrainingStep
from posbench.bench.timing import Timings, load_average, take_turns
from posbench.config.schema import Config
from posbench.errors import PosbenchError, UserError, did_you_mean
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


def gpt2(sizes: Sizes, attention: str) -> nn.Module:
    from transformers import GPT2Config

    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.train_length,
        n_embd=sizes.d_model,
        n_layer=sizes.n_layers,
        n_head=sizes.n_heads,
        bos_token_id=0,
        eos_token_id=0,
        **none,
    )
    return HuggingFace(config, attention)


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


def bloom(sizes: Sizes, attention: str) -> nn.Module:
    from transformers import BloomConfig

    config = BloomConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.d_model,
        n_layer=sizes.n_layers,
        n_head=sizes.n_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
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
    attentions: tuple[str, ...]  # those it offers; the first is its default
    overrides: tuple[str, ...] = ()  # overrides that make posbench's model the same


LLAMA = ("model=llama", "model.tie_embeddings=true")
PEERS = {
    "nanogpt": Peer(NanoGPT, "learned", ("sdpa",)),
    "gpt2": Peer(gpt2, "learned", ("sdpa", "eager")),
    "llama": Peer(llama, "rope", ("sdpa", "eager"), LLAMA),
    "bloom": Peer(bloom, "alibi", ("eager",)),
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


@dataclasses.dataclass(frozen=True)
class Variant:
    """A peer with one attention in one dtype."""

    peer: str
    attention: str
    dtype: str
    compiled: bool = False

    @property
    def default_attention(self) -> bool:
        return self.attention == PEERS[self.peer].attentions[0]

    def ours(self, dtype: str | None = None, compiled: bool = False) -> str:
        """The posbench contender to compare with."""
        block = " llama" if PEERS[self.peer].overrides else ""
        return f"posbench {PEERS[self.peer].encoding}{block} {dtype or self.dtype}{' compiled' if compiled else ''}"


@dataclasses.dataclass(frozen=True)
class Row:
    """Speeds and ratios are medians over the rounds; ratios are posbench / peer, above 1 where posbench is faster."""

    peer: str
    attention: str
    dtype: str
    compiled: bool
    default: bool  # the peer as it comes: fp32, its own choice of attention
    default_attention: bool
    fastest: bool  # of this peer's variants
    posbench: str
    parameters: int
    tokens_per_second: float
    tokens_per_cpu_second: float
    ratio_same_dtype: float
    ratio: float  # posbench as it comes
    ratio_low: float  # quartiles
    ratio_high: float
    ratio_cpu: float
    ratio_compiled: float | None  # posbench compiled
    ratio_compiled_low: float | None
    ratio_compiled_high: float | None
    first_seconds: float  # of the first two steps: compiling, warming up


def variants(names: list[str], fast: str, compiled: bool = False) -> list[Variant]:
    """Every attention in the machine's fast dtype, compiled too if wanted, and the default one in fp32."""
    found = [Variant(name, attention, fast) for name in names for attention in PEERS[name].attentions]
    found += [dataclasses.replace(variant, compiled=True) for variant in found if compiled]
    found += [Variant(name, PEERS[name].attentions[0], "fp32") for name in names]
    return sorted(set(found), key=lambda one: (names.index(one.peer), one.dtype, one.attention, one.compiled))


def measure(
    names: list[str],
    sizes: Sizes,
    rounds: int,
    threads: int | None,
    keep_freed_memory: bool = True,
    compiled: bool = False,
) -> tuple[list[Row], str]:
    """Rows in the order of the names, and a line on how they were measured."""
    for name in names:
        if name not in PEERS:
            raise UserError(f"unknown peer '{name}'{did_you_mean(name, PEERS)} (there are {', '.join(PEERS)})")
    device, dtype = speed.setup(speed.configuration("none", sizes, threads, ["runtime.device=cpu"]))
    if keep_freed_memory:
        machine.keep_freed_memory()
    fast = machine.dtype_name(dtype)
    load = load_average(torch.get_num_threads())
    contenders: dict[str, TrainingStep] = {}
    parameters: dict[str, int] = {}
    first: dict[str, float] = {}

    def enter(name: str, model: nn.Module, config: Config) -> None:
        parameters[name] = sum(p.numel() for p in model.parameters())
        contenders[name] = speed.training_step(config, sizes.vocab_size, model)
        began = time.perf_counter()
        for _ in range(2):
            contenders[name]()
        first[name] = time.perf_counter() - began

    chosen = variants(names, fast, compiled)
    for variant in chosen:
        peer = PEERS[variant.peer]
        for dtype_name, own in {(variant.dtype, False), (fast, False), (fast, compiled)}:
            given = ["runtime.device=cpu", f"training.precision={dtype_name}", *peer.overrides]
            if variant.ours(dtype_name, own) not in contenders:
                config = speed.configuration(
                    peer.encoding, sizes, threads, [*given, f"runtime.compile={str(own).lower()}"]
                )
                enter(variant.ours(dtype_name, own), build(config, sizes.vocab_size), config)
        given = ["runtime.device=cpu", f"training.precision={variant.dtype}", *peer.overrides]
        model = LikePosbench(peer.build(sizes, variant.attention))
        if variant.compiled:
            model.peer = torch.compile(model.peer)
        enter(str(variant), model, speed.configuration(peer.encoding, sizes, threads, given))
        ratio = parameters[str(variant)] / parameters[variant.ours()]
        if abs(ratio - 1) > PARAMETERS_APART:
            raise PosbenchError(f"{variant.peer} has {ratio:.3f} times as many parameters as {variant.ours()}")

    timings = take_turns(contenders, rounds, device, dtype)
    tokens = sizes.train_length * sizes.batch_size
    rows = [_row(variant, chosen, timings, tokens, parameters, first, fast) for variant in chosen]
    caption = (
        f"{sizes.n_layers} layers, {sizes.n_heads} heads, width {sizes.d_model}, vocabulary {sizes.vocab_size}, "
        f"{sizes.batch_size} x {sizes.train_length} tokens per step, {torch.get_num_threads()} threads, "
        f"{'posbench' if keep_freed_memory else 'default'} malloc, medians of {rounds} rounds, load before {load:.1f}, "
        f"{fast} matrix product {np.median(timings.peaks) / 1e9:,.0f} GFLOP/s, torch {torch.__version__}"
    )
    return rows, caption


def _row(
    variant: Variant,
    chosen: list[Variant],
    timings: Timings,
    tokens: int,
    parameters: dict[str, int],
    first: dict[str, float],
    fast: str,
) -> Row:
    name, ours, ours_compiled = str(variant), variant.ours(fast), variant.ours(fast, compiled=True)

    def compiled_ratio(quantile: float) -> float | None:
        return timings.ratio(ours_compiled, name, quantile) if ours_compiled in timings.wall else None

    speeds = {str(v): float(np.median(tokens / timings.wall[str(v)])) for v in chosen if v.peer == variant.peer}
    return Row(
        peer=variant.peer,
        attention=variant.attention,
        dtype=variant.dtype,
        compiled=variant.compiled,
        default=variant.default_attention and variant.dtype == "fp32",
        default_attention=variant.default_attention,
        fastest=speeds[name] == max(speeds.values()),
        posbench=ours,
        parameters=parameters[name],
        tokens_per_second=speeds[name],
        tokens_per_cpu_second=float(np.median(tokens / timings.cpu[name])),
        ratio_same_dtype=timings.ratio(variant.ours(), name),
        ratio=timings.ratio(ours, name),
        ratio_low=timings.ratio(ours, name, quantile=0.25),
        ratio_high=timings.ratio(ours, name, quantile=0.75),
        ratio_cpu=float(np.median(timings.cpu[name] / timings.cpu[ours])),
        ratio_compiled=compiled_ratio(0.5),
        ratio_compiled_low=compiled_ratio(0.25),
        ratio_compiled_high=compiled_ratio(0.75),
        first_seconds=first[name],
    )


def table(rows: list[Row]) -> str:
    headers = ["peer", "attention", "dtype", "", "tokens/s", "against", "same dtype", "posbench / peer", "quartiles"]
    if any(row.ratio_compiled is not None for row in rows):
        headers += ["posbench compiled / peer", "quartiles", "first"]
    return speed.markdown(headers, [_cells(row)[: len(headers)] for row in rows])


def _cells(row: Row) -> list[str]:
    marks = {"as it comes": row.default, "default attention": row.default_attention and not row.default}
    marks |= {"compiled": row.compiled, "fastest": row.fastest}
    cells = [
        row.peer,
        row.attention,
        row.dtype,
        ", ".join(mark for mark, true in marks.items() if true),
        f"{row.tokens_per_second:,.0f}",
        row.posbench,
        f"{row.ratio_same_dtype:.2f}",
        f"{row.ratio:.2f}",
        f"{row.ratio_low:.2f}-{row.ratio_high:.2f}",
    ]
    if row.ratio_compiled is not None:
        cells += [f"{row.ratio_compiled:.2f}", f"{row.ratio_compiled_low:.2f}-{row.ratio_compiled_high:.2f}"]
        cells.append(f"{row.first_seconds:.1f} s")
    return cells


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("peers", nargs="*", help=f"default all: {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--default-malloc", action="store_true", help="leave the C library's allocator as it comes")
    parser.add_argument("--compile", action="store_true", help="every contender under torch.compile, too")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with arguments.errors_in_one_line():
        sizes = speed.find_shape(given.shape, given.length)
        rows, caption = measure(
            given.peers or list(PEERS), sizes, given.rounds, given.threads, not given.default_malloc, given.compile
        )
    if given.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, allow_nan=False))
    else:
        print(table(rows), caption, sep="\n\n")


if __name__ == "__main__":
    main()
