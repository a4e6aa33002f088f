"""An exported run is the run by transformers alone: its logits, tokens and curve; what cannot be so is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
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
from posbench.config.schema import Config, from_container, to_container
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
WINDOW = {"attention": {"window": 5, "sinks": 0}}
MIXED = {"name": "layered", "layers": [{"name": "rope", "window": 5}, {"name": "none"}]}

# Encoding, block, the architecture that has both.
EXACT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"name": "rope"}, GPT, "gpt_neox"),
    ({"name": "rope"}, GPT | {"tie_embeddings": False}, "gpt_neox"),
    ({"name": "rope", "layout": "half", "base": 500.0}, GPT, "gpt_neox"),
    ({"name": "partial_rope"}, GPT, "gpt_neox"),
    ({"name": "partial_rope", "layout": "half", "fraction": 0.0}, GPT, "gpt_neox"),
    ({"name": "p_rope"}, GPT, "gpt_neox"),
    ({"name": "yarn"}, GPT, "gpt_neox"),
    ({"name": "dynamic_ntk", "original_length": 24}, GPT, "gpt_neox"),
    ({"name": "none"}, GPT, "gpt_neox"),
    ({"name": "rope"}, LLAMA, "llama"),
    ({"name": "rope", "layout": "half"}, LLAMA | {"tie_embeddings": True, "d_ff": 48}, "llama"),
    ({"name": "partial_rope"}, LLAMA, "llama"),
    ({"name": "p_rope"}, LLAMA, "llama"),
    ({"name": "pi"}, LLAMA, "llama"),
    ({"name": "ntk"}, LLAMA, "llama"),
    ({"name": "yarn"}, LLAMA, "llama"),
    ({"name": "yarn", "ramp": "rotations", "beta": 2.0}, LLAMA, "llama"),
    ({"name": "ntk_by_parts"}, LLAMA, "llama"),
    ({"name": "ntk_by_parts", "ramp": "rotations", "beta": 2.0}, LLAMA, "llama"),
    ({"name": "llama3"}, LLAMA, "llama"),
    ({"name": "longrope"}, LLAMA, "llama"),
    ({"name": "longrope", "original_length": 12}, LLAMA, "llama"),
    ({"name": "dynamic_ntk", "factor": 2.0}, LLAMA, "llama"),
    ({"name": "lerope"}, LLAMA, "llama"),
    ({"name": "none"}, LLAMA, "llama"),
]


def configured(
    template: Config, encoding: dict[str, Any], block: dict[str, Any] | None = None, length: int = 24
) -> Config:
    plain = to_container(template)
    plain["encoding"] = encoding
    plain["model"] |= block or {}
    plain["training"] |= {"train_length": length, "tokens": 8 * length * 4}
    return from_container(plain)


def exported(run: Path, folder: Path, **how: Any) -> list[dict[str, float]]:
    """What `posbench_parity.json` of a new export has for each length."""
    export.export(run, folder, **how)
    differences: list[dict[str, float]] = json.loads((folder / export.PARITY).read_text())["differences"]
    return differences


def written(folder: Path, config: Config, tokenizer: tokenizers.Tokenizer | None = None, spread: float = 0.1) -> Path:
    """A run folder with random weights: initial ones would hide a norm or a factor that is missing."""
    tokenizer = tokenizer or tokenizers.raw_bytes()
    run = folder / config.id
    run.mkdir(parents=True)
    model = build(config, tokenizer.vocab_size, tokenizer.texts)
    stream = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(weight.shape, generator=stream) * spread + (weight.dim() == 1)
        for name, weight in model.state_dict().items()
    }
    checkpoint.save(run, config.training.steps, weights, {}, {})
    tokenizer.save(run / TOKENIZER)
    (run / "config.yaml").write_text(yaml.safe_dump(to_container(config)))
    (run / "run.json").write_text(json.dumps({"schema": 1, "id": run.name, "tokenizer_sha256": tokenizer.sha256}))
    return run


@pytest.mark.sample(9)
@pytest.mark.parametrize(("encoding", "block", "kind"), EXACT)
def test_logits_are_those_of_the_run(
    encoding: dict[str, Any], block: dict[str, Any], kind: str, tiny_config: Config, tmp_path: Path
) -> None:
    run = written(tmp_path, configured(tiny_config, encoding, block))
    found = exported(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind
    assert [one["length"] for one in found] == [1, 16, 24, 48, 96]
    for one in found:
        assert one["difference"] <= 1e-5 * max(1.0, one["largest_logit"]), one
        assert one["largest_logit"] > 1
    assert sorted(os.listdir(tmp_path)) == sorted([run.name, "out"])
    assert_generates_as_the_run(tmp_path / "out", run)


@torch.inference_mode()
def assert_generates_as_the_run(folder: Path, run: Path, new: int = 12) -> None:
    """Every step's logits, from before the training length (24) to beyond it, with default settings and uncached."""
    config = load_config(run)
    ours = model_of(run, config, tokenizers.raw_bytes())
    settings = json.loads((folder / "config.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = 20
    ids = torch.randint(256, (1, prompt), generator=torch.Generator().manual_seed(2))
    changing = config.encoding.name in ("longrope", "dynamic_ntk")
    assert settings.get("use_cache", True) is not changing
    assert ("`use_cache` is false" in (folder / "README.md").read_text()) is changing
    for chosen in ({}, {"use_cache": False}):
        told = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "min_new_tokens": new}
        made = theirs.generate(ids, max_new_tokens=new, **told, **chosen)
        assert made.sequences.shape[1] == prompt + new
        for step, logits in enumerate(made.logits):
            wanted = ours(made.sequences[:, : prompt + step])[:, -1]
            assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max(), (chosen, prompt + step)


def test_far_out_the_rounding_of_fp32_is_allowed_and_no_more(tiny_config: Config, tmp_path: Path) -> None:
    config = configured(tiny_config, {"name": "rope"}, LLAMA, length=512)
    found = exported(written(tmp_path, config), tmp_path / "out")
    assert [one["length"] for one in found] == [1, 16, 512, 1024, 2048]
    assert found[-1]["difference"] > 3 * found[0]["difference"]
    for one in found:
        assert one["difference"] <= one["limit"] / 2
        assert one["limit"] == max(1e-5, one["length"] / 2**24) * max(1.0, one["largest_logit"])


# -- posbench's own class ----------------------------------------------------------------------------------------------


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", encodings.names())
def test_every_encoding_goes_out_as_code(name: str, tiny_config: Config, tmp_path: Path) -> None:
    """Tables that are no weights come back, too: transformers leaves them unset."""
    options = {"layers": MIXED["layers"]} if name == "layered" else {}
    run = written(tmp_path, configured(tiny_config, {"name": name, **options}))
    found = exported(run, tmp_path / "out", code=True)
    assert all(one["difference"] <= one["limit"] for one in found) and found[0]["largest_logit"] > 1
    assert [one["length"] for one in found][:3] == [1, 16, 24]
    ours = model_of(run, load_config(run), tokenizers.raw_bytes())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert theirs.get_input_embeddings() is theirs.model.tokens
    assert {k: v.tolist() for k, v in ours.named_buffers()} == {k: v.tolist() for k, v in theirs.model.named_buffers()}
    ids = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(2))
    told = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "min_new_tokens": 4}
    for chosen in ({}, {"use_cache": True}):
        made = theirs.generate(ids, max_new_tokens=4, **told, **chosen)
        for step, logits in enumerate(made.logits):
            wanted = ours(made.sequences[:, : 8 + step])[:, -1]
            assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max(), (chosen, step)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", encodings.names())
