"""An exported run is the run by transformers alone: its logits, tokens and curve; what cannot be so is refused."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
import support
import torch
import yaml

import posbench
from posbench import encodings
from posbench.config.schema import Config, to_container, validate
from posbench.data import tokenizer as tokenizers
from posbench.errors import UserError
from posbench.huggingface import export
from posbench.model.gpt import build
from posbench.run import TOKENIZER, checkpoint
from posbench.run.model import model_of
from posbench.run.rows import evaluation_rows
from posbench.run.run import load_config

transformers = pytest.importorskip("transformers")

GPT: dict[str, Any] = {}
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "mlp": "swiglu", "tie_embeddings": False}
MIXED = {"name": "layered", "layers": [{"name": "rope", "window": 5}, {"name": "none"}]}

# An encoding with its options, and a block.
EXACT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *[({"name": name}, block) for name in (*export._ROTARY, "none") for block in (GPT, LLAMA)],
    ({"name": "rope"}, GPT | {"tie_embeddings": False}),
    ({"name": "rope", "layout": "half", "base": 500.0}, GPT),
    ({"name": "partial_rope", "layout": "half", "fraction": 0.0}, GPT),
    ({"name": "dynamic_ntk", "original_length": 24}, GPT),
    ({"name": "rope", "layout": "half"}, LLAMA | {"tie_embeddings": True, "d_ff": 48}),
    ({"name": "yarn", "ramp": "rotations", "beta": 2.0}, LLAMA),
    ({"name": "ntk_by_parts", "ramp": "rotations", "beta": 2.0}, LLAMA),
    ({"name": "longrope", "original_length": 12}, LLAMA),
    ({"name": "dynamic_ntk", "factor": 2.0}, LLAMA),
]


def configured(template: Config, encoding: dict[str, Any], block: dict[str, Any] | None = None) -> Config:
    """At a training length of 24 tokens."""
    plain = to_container(template)
    plain["encoding"] = encoding
    plain["model"] |= block or {}
    plain["training"] |= {"train_length": 24, "tokens": 8 * 24 * 4}
    return validate(Config, plain)


def written(folder: Path, config: Config, tokenizer: tokenizers.Tokenizer | None = None) -> Path:
    """A run folder with random weights: initial ones would hide a norm or a factor that is missing."""
    tokenizer = tokenizer or tokenizers.raw_bytes()
    run = folder / config.id
    run.mkdir(parents=True)
    model = build(config, tokenizer.vocab_size, tokenizer.texts)
    stream = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(weight.shape, generator=stream) * 0.1 + (weight.dim() == 1)
        for name, weight in model.state_dict().items()
    }
    checkpoint.save(run, config.training.steps, weights, {}, {})
    tokenizer.save(run / TOKENIZER)
    (run / "config.yaml").write_text(yaml.safe_dump(to_container(config)))
    (run / "run.json").write_text(json.dumps({"schema": 1, "id": run.name, "tokenizer_sha256": tokenizer.sha256}))
    return run


@torch.inference_mode()
def assert_is_the_run(folder: Path, run: Path) -> Any:
    """At every length that was compared, and at every step of a generated text, with and without a cache.

    Returns:
        The model of transformers.
    """
    differences = json.loads((folder / export.PARITY).read_text())["differences"]
    assert [each["length"] for each in differences][:3] == [1, 16, 24]
    for each in differences:
        assert each["limit"] == max(1e-5, each["length"] / 2**24) * max(1.0, each["largest_logit"])
        assert each["difference"] <= each["limit"] and each["largest_logit"] > 1
    ours = model_of(run, load_config(run), tokenizers.raw_bytes())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = min(20, (ours.encoding.max_length or 28) - 8)
    ids = torch.randint(256, (2, start), generator=torch.Generator().manual_seed(2))
    asked = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "min_new_tokens": 8}
    for cache in ({}, {"use_cache": False}):
        made = theirs.generate(ids, max_new_tokens=8, **asked, **cache)
        for step, logits in enumerate(made.logits):
            wanted = ours(made.sequences[:, : ids.shape[1] + step])[:, -1]
            assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max(), (cache, step)
    return theirs


@pytest.mark.sample(9)
@pytest.mark.parametrize(("encoding", "block"), EXACT)
def test_logits_are_those_of_the_run(
    encoding: dict[str, Any], block: dict[str, Any], tiny_config: Config, tmp_path: Path
) -> None:
    run = written(tmp_path, configured(tiny_config, encoding, block))
    export.export(run, tmp_path / "out")
    theirs = assert_is_the_run(tmp_path / "out", run)
    assert theirs.config.model_type == ("llama" if "norm" in block else "gpt_neox")
    follows_length = encoding["name"] in ("longrope", "dynamic_ntk")
    assert theirs.config.use_cache is not follows_length
    assert ("`use_cache` is false" in (tmp_path / "out" / "README.md").read_text()) is follows_length
    assert sorted(os.listdir(tmp_path)) == sorted([run.name, "out"])


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", encodings.names())
def test_every_encoding_goes_out_as_code_or_as_the_architectures_that_the_list_names(
    name: str, tiny_config: Config, tmp_path: Path
) -> None:
    """Tables that are no weights come back, too: transformers leaves them unset."""
    encoding = MIXED if name == "layered" else {"name": name}
    run = written(tmp_path, configured(tiny_config, encoding))
    export.export(run, tmp_path / "out", code=True)
    ours, theirs = model_of(run, load_config(run), tokenizers.raw_bytes()), assert_is_the_run(tmp_path / "out", run)
    assert theirs.get_input_embeddings() is theirs.model.tokens
    assert {k: v.tolist() for k, v in ours.named_buffers()} == {k: v.tolist() for k, v in theirs.model.named_buffers()}
    for block in (LLAMA, GPT):
        config = configured(tiny_config, encoding, block)
        model = build(config, 256, tokenizers.raw_bytes().texts)
        if export.architectures(model.encoding):
            export.stock(model, config)
        else:
            with pytest.raises(UserError, match=f"no stock architecture has '{name}': expected 'rope'.*code=true"):
                export.stock(model, config)


# -- what must not pass ------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, Any]], export.Exported]


def renamed(*names: str) -> Change:
    """Tensors whose names take each other's parts; of a single part they are left out."""

    def change(settings: dict[str, Any], tensors: dict[str, Any]) -> export.Exported:
        one, other = (*names, "")[:2]
        exchanged = {key.replace(one, "?").replace(other, one).replace("?", other): key for key in tensors if other}
        kept = exchanged or {key: key for key in tensors if one not in key}
        return settings, {new: tensors[key] for new, key in kept.items()}

    return change


