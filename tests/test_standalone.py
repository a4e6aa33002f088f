"""`posbench.attention` in models of others: every scheme, whole, by a key-value cache, and what it refuses."""

from typing import Any

import pytest
import schemes
import torch
from disks import in_child
from torch import Tensor

import posbench
from posbench.encodings.base import Encoding, Shape
from posbench.errors import Undefined, UserError

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=32)
CASES = pytest.mark.parametrize("case", schemes.parameters())
T = 19
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def built(case: tuple[str, dict[str, Any]]) -> tuple[Encoding, list[Tensor], Tensor | None]:
    """A scheme, q, k, v and x of T tokens, and positions where it chooses them."""
    encoding = schemes.build(*case, SHAPE)
    inputs = [one.detach() for one in schemes.layer_inputs(SHAPE, T)]
    chosen = encoding.positions(torch.zeros(2, T, dtype=torch.long), None) if "positions" in encoding.hooks else None
    return encoding, inputs, chosen


@CASES
@torch.no_grad()
def test_it_is_the_definition(case: tuple[str, dict[str, Any]]) -> None:
    encoding, (q, k, v, x), positions = built(case)
    for causal in (True, False):
        expected = posbench.attention_output(encoding, q, k, v, x, 1, positions, causal)
        out = posbench.attention(encoding, q, k, v, positions, 1, x, causal=causal)
        torch.testing.assert_close(out, expected, **CLOSE)


@CASES
@torch.no_grad()
def test_a_cache_gives_the_rows_of_the_whole_or_is_refused(case: tuple[str, dict[str, Any]]) -> None:
    encoding, (q, k, v, x), positions = built(case)
    if encoding.length_dependent or "q" in encoding.history:
        with pytest.raises(UserError, match="no key-value cache"):
            posbench.attention(encoding, q[:, :, -1:], k, v, positions, 1, x)
        return
    whole = posbench.attention(encoding, q, k, v, positions, 1, x)
    for first, end in ((0, 12), (12, 13), (13, 14), (14, T)):  # a prompt, two tokens one by one, five at once
        read = x[:, :end] if "x" in encoding.history else x[:, first:end]
        where = None if positions is None else positions[:, :end]
        out = posbench.attention(encoding, q[:, :, first:end], k[:, :, :end], v[:, :, :end], where, 1, read)
        torch.testing.assert_close(out, whole[:, :, first:end], **CLOSE)
    if "x" in encoding.history:
        with pytest.raises(UserError, match="keep x beside keys and values"):
            posbench.attention(encoding, q[:, :, -1:], k, v, positions, 1, x[:, -1:])


@CASES
@torch.no_grad()
def test_what_is_read_of_earlier_tokens_is_declared(case: tuple[str, dict[str, Any]]) -> None:
    encoding, (q, k, v, x), positions = built(case)
    last = posbench.attention(encoding, q, k, v, positions, 1, x)[:, :, -1]
    for name, earlier in (("q", q[:, :, :-1]), ("x", x[:, :-1])):
        kept = earlier.clone()
        earlier.copy_(torch.randn_like(kept))
        changed = posbench.attention(encoding, q, k, v, positions, 1, x)[:, :, -1]
        earlier.copy_(kept)
        assert torch.allclose(changed, last, **CLOSE) == (name not in encoding.history), name


@pytest.mark.parametrize("name", schemes.NAMES)
@torch.no_grad()
def test_models_in_16_bits_need_no_autocast(name: str) -> None:
    encoding, inputs, positions = built((name, {}))
    q, k, v, x = (one.bfloat16() for one in inputs)
    out = posbench.attention(encoding, q, k, v, positions, 1, x)
    exact = posbench.attention_output(encoding, q, k, v, x, 1, positions)
    assert out.dtype == torch.bfloat16
    assert float((out - exact).pow(2).mean().sqrt()) < 0.03 * float(exact.pow(2).mean().sqrt())


