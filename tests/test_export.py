"""An exported run is the run by transformers alone: its logits and tokens; what cannot
be so is refused.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import yaml
from torch import Tensor

from posbench import encodings
from posbench.config.schema import Config, to_container, validate
from posbench.data.tokenizer import Tokenizer, raw_bytes, train_bpe
from posbench.errors import UserError
from posbench.huggingface import export
from posbench.model.gpt import GPT, build
from posbench.run import TOKENIZER, checkpoint
from posbench.run.folder import load_config
from posbench.run.model import model_of
from posbench.run.rows import evaluation_rows

transformers = pytest.importorskip("transformers")
BYTES = raw_bytes()
Options = dict[str, Any]

ROPE = {"name": "rope"}
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "tie_embeddings": False}
MIXED = {"name": "layered", "layers": [{"name": "rope", "window": 5}, {"name": "none"}]}

# An encoding with its options, and a block.
STOCK = [({"name": name}, LLAMA) for name in encodings._STOCK.split()]
EXACT = [
    *STOCK,
    ({"name": "rope", "layout": "half", "base": 500.0}, LLAMA),
    ({"name": "rope", "layout": "half"}, LLAMA | {"tie_embeddings": True, "d_ff": 48}),
    ({"name": "yarn", "ramp": "rotations", "beta": 2.0}, LLAMA),
    ({"name": "longrope", "original_length": 12}, LLAMA),
    ({"name": "dynamic_ntk", "factor": 2.0}, LLAMA),
]


def configured(template: Config, encoding: Options, block: Options) -> Config:
    """Return the configuration of a run with a training length of 24 tokens."""
    plain = to_container(template)
    plain["encoding"] = encoding
    plain["model"].update(block)
    plain["training"].update(train_length=24, tokens=8 * 24 * 4)
    return validate(Config, plain)


def random_weights(config: Config, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Return weights that hide no missing norm or factor, as initial ones would."""
    model = build(config, tokenizer.vocab_size, tokenizer.texts)
    stream = torch.Generator().manual_seed(1)
    weights = {}
    for name, weight in model.state_dict().items():
        weights[name] = 0.1 * torch.randn(weight.shape, generator=stream)
        if weight.dim() == 1:
            weights[name] += 1
    return weights


def written(folder: Path, config: Config, tokenizer: Tokenizer = BYTES) -> Path:
    """Write a run's folder."""
    run = folder / config.id
    run.mkdir(parents=True)
    tokenizer.save(run / TOKENIZER)
    (run / "config.yaml").write_text(yaml.safe_dump(to_container(config)))
    record = {"schema": 3, "id": run.name, "status": "done"}
    record["tokenizer_sha256"] = tokenizer.sha256
    (run / "run.json").write_text(json.dumps(record))
    weights = random_weights(config, tokenizer)
    checkpoint.save(run, config.training.steps, weights, {}, {})
    return run


def trained(run: Path) -> GPT:
    return model_of(run, load_config(run), BYTES)


def loaded(folder: Path) -> Any:
    """Return what transformers alone makes of a folder."""
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def assert_generates_as(ours: GPT, theirs: Any) -> None:
    """Compare the logits of every step of a generated text, with and without a
    cache.
    """
    longest = ours.encoding.max_length or 28
    start = min(20, longest - 8)
    stream = torch.Generator().manual_seed(2)
    ids = torch.randint(256, (2, start), generator=stream)
    for cache in ({}, {"use_cache": False}):
        made = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # as a tokenizer gives it
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **cache,
        )
        for step, logits in enumerate(made.logits):
            read = made.sequences[:, : start + step]
            wanted = ours(read)[:, -1]
            difference = (logits - wanted).abs().max()
            largest = wanted.abs().max()
            assert difference <= 1e-5 * largest, (cache, step)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("encoding", "block"), EXACT)
def test_logits_are_those_of_the_run(encoding, block, tiny_config, tmp_path):
    config = configured(tiny_config, encoding, block)
    run = written(tmp_path, config)

    export.export(run, tmp_path / "out")

    theirs = loaded(tmp_path / "out")
    assert_generates_as(trained(run), theirs)
    follows_length = encoding["name"] in ("longrope", "dynamic_ntk")
    assert theirs.config.use_cache is not follows_length