def test_the_list_of_encodings_names_the_architectures_that_take_them(name: str, tiny_config: Config) -> None:
    for block in (LLAMA, GPT):
        config = configured(tiny_config, MIXED if name == "layered" else {"name": name}, block)
        model = build(config, 256, tokenizers.raw_bytes().texts)
        if export.architectures(model.encoding):
            export.stock(model, config)
        else:
            with pytest.raises(UserError, match="code=true"):
                export.stock(model, config)


@pytest.mark.full
def test_code_loads_where_it_is_trusted_and_refuses_padding(tiny_config: Config, tmp_path: Path) -> None:
    run = written(tmp_path, configured(tiny_config, {"name": "fire"}))
    assert support.posbench("export", str(run), str(tmp_path / "out"), "code=true") == 0
    page = (tmp_path / "out" / "README.md").read_text()
    assert f"It needs posbench {posbench.__version__}, which is not on PyPI" in page.split("```")[0]
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    code = code.replace("PATH", str(tmp_path / "out"))
    code += textwrap.dedent(
        """
        import json, sys
        assert model.config.posbench_version and type(model).__name__ == "PosbenchForCausalLM"
        loss = model(ids, labels=ids).loss.item()
        mask = torch.ones_like(ids)
        model(ids, attention_mask=mask)
        mask[0, 0] = 0
        try:
            model(ids, attention_mask=mask)
        except ValueError as error:
            print(json.dumps([loss, str(error)]))
        """
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loss, refused = json.loads(done.stdout.splitlines()[-1])
    assert 0 < loss < 100 and refused.startswith("padding")


# -- the run's own curve -----------------------------------------------------------------------------------------------


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
    page = Path("out", "README.md").read_text()
    shown = re.findall(r"^\| `.*$", page, flags=re.M)
    assert [line.split(" | ")[3] for line in shown] == [f"{row.nll:.4f}" for row in ours.values()]


# -- what must not pass ------------------------------------------------------------------------------------------------

Change = Callable[[export.Exported], export.Exported]


def _without(name: str) -> Change:
    return lambda made: (made[0], {key: tensor for key, tensor in made[1].items() if name not in key})


def _swapped(one: str, other: str) -> Change:
    def change(made: export.Exported) -> export.Exported:
        renamed = {
            name.replace(one, "?").replace(other, one).replace("?", other): tensor for name, tensor in made[1].items()
        }
        return made[0], renamed

    return change


def _settings(**settings: Any) -> Change:
    return lambda made: (made[0] | settings, made[1])


def _rope(**parameters: Any) -> Change:
    return lambda made: _settings(rope_parameters=made[0]["rope_parameters"] | parameters)(made)


OTHERS: list[tuple[str, dict[str, Any], dict[str, Any], Change]] = [
    ("a tensor left out", {"name": "rope"}, LLAMA, _without("layers.1.mlp.up_proj")),
    ("all norms left out", {"name": "rope"}, GPT, _without("norm")),
    ("queries for keys", {"name": "rope"}, LLAMA, _swapped("q_proj", "k_proj")),
    ("layers in another order", {"name": "rope"}, GPT, _swapped("layers.0", "layers.1")),
    ("no attention factor", {"name": "yarn"}, LLAMA, _rope(attention_factor=1.0)),
    ("another epsilon", {"name": "rope"}, LLAMA, _settings(rms_norm_eps=1e-5)),
    ("positions where there are none", {"name": "none"}, LLAMA, _rope(rope_type="default")),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("encoding", "block", "change"), [pytest.param(*case[1:], id=case[0]) for case in OTHERS])
def test_another_model_is_refused_and_leaves_nothing(
    encoding: dict[str, Any],
    block: dict[str, Any],
    change: Change,
    tiny_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = export.stock
    monkeypatch.setattr(export, "stock", lambda model, config: change(stock(model, config)))
    run = written(tmp_path, configured(tiny_config, encoding, block))
    before = support.snapshot(tmp_path)
    with pytest.raises(UserError, match=r"(is not the run's.*nothing is written|do not match its configuration)"):
        export.export(run, tmp_path / "out")
    assert support.snapshot(tmp_path) == before and os.listdir(tmp_path) == [run.name]


def test_the_wrong_layout_is_caught(tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_order", lambda rope, partly: torch.arange(rope.shape.head_dim))
    for block in (GPT, LLAMA):
        run = written(tmp_path, configured(tiny_config, {"name": "rope"}, block))
        with pytest.raises(UserError, match="at 16 tokens their logits differ by"):
            export.export(run, tmp_path / "out")
    half = written(tmp_path, configured(tiny_config, {"name": "rope", "layout": "half"}, GPT))
    export.export(half, tmp_path / "out")  # which is transformers' own


REFUSED = [
    ({"name": "fire"}, GPT, r"no stock architecture has 'fire': expected 'rope' and its family.*code=true"),
    ({"name": "xpos"}, GPT, r"has 'xpos'"),
    ({"name": "alibi"}, LLAMA, r"has 'alibi'"),
    ({"name": "learned"}, GPT, r"has 'learned'"),
    (MIXED, LLAMA, r"has 'layered'"),
    ({"name": "rope"}, LLAMA | WINDOW, r"has model.attention.window=5: expected null"),
    ({"name": "rope"}, {"norm": "rmsnorm"}, r"no stock architecture has model.norm=rmsnorm with model.mlp=gelu"),
    ({"name": "none"}, GPT | {"n_heads": 2, "d_model": 10}, r"odd number of channels"),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(("encoding", "block", "said"), REFUSED)
def test_what_no_architecture_has_is_refused_in_one_line(
    encoding: dict[str, Any],
    block: dict[str, Any],
    said: str,
    tiny_config: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = written(tmp_path, configured(tiny_config, encoding, block))
    assert support.posbench("export", str(run), str(tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert re.search(said, told) and told.count("\n") == 1, told
    assert os.listdir(tmp_path) == [run.name]


def test_a_place_that_is_taken_is_left_alone(tiny_config: Config, tmp_path: Path) -> None:
    run = written(tmp_path / "runs", configured(tiny_config, {"name": "rope"}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("text")
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    before = support.snapshot(tmp_path)
    for name in ("full", "file", "link"):
        with pytest.raises(UserError, match="is there: expected a new folder, or an empty one"):
            export.export(run, tmp_path / name)
    with pytest.raises(UserError, match=r"is not a run folder"):
        export.export(tmp_path / "full", tmp_path / "out")
    assert support.snapshot(tmp_path) == before
    export.export(run, tmp_path / "empty")
    export.export(run, tmp_path / "deep" / "er")
    assert (tmp_path / "empty" / "model.safetensors").is_file() and (tmp_path / "deep" / "er" / "README.md").is_file()


def test_a_kill_leaves_no_half_of_an_export(tiny_config: Config, tmp_path: Path) -> None:
    run = written(tmp_path / "runs", configured(tiny_config, {"name": "rope"}))
    dying = faults.Boundaries(moment="half", at=3)
    assert faults.ended(faults.start(lambda: export.export(run, tmp_path / "out"), dying.install)) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    export.export(run, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").is_file()


# -- what stands beside the weights ------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_library_makes_the_same_tokens(tiny_config: Config, tmp_path: Path) -> None:
    support.write_text(tmp_path)
    text = (tmp_path / "text.txt").read_text()
    trained = tokenizers.train_bpe([text], 400)
    texts = ["", " a  b\n\n\tc", "naïve 東京 🙂 e\u0301", "<|endoftext|>in a text<|endoftext|>", text[:500], "x" * 300]
    blocks = {"llama": LLAMA, "gpt_neox": GPT}
    for own in (trained, tokenizers.raw_bytes()):
        for kind, block in blocks.items():
            folder = tmp_path / f"{own.sha256[:8]}-{kind}"
            export.export(written(folder, configured(tiny_config, {"name": "rope"}, block), own), folder / "out")
            theirs = transformers.AutoTokenizer.from_pretrained(folder / "out", local_files_only=True)
            assert [theirs(one)["input_ids"] for one in texts] == [ids.tolist() for ids in own.encode(texts)]
            assert theirs.decode(theirs(text[:500])["input_ids"]) == text[:500]
            assert (theirs.bos_token_id, theirs.eos_token_id) == (own.separator, own.separator)
            assert theirs.model_max_length == 24


def test_other_tokens_are_refused(tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path, configured(tiny_config, {"name": "rope"}))
    monkeypatch.setattr(export, "_TEXT", "<|endoftext|>")
    write = export._write_tokenizer

    def finding_separators(new: Path, *rest: Any) -> None:
        write(new, *rest)
        path = new / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": False}))

    monkeypatch.setattr(export, "_write_tokenizer", finding_separators)
    with pytest.raises(UserError, match="other tokens"):
        export.export(run, tmp_path / "out")
    assert os.listdir(tmp_path) == [run.name]


_ALONE = """
import json, sys
{code}
assert not [name for name in sys.modules if name.partition(".")[0] == "posbench"]
print(json.dumps([ids.tolist(), logits.tolist()]))
"""


@pytest.mark.full
def test_the_code_on_the_card_runs_without_posbench(tiny_config: Config, tmp_path: Path) -> None:
    run = written(tmp_path, configured(tiny_config, {"name": "rope"}))
    export.export(run, tmp_path / "out")
    text = "Some text that is longer than in training, which is what this is about."
    code = re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), flags=re.S)
    assert code is not None
    script = _ALONE.format(code=code[1].replace("PATH", str(tmp_path / "out")).replace("Some text", text))
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=alone, timeout=200)
    assert done.returncode == 0, done.stderr
    own = tokenizers.raw_bytes()
    ids, logits = json.loads(done.stdout)
    assert ids == [[own.separator, *text.encode()]] and len(ids[0]) > 2 * 24
    with torch.inference_mode():
        expected = model_of(run, load_config(run), own)(torch.tensor(ids))
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-5, atol=1e-5)