@pytest.mark.parametrize("name", ["rope", "alibi", "fox"])
def test_keys_may_have_fewer_heads(name: str) -> None:
    encoding = posbench.build_encoding(
        name, d_model=32, n_heads=4, n_layers=1, train_length=32, head_dim=16, n_kv_heads=2
    )
    q, k, v, x = torch.randn(2, 4, T, 16), torch.randn(2, 2, T, 16), torch.randn(2, 2, T, 16), torch.randn(2, T, 32)
    every = [one.repeat_interleave(2, 1) for one in (k, v)]
    out = posbench.attention(encoding, q, k, v, x=x, window=6)
    torch.testing.assert_close(out, posbench.attention(encoding, q, *every, x=x, window=6), **CLOSE)


def test_mistakes_are_told_in_one_line() -> None:
    rope = posbench.build_encoding("rope", d_model=32, n_heads=4, n_layers=2, train_length=32)
    alibi = posbench.build_encoding("alibi", d_model=32, n_heads=4, n_layers=2, train_length=32)
    q = k = v = torch.randn(1, 4, T, 8)
    for given, said in (
        ({"window": 0}, "window is 0"),
        ({"window": 4, "causal": False}, "causal=True"),
        ({"layer": 2}, "layer is 2"),
        ({"positions": torch.arange(3)}, "positions is"),
        ({"k": k[:, :, :5]}, "k is"),
        ({"encoding": alibi.to(torch.bfloat16)}, "was cast to torch.bfloat16"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            posbench.attention(**{"encoding": rope, "q": q, "k": k, "v": v} | given)
        assert "\n" not in str(caught.value)
    fox = posbench.build_encoding("fox", d_model=32, n_heads=4, n_layers=2, train_length=32)
    with pytest.raises(UserError, match="pass x"):
        posbench.attention(fox, q, k, v)
    sinusoidal = posbench.build_encoding("sinusoidal", d_model=32, n_heads=4, n_layers=2, train_length=32)
    with pytest.raises(UserError, match="acts on the model"):
        posbench.attention(sinusoidal, q, k, v)


@pytest.mark.parametrize("name", ["learned", "tupe"])
def test_positions_beyond_a_table_are_undefined(name: str) -> None:
    encoding, (q, k, v, x), _ = built((name, {}))
    positions = torch.arange(T) + SHAPE.train_length
    with pytest.raises(Undefined, match=f"position {T + 31} is beyond the end of '{name}'"):
        if name == "learned":
            encoding.embed(x, positions[None])
        posbench.attention(encoding, q, k, v, positions, 1, x)


@pytest.mark.full
@pytest.mark.parametrize("name", ["rope", "alibi", "fox", "sinusoidal"])
def test_a_module_around_it_compiles_without_a_graph_break(name: str) -> None:
    encoding, (q, k, v, x), _ = built((name, {}))

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoding = encoding

        def forward(self, q: Tensor, x: Tensor) -> Tensor:
            return posbench.attention(self.encoding, q, k, v, layer=1, x=x)

    def in_one_graph() -> None:
        compiled = torch.compile(Layer(), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, x), Layer()(q, x), **CLOSE)

    assert in_child(in_one_graph) == 0  # the compiler starts threads of autograd, after which no test can fork


def test_in_transformers_it_is_the_librarys_own_rope_with_and_without_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = posbench.build_encoding(
        "rope", d_model=64, n_heads=4, n_layers=2, train_length=32, n_kv_heads=2, layout="half"
    )

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any) -> tuple[Any, None]:
        return posbench.attention(encoding, query, key, value, layer=module.layer_idx).transpose(1, 2), None

    transformers.AttentionInterface.register("of_a_test", attend)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))

    def model(attention: str, turning: int) -> Any:
        torch.manual_seed(0)
        config = transformers.SmolLM3Config(
            vocab_size=50, num_key_value_heads=2, no_rope_layers=[turning] * 2, attn_implementation=attention,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **sizes, **ends,
        )  # fmt: skip
        return transformers.SmolLM3ForCausalLM(config).eval()

    ours, theirs = model("of_a_test", 0), model("eager", 1)
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)
        assert not torch.allclose(model("eager", 0)(ids).logits, theirs(ids).logits, atol=1e-3)
    how = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    told = [torch.stack(one.generate(ids, use_cache=cached, **how).logits) for one, cached in
            ((ours, True), (ours, False), (theirs, True))]  # fmt: skip
    torch.testing.assert_close(told[0], told[1], **CLOSE)
    torch.testing.assert_close(told[0], told[2], **CLOSE)