@pytest.fixture
def rope_run(tiny_config, tmp_path) -> Path:
    """The folder of a run that has a stock architecture."""
    config = configured(tiny_config, ROPE, LLAMA)
    return written(tmp_path, config)


def test_logits_are_compared_at_one_token_and_up_to_four_trained_lengths(
    rope_run, tmp_path
):
    line = export.export(rope_run, tmp_path / "out")

    card = (tmp_path / "out" / "README.md").read_text()
    _, _, compared = line.partition(": ")
    assert line.endswith("at 1, 16, 24, 48, 96 tokens")
    assert compared in card


def test_logits_are_those_of_the_run_up_to_many_trained_lengths(rope_run, tmp_path):
    export.export(rope_run, tmp_path / "out")

    shares = export.compare(tmp_path / "out", trained(rope_run), [1, 96, 300])

    for length, share in shares.items():
        bound = max(1e-5, length / 2**24)
        assert share <= bound


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", encodings.names())
def test_every_encoding_goes_out_as_code(name, tiny_config, tmp_path):
    """Tables that are not saved are computed again, as transformers leaves them
    unset.
    """
    encoding = MIXED if name == "layered" else {"name": name}
    # their parameters depend on it
    block = {"n_kv_heads": 1} if name in ("canon", "cca", "fox_pro") else {}
    config = configured(tiny_config, encoding, block)
    run = written(tmp_path, config)

    export.export(run, tmp_path / "out", code=True)

    ours = trained(run)
    theirs = loaded(tmp_path / "out")
    assert_generates_as(ours, theirs)
    buffers = dict(theirs.model.named_buffers())
    wanted = dict(ours.named_buffers())
    assert buffers.keys() == wanted.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, wanted[name])


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", encodings.names())
def test_an_encoding_has_a_stock_architecture_if_the_list_says_so(name, tiny_config):
    encoding = MIXED if name == "layered" else {"name": name}
    config = configured(tiny_config, encoding, LLAMA)
    model = build(config, BYTES.vocab_size, BYTES.texts)
    if encodings.architectures(model.encoding):
        export.stock(model, config)
    else:
        message = f"no stock architecture that has '{name}': expected 'rope'.*code=true"
        with pytest.raises(UserError, match=message):
            export.stock(model, config)


@pytest.fixture
def fox_as_code(tiny_config, tmp_path) -> tuple[GPT, Path]:
    """A run's model, and the folder that holds it as posbench's own class."""
    config = configured(tiny_config, {"name": "fox"}, {})
    run = written(tmp_path, config)
    export.export(run, tmp_path / "out", code=True)
    return trained(run), tmp_path / "out"


@pytest.mark.parametrize(
    "name", ["past_key_values", "position_ids", "output_attentions"]
)
def test_a_model_as_code_refuses_what_it_would_not_read(name, fox_as_code):
    _, folder = fox_as_code
    theirs = loaded(folder)
    ids = torch.arange(8)[None]

    with pytest.raises(ValueError, match=f"{name}: .* expected input_ids only"):
        theirs(ids, **{name: ids})


def test_the_loss_of_a_model_as_code_is_a_share_of_an_update(fox_as_code):
    """Trainer adds up the losses of the batches that it accumulates."""
    _, folder = fox_as_code
    theirs = loaded(folder)
    ids = torch.arange(30).view(3, 10)
    whole = theirs(ids, labels=ids).loss

    parts = [
        theirs(batch, labels=batch, num_items_in_batch=torch.tensor(3 * 9)).loss
        for batch in ids.split(1)
    ]

    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)


def test_a_model_as_code_has_the_loaders_dtype_and_its_encoding_fp32(fox_as_code):
    ours, folder = fox_as_code
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.arange(20)[None]

    for name, weight in theirs.model.named_parameters():
        expected = torch.bfloat16
        if name.startswith("encoding."):
            expected = torch.float32
        assert weight.dtype == expected, name
    with torch.inference_mode():
        wanted = ours(ids)
        difference = (theirs(ids).logits - wanted).abs().max()
    assert 0 < difference < 0.05 * wanted.abs().max()


def leave_a_tensor_out(tensors):
    tensors.pop("model.layers.1.mlp.up_proj.weight")


