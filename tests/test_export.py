"""An exported run is the run by transformers alone: its logits and tokens; what cannot
be so is refused.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import yaml

from posbench import encodings
from posbench.config.schema import Config, to_container, validate
from posbench.data import tokenizer as tokenizers
from posbench.errors import UserError
from posbench.huggingface import export
from posbench.huggingface.card import Exported
from posbench.model.gpt import build
from posbench.run import TOKENIZER, checkpoint
from posbench.run.model import model_of
from posbench.run.rows import evaluation_rows
from posbench.run.run import load_config

transformers = pytest.importorskip("transformers")
BYTES = tokenizers.raw_bytes()

LLAMA: dict[str, Any] = {"norm": "rmsnorm", "mlp": "swiglu", "tie_embeddings": False}
MIXED = {"name": "layered", "layers": [{"name": "rope", "window": 5}, {"name": "none"}]}

# An encoding with its options, and a block.
EXACT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *[({"name": name}, LLAMA) for name in encodings._STOCK.split()],
    ({"name": "rope", "layout": "half", "base": 500.0}, LLAMA),
    ({"name": "rope", "layout": "half"}, LLAMA | {"tie_embeddings": True, "d_ff": 48}),
    ({"name": "yarn", "ramp": "rotations", "beta": 2.0}, LLAMA),
    ({"name": "longrope", "original_length": 12}, LLAMA),
    ({"name": "dynamic_ntk", "factor": 2.0}, LLAMA),
]


def configured(
    template: Config, encoding: dict[str, Any], block: dict[str, Any] | None = None
) -> Config:
    """Return the configuration of a run with a training length of 24 tokens."""
    plain = to_container(template) | {"encoding": encoding}
    plain["model"] |= block or {}
    plain["training"] |= {"train_length": 24, "tokens": 8 * 24 * 4}
    return validate(Config, plain)


def written(
    folder: Path, config: Config, tokenizer: tokenizers.Tokenizer = BYTES
) -> Path:
    """Write a run folder with random weights: initial weights would hide a missing norm
    or factor.
    """
    run = folder / config.id
    run.mkdir(parents=True)
    stream = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(weight.shape, generator=stream) * 0.1 + (weight.dim() == 1)
        for name, weight in (
            build(config, tokenizer.vocab_size, tokenizer.texts).state_dict().items()
        )
    }
    checkpoint.save(run, config.training.steps, weights, {}, {})
    tokenizer.save(run / TOKENIZER)
    (run / "config.yaml").write_text(yaml.safe_dump(to_container(config)))
    (run / "run.json").write_text(
        json.dumps({"schema": 1, "id": run.name, "tokenizer_sha256": tokenizer.sha256})
    )
    return run


@torch.inference_mode()
def assert_is_the_run(folder: Path, run: Path) -> tuple[Any, Any]:
    """Compare logits at all lengths and steps of a generated text, with and without a
    cache; return both models.
    """
    assert "at 1, 16, 24" in (folder / "README.md").read_text()
    ours = model_of(run, load_config(run), BYTES)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    start = min(20, (ours.encoding.max_length or 28) - 8)
    ids = torch.randint(256, (2, start), generator=torch.Generator().manual_seed(2))
    asked = {
        "output_logits": True,
        "return_dict_in_generate": True,
        "do_sample": False,
        "min_new_tokens": 8,
    }
    for cache in ({}, {"use_cache": False}):
        made = theirs.generate(ids, max_new_tokens=8, **asked, **cache)
        for step, logits in enumerate(made.logits):
            wanted = ours(made.sequences[:, : ids.shape[1] + step])[:, -1]
            assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max(), (
                cache,
                step,
            )
    return ours, theirs


@pytest.mark.sample(12)
@pytest.mark.parametrize(("encoding", "block"), EXACT)
def test_logits_are_those_of_the_run(encoding, block, tiny_config, tmp_path):
    run = written(tmp_path, configured(tiny_config, encoding, block))
    export.export(run, tmp_path / "out")
    _, theirs = assert_is_the_run(tmp_path / "out", run)
    assert theirs.config.use_cache is (
        encoding["name"] not in ("longrope", "dynamic_ntk")
    )


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", encodings.names())
def test_every_encoding_goes_out_as_code_or_as_the_architectures_that_the_list_names(
    name, tiny_config, tmp_path
):
    """Tables that are not saved are computed again, as transformers leaves them
    unset.
    """
    encoding = MIXED if name == "layered" else {"name": name}
    # their parameters depend on it
    block = {"n_kv_heads": 1} if name in ("canon", "cca", "fox_pro") else None
    run = written(tmp_path, configured(tiny_config, encoding, block))
    export.export(run, tmp_path / "out", code=True)
    ours, theirs = assert_is_the_run(tmp_path / "out", run)
    assert {k: v.tolist() for k, v in ours.named_buffers()} == {
        k: v.tolist() for k, v in theirs.model.named_buffers()
    }
    if not encodings.architectures(ours.encoding):
        with pytest.raises(
            UserError,
            match=f"no stock architecture has '{name}': expected 'rope'.*code=true",
        ):
            export.stock(ours, configured(tiny_config, encoding, LLAMA))


Q = "model.layers.0.self_attn.q_proj.weight"
# An encoding, a block, and a change of settings or tensors that makes another model.
OTHERS: dict[
    str, tuple[str, dict[str, Any], Callable[[dict[str, Any], dict[str, Any]], object]]
] = {
    "a tensor left out": (
        "rope",
        LLAMA,
        lambda settings, tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
    ),
    "another epsilon": (
        "rope",
        LLAMA,
        lambda settings, tensors: settings.update(rms_norm_eps=1e-5),
    ),
    "the wrong layout": (
        "rope",
        LLAMA,
        lambda settings, tensors: tensors.update({Q: tensors[Q].flip(0)}),
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", OTHERS)
def test_another_model_is_refused_and_leaves_nothing(
    what, tiny_config, tmp_path, monkeypatch
):
    name, block, change = OTHERS[what]
    stock = export.stock

    def other(*given: Any) -> Exported:
        made = stock(*given)
        change(made.settings, made.tensors)
        return made

    monkeypatch.setattr(export, "stock", other)
    run = written(tmp_path, configured(tiny_config, {"name": name}, block))
    with pytest.raises(
        UserError,
        match=(
            r"(is not the trained one.*nothing is kept|do not match its configuration)"
        ),
    ):
        export.export(run, tmp_path / "out")
    assert os.listdir(tmp_path) == [run.name]


def test_what_cannot_be_exported_is_refused_in_one_line(tiny_config, tmp_path, capsys):
    """Refused are a model that no architecture has, and a folder that is not empty."""
    (tmp_path / "full" / "mine").mkdir(parents=True)
    gelu = "has model.norm=layernorm with model.mlp=gelu: expected model=llama; code=t"
    for name, encoding, block, place, message in (
        ("a", "fire", LLAMA, "out", "no stock architecture has 'fire'"),
        ("b", "rope", {}, "out", gelu),
        ("c", "rope", LLAMA | {"qk_norm": True}, "out", "qk_norm=true: expected false"),
        ("d", "rope", LLAMA | {"n_kv_heads": 1}, "out", "n_kv_heads=1: expected null"),
        ("e", "rope", LLAMA | {"d_ff": 0}, "out", "model.d_ff=0: expected null"),
        ("f", "rope", LLAMA, "full", "exists: expected a new folder or an empty one"),
    ):
        config = configured(tiny_config, {"name": encoding}, block)
        run = written(tmp_path / name, config)
        assert support.posbench("export", str(run), str(tmp_path / place)) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_library_makes_the_same_tokens(tiny_config, tmp_path):
    support.write_text(tmp_path)
    text = (tmp_path / "text.txt").read_text()
    trained = tokenizers.train_bpe([text], 400)
    texts = [
        "",
        " a  b\n\n\tc",
        "naïve 東京 🙂 e\u0301",
        "<|endoftext|>in a text<|endoftext|>",
        text[:500],
        "x" * 300,
    ]
    for tokenizer in (trained, BYTES):
        folder = tmp_path / tokenizer.sha256[:8]
        export.export(
            written(
                folder, configured(tiny_config, {"name": "rope"}, LLAMA), tokenizer
            ),
            folder / "out",
        )
        theirs = transformers.AutoTokenizer.from_pretrained(
            folder / "out", local_files_only=True
        )
        assert [theirs(text)["input_ids"] for text in texts] == [
            ids.tolist() for ids in tokenizer.encode(texts)
        ]
        assert theirs.decode(theirs(text[:500])["input_ids"]) == text[:500]
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.model_max_length) == (
            tokenizer.separator,
        ) * 2 + (24,)


@pytest.mark.slow
def test_the_curve_is_that_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    support.write_text()
    asked = [
        "data.path=text.txt",
        "targets=8",
        "blocks=8",
        "extension=yarn",
        "windowed=false",
        "ratio=1,2,8",
    ]
    tiny = [
        word
        for word in support.TINY
        if not word.startswith(("evaluation.", "training.train_length"))
    ]
    tiny += [
        "training.train_length=32",
        "training.precision=fp32",
        "training.tokens=4096",
        "runtime.cache=cache",
    ]
    assert support.posbench("train", "encoding=rope", "model=llama", *tiny, *asked) == 0
    (run,) = Path("outputs/demo").glob("rope-*")
    assert support.posbench("export", str(run), "out") == 0
    assert support.posbench("evaluate", "out", *asked, "precision=fp32") == 0
    (again,) = Path("outputs/models").glob("out-*")
    ours = losses(run)
    theirs = losses(again)
    assert len(ours) == 9
    assert theirs == pytest.approx(ours, abs=1e-6)


def losses(folder: Path) -> dict[tuple[str, int], float | None]:
    """Return the loss of each row of a folder, by curve and length."""
    rows = evaluation_rows(folder)
    return {(row.curve_name, row.length): row.nll for row in rows}