def with_rope(**parameters: Any) -> Change:
    return lambda settings, tensors: (
        settings | {"rope_parameters": settings["rope_parameters"] | parameters},
        tensors,
    )


OTHERS: dict[str, tuple[str, dict[str, Any], Change]] = {
    "a tensor left out": ("rope", LLAMA, renamed("layers.1.mlp.up_proj")),
    "all norms left out": ("rope", GPT, renamed("norm")),
    "queries for keys": ("rope", LLAMA, renamed("q_proj", "k_proj")),
    "layers in another order": ("rope", GPT, renamed("layers.0", "layers.1")),
    "no attention factor": ("yarn", LLAMA, with_rope(attention_factor=1.0)),
    "another epsilon": ("rope", LLAMA, lambda settings, tensors: (settings | {"rms_norm_eps": 1e-5}, tensors)),
    "positions where there are none": ("none", LLAMA, with_rope(rope_type="default")),
    "the wrong layout": ("rope", LLAMA, lambda *made: made),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", OTHERS)
def test_another_model_is_refused_and_leaves_nothing(
    what: str, tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, block, change = OTHERS[what]
    stock = export.stock
    monkeypatch.setattr(export, "stock", lambda model, config: change(*stock(model, config)))
    if what == "the wrong layout":
        monkeypatch.setattr(export, "_order", lambda rope, partly: torch.arange(rope.shape.head_dim))
    run = written(tmp_path, configured(tiny_config, {"name": name}, block))
    with pytest.raises(UserError, match=r"(is not the run's.*nothing is written|do not match its configuration)"):
        export.export(run, tmp_path / "out")
    assert os.listdir(tmp_path) == [run.name]


def test_what_cannot_be_exported_is_refused_in_one_line(
    tiny_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that no architecture has, and a place that is taken."""
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    for name in ("full/mine", "file"):
        (tmp_path / name).write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    window = {"attention": {"window": 5, "sinks": 0}}
    rope, taken = {"name": "rope"}, "is there: expected a new folder, or an empty one"
    for number, (encoding, block, place, message) in enumerate(
        (
            ({"name": "fire"}, GPT, "out", "no stock architecture has 'fire'"),
            (rope, LLAMA | window, "out", "has model.attention.window=5: expected null"),
            (rope, {"norm": "rmsnorm"}, "out", "no stock architecture has model.norm=rmsnorm with model.mlp=gelu"),
            (rope, GPT, "full", taken),
            (rope, GPT, "file", taken),
            (rope, GPT, "link", taken),
        )
    ):
        run = written(tmp_path / f"runs-{number}", configured(tiny_config, encoding, block))
        before = support.snapshot(tmp_path)
        assert support.posbench("export", str(run), str(tmp_path / place)) == 2
        line = capsys.readouterr().err
        assert message in line and line.count("\n") == 1, line
        assert support.snapshot(tmp_path) == before
    with pytest.raises(UserError, match="is not a run folder"):
        export.export(tmp_path / "full", tmp_path / "out")
    for place in ("empty", "deep/er"):
        export.export(run, tmp_path / place)
        assert (tmp_path / place / "README.md").is_file()


def test_a_kill_leaves_no_half_of_an_export(tiny_config: Config, tmp_path: Path) -> None:
    run = written(tmp_path / "runs", configured(tiny_config, {"name": "rope"}))
    dying = faults.Boundaries(moment="half", at=3)
    assert faults.ended(faults.start(lambda: export.export(run, tmp_path / "out"), dying.install)) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    export.export(run, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").is_file()


# -- what stands beside the weights ------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_library_makes_the_same_tokens(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support.write_text(tmp_path)
    text = (tmp_path / "text.txt").read_text()
    trained = tokenizers.train_bpe([text], 400)
    texts = ["", " a  b\n\n\tc", "naïve 東京 🙂 e\u0301", "<|endoftext|>in a text<|endoftext|>", text[:500], "x" * 300]
    for own in (trained, tokenizers.raw_bytes()):
        folder = tmp_path / own.sha256[:8]
        export.export(written(folder, configured(tiny_config, {"name": "rope"}), own), folder / "out")
        theirs = transformers.AutoTokenizer.from_pretrained(folder / "out", local_files_only=True)
        assert [theirs(one)["input_ids"] for one in texts] == [ids.tolist() for ids in own.encode(texts)]
        assert theirs.decode(theirs(text[:500])["input_ids"]) == text[:500]
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.model_max_length) == (own.separator,) * 2 + (24,)
    monkeypatch.setattr(type(theirs), "__call__", lambda *_: {"input_ids": [1]})
    with pytest.raises(UserError, match="other tokens"):
        export.export(next(folder.glob("rope-*")), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.full
@pytest.mark.parametrize("code", [False, True])
def test_the_code_on_the_card_runs_and_without_posbench_if_the_architecture_is_stock(
    code: bool, tiny_config: Config, tmp_path: Path
) -> None:
    run = written(tmp_path, configured(tiny_config, {"name": "fire" if code else "rope"}))
    export.export(run, tmp_path / "out", code)
    page = (tmp_path / "out" / "README.md").read_text()
    assert (f"It needs posbench {posbench.__version__}, which is not on PyPI" in page.split("```")[0]) is code
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    text = "Some text that is longer than in training, which is what this is about."
    script = "import json, sys\n" + script.replace("PATH", str(tmp_path / "out")).replace("Some text", text)
    if code:  # it refuses padding
        script += (
            "mask = torch.ones_like(ids)\nmodel(ids, attention_mask=mask, labels=ids).loss.item()\nmask[0, 0] = 0\n"
        )
        script += "try: model(ids, attention_mask=mask)\nexcept ValueError as error: assert 'padding' in str(error)\n"
    else:
        script += "assert not [name for name in sys.modules if name.partition('.')[0] == 'posbench']\n"
    script += "print(json.dumps([ids.tolist(), logits.tolist()]))"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *([] if code else ["-P"]), "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ids, logits = json.loads(done.stdout.splitlines()[-1])
    own = tokenizers.raw_bytes()
    assert ids == [[own.separator, *text.encode()]] and len(ids[0]) > 2 * 24
    with torch.inference_mode():
        expected = model_of(run, load_config(run), own)(torch.tensor(ids))
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_the_curve_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    support.write_text()
    text = ["data=text", "data.path=text.txt", "data.tokenizer=bytes"]
    asked = ["evaluation.targets=8", "evaluation.blocks=8", "evaluation.windowed=false", "evaluation.ratios=[1,2,8]"]
    asked += ["evaluation.extensions=[yarn]"]
    tiny = [one.replace("train_length=16", "train_length=32") for one in support.TINY if not one.startswith("data")]
    tiny = [one for one in tiny if not one.startswith("evaluation.")]
    made = [*tiny, "encoding=rope", *text, "training.tokens=4096", "runtime.cache=cache"]
    run = posbench.train([*made, "training.precision=fp32", *asked])
    assert support.posbench("export", str(run.folder), "out") == 0
    assert support.posbench("evaluate", "out", *text[:2], *asked, "evaluation.precision=fp32") == 0
    (again,) = Path("outputs/models").glob("out-*")
    theirs = {row.key._replace(checkpoint_step=0): row for row in evaluation_rows(again)}
    ours = {row.key._replace(checkpoint_step=0): row for row in evaluation_rows(run.folder)}
    assert theirs.keys() == ours.keys() and len(ours) == 9
    for key, row in ours.items():
        assert row.nll == pytest.approx(theirs[key].nll, abs=1e-6), key
    shown = re.findall(r"^\| `.*$", Path("out", "README.md").read_text(), flags=re.M)
    assert [line.split(" | ")[3] for line in shown] == [f"{row.nll:.4f}" for row in ours.values()]