def write_the_wrong_layout(tensors):
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].flip(0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (leave_a_tensor_out, "do not match its configuration"),
        (write_the_wrong_layout, "is not the trained one.*nothing is kept"),
    ],
)
def test_another_model_is_refused_and_leaves_nothing(
    spoil, message, rope_run, tmp_path, monkeypatch
):
    stock = export.stock

    def spoilt(*given):
        exported = stock(*given)
        spoil(exported.tensors)
        return exported

    monkeypatch.setattr(export, "stock", spoilt)

    with pytest.raises(UserError, match=message):
        export.export(rope_run, tmp_path / "out")
    assert os.listdir(tmp_path) == [rope_run.name]


GELU = "has model.norm=layernorm with model.mlp=gelu: expected model=llama; code=t"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, GELU),
        (LLAMA | {"qk_norm": True}, "qk_norm=true: expected false"),
        (LLAMA | {"n_kv_heads": 1}, "n_kv_heads=1: expected null"),
        (LLAMA | {"d_ff": 0}, "model.d_ff=0: expected null"),
    ],
)
def test_a_block_that_no_architecture_has_is_refused_in_one_line(
    block, message, tiny_config, tmp_path, capsys
):
    config = configured(tiny_config, ROPE, block)
    run = written(tmp_path, config)
    out = tmp_path / "out"

    code = support.posbench("export", str(run), str(out))

    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_is_not_empty_is_refused(rope_run, tmp_path, capsys):
    full = tmp_path / "full"
    (full / "mine").mkdir(parents=True)

    code = support.posbench("export", str(rope_run), str(full))

    assert code == 2
    printed = capsys.readouterr().err
    assert "exists: expected a new folder or an empty one" in printed
    assert os.listdir(full) == ["mine"]


TEXTS = [
    "",
    " a  b\n\n\tc",
    "naïve 東京 🙂 e\u0301",
    "<|endoftext|>in a text<|endoftext|>",
    "word4 follows number 2. " * 20,
    "x" * 300,
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trained", "bytes"])
def test_the_library_makes_the_same_tokens(kind, tiny_config, tmp_path):
    tokenizer = BYTES
    if kind == "trained":
        support.write_text(tmp_path)
        text = (tmp_path / "text.txt").read_text()
        tokenizer = train_bpe([text], 400)
    config = configured(tiny_config, ROPE, LLAMA)
    run = written(tmp_path, config, tokenizer)
    out = tmp_path / "out"

    export.export(run, out)

    auto = transformers.AutoTokenizer
    theirs = auto.from_pretrained(out, local_files_only=True)
    for text in TEXTS:
        (ids,) = tokenizer.encode([text])
        assert theirs(text)["input_ids"] == ids.tolist()
    of_words = theirs(TEXTS[4])["input_ids"]
    assert theirs.decode(of_words) == TEXTS[4]
    assert theirs.bos_token_id == tokenizer.separator
    assert theirs.eos_token_id == tokenizer.separator
    assert theirs.model_max_length == 24


@pytest.mark.slow
def test_the_curve_is_that_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    support.write_text()
    of_both = [
        "data.path=text.txt",
        "targets=8",
        "blocks=8",
        "extension=yarn",
        "windowed=false",
        "ratio=1,2,8",
    ]
    of_training = [
        "encoding=rope",
        "model=llama",
        "training.train_length=32",
        "training.precision=fp32",
        "training.tokens=4096",
        "runtime.cache=cache",
    ]
    tiny = [word for word in support.TINY if not word.startswith("evaluation.")]
    assert support.posbench("train", *tiny, *of_training, *of_both) == 0
    (run,) = Path("outputs/text").glob("rope-*")

    assert support.posbench("export", str(run), "out") == 0
    assert support.posbench("evaluate", "out", *of_both, "precision=fp32") == 0

    (again,) = Path("outputs/models").glob("out-*")
    ours = losses(run)
    assert len(ours) == 9
    assert losses(again) == pytest.approx(ours, abs=1e-6)


def losses(folder):
    """Return the loss of each row of a folder, by curve and length."""
    rows = evaluation_rows(folder)
    return {(row.curve_name, row.length): row.nll for row in rows}
