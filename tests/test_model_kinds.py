"""Kinds of models that no test has verified: what a probe finds makes rows undefined, and nothing else is wrong."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import changed, write_text, write_tokenizer
from support import posbench, script
from test_huggingface import EVALUATE, WRONG, refused

from posbench.errors import Undefined, UserError
from posbench.evaluation.variants import Variant
from posbench.huggingface import attention, building, package, probing, rope, subject
from posbench.huggingface import folder as folders
from posbench.run_folder.jsonl import read_jsonl
from posbench.training import elsewhere

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
model_kinds = script("model_kinds")
LENGTH, LONG = model_kinds.LENGTH, model_kinds.LONG
IDS = np.random.default_rng(0).integers(2, model_kinds.VOCABULARY, (2, LONG + 1))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


def on(shelf: Path, kind: str) -> Path:
    if not (shelf / kind).exists():
        model_kinds.saved(kind, shelf / kind)
    return shelf / kind


# A mixture of experts, scaled logits, own windows and chunks, a table, a recurrence, the text part of several models.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "granite", "cohere2", "gpt_oss", "llama4_text", "gpt_neo", "mamba", "gemma3"]
)
def test_numbers_are_those_of_the_librarys_own_logits_windows_and_extensions(shelf: Path, kind: str) -> None:
    found = model_kinds.measured(kind, on(shelf, kind))
    assert found.plain < 1e-5
    assert "does not narrow all" in found.window if kind == "mamba" else found.window < 1e-5
    cannot = {"gpt_oss": "already extended", "gpt_neo": "no rotary", "mamba": "no rotary"}
    assert cannot[kind] in found.extension if kind in cannot else found.extension < 1e-5
    assert (found.beyond is not None) == (kind == "gpt_neo")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_in_the_docs_is_what_the_script_prints() -> None:
    """At least 50 kinds; differences may vary with the machine."""
    command = [sys.executable, str(ROOT / "scripts" / "model_kinds.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line for line in printed if line.startswith("| `")]
    documented = (ROOT / "docs" / "your_model.md").read_text(encoding="utf-8").splitlines()
    number = re.compile(r"\d\.?\d*e-0[5-9]|0e\+00")
    assert {number.sub("N", row) for row in rows} <= {number.sub("N", line) for line in documented}
    assert len(rows) >= 50 and sum("| N |" in number.sub("N", row) for row in rows) >= 40


# -- what the probes are for: each mistake is made ---------------------------------------------------------------------


def wrapped(monkeypatch: pytest.MonkeyPatch, owner: Any, change: Callable[..., Any]) -> None:
    """Have `change` see the arguments and the result of a model's forward pass."""
    own = owner.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return change(own(self, *args, **options), *args, **options)

    monkeypatch.setattr(owner, "forward", forward)


def states_see_later_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: Any, *args: Any, **options: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.flip(1)
        return output

    wrapped(monkeypatch, transformers.GraniteModel, change)


def states_see_other_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: Any, *args: Any, **options: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(0)
        return output

    wrapped(monkeypatch, transformers.GraniteModel, change)


def states_follow_the_longest_input(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = [0]

    def change(output: Any, *args: Any, **options: Any) -> Any:
        longest[0] = max(longest[0], output.last_hidden_state.shape[1])
        output.last_hidden_state = output.last_hidden_state + torch.arange(32) * (longest[0] > LENGTH + 8)
        return output

    wrapped(monkeypatch, transformers.GraniteModel, change)


def logits_know_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: Any, input_ids: Any, **options: Any) -> Any:
        output.logits = output.logits + input_ids[..., None]
        return output

    wrapped(monkeypatch, transformers.GraniteForCausalLM, change)


def not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: Any, *args: Any, **options: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state / 0
        return output

    wrapped(monkeypatch, transformers.GraniteModel, change)


def too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: Any, *args: Any, **options: Any) -> Any:
        if output.last_hidden_state.shape[1] > LENGTH + 10:
            raise IndexError("too long for me")
        return output

    wrapped(monkeypatch, transformers.GraniteModel, change)


def windows_lose_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    near = attention._mask

    def mask(own: Any, *args: Any, **options: Any) -> Any:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool) if attention._narrowed.get()[0] else near(own, *args, **options)

    for name in ("sdpa", "eager"):
        own = transformers.AttentionMaskInterface()[name]
        monkeypatch.setitem(
            transformers.AttentionMaskInterface._global_mapping, name, lambda *a, own=own, **o: mask(own, *a, **o)
        )


def windows_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sdpa", "eager"):
        own = transformers.AttentionMaskInterface()[name].args[0]
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, name, own)


def nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "exchanged", lambda model, config: model)
    monkeypatch.setattr(rope, "agrees", lambda model, turns, length: True)


def other_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rope.turns_of
    monkeypatch.setattr(rope, "turns_of", lambda config, length: [rope.Turns(twice(own(config, length)[0].rope), None)])


def twice(one: Any) -> Any:
    one.inv_freq = lambda device, inner=one.inv_freq: 2 * inner(device)
    return one


def a_state_that_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.GraniteForCausalLM, "_is_stateful", True)


MISTAKES: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, str]] = {
    states_see_later_tokens: ("everywhere", "granite is not causal: later tokens change its earlier logits"),
    states_see_other_windows: ("everywhere", "other windows in its batch change the logits of granite"),
    states_follow_the_longest_input: ("everywhere", "longer inputs before change the logits of granite"),
    logits_know_the_input: ("everywhere", "granite makes its logits of more than the hidden states"),
    not_finite: ("everywhere", "granite gives logits that are not finite"),
    too_long: ("beyond", "transformers cannot run granite at 96 tokens: too long for me"),
    windows_lose_the_mask: ("windows", "a window of all tokens changes the logits of granite"),
    windows_are_ignored: ("windows", "transformers does not narrow all of granite by masks"),
    a_state_that_fades: ("windows", "transformers does not narrow all of granite by masks"),
    nothing_is_exchanged: ("extensions", "other frequencies change no logits of granite"),
    other_turns: ("extensions", "the rotary modules of granite turn otherwise than RoPE of its configuration"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.__name__)
def test_a_probe_finds_what_would_make_numbers_wrong(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    folder = on(shelf, "granite")
    attention.register()
    mistake(monkeypatch)
    model = model_kinds.subject_of(folder)
    field, said = MISTAKES[mistake]
    found = {name: reason for name, reason in dataclasses.asdict(model.limits).items() if reason}
    assert found.pop(field).startswith(said)
    assert found.keys() <= {"longest"}  # and only that
    variants = {"windows": Variant(window=9), "extensions": Variant(extension="yarn")}
    with pytest.raises(Undefined, match=re.escape(said)):
        model.varied(variants.get(field, Variant()), LONG)
    if field != "everywhere":
        model.varied(Variant(), LENGTH)


def test_frequencies_that_follow_the_length_are_those_of_each_input(tmp_path: Path, monkeypatch: Any) -> None:
    """As saved: `dynamic` keeps the frequencies of the longest input it has read, which the probe finds."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model_kinds.saved("qwen3_moe", tmp_path / "m", rope_parameters=parameters)
    model, longer = model_kinds.subject_of(tmp_path / "m"), np.concatenate([IDS, IDS], axis=1)
    wanted = model_kinds.theirs(tmp_path / "m", transformers.AutoConfig.from_pretrained(tmp_path / "m"), IDS)
    for ids in (IDS, longer, IDS):
        got = model.nll(ids, 8, 0)
        assert ids is longer or np.abs(got - wanted[:, -8:]).max() < 1e-5
    monkeypatch.setattr(subject.rope, "restore", lambda model: None)
    assert "longer inputs before change" in model_kinds.subject_of(tmp_path / "m").limits.everywhere


@pytest.mark.full
def test_halves_several_files_and_tied_tables_pass_all_probes(tmp_path: Path) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        folder = tmp_path / precision
        model_kinds.saved("qwen3_moe", folder, tie_word_embeddings=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="30kB")
        checkpoint = folders.read(folder)
        assert len(checkpoint.weights.paths) > 2 and checkpoint.weights.precision == precision
        config = building.configuration(checkpoint, LONG)
        building.refuse_too_large(checkpoint, config, precision, "cpu", LONG)
        made = building.built(checkpoint, config, building.tensors_of(checkpoint), precision)
        ours = subject.HuggingFaceModel(checkpoint, made, "m", LENGTH, torch.device("cpu"), precision)
        assert probing.limits(ours, [LONG]) == subject.Limits()
        wanted = model_kinds.theirs(folder, transformers.AutoConfig.from_pretrained(folder), IDS)
        assert np.abs(ours.nll(IDS, LONG, 0) - wanted).mean() < 0.05


# -- from the command line ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_rows_and_the_record_say_what_is_undefined_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    model_kinds.saved("jamba", tmp_path / "jamba")
    write_tokenizer(tmp_path / "jamba", begins=7)  # a token that begins every window, but those of the probes
    config = transformers.BertConfig(vocab_size=131, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=64, max_position_embeddings=96, eos_token_id=1)  # fmt: skip
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    shutil.copy(tmp_path / "jamba" / "tokenizer.json", tmp_path / "bert")
    for kind in ("jamba", "bert"):
        asked = [*EVALUATE, "length=48,96", "train_length=48", "extension=yarn", "task=shuffle"]
        assert posbench("evaluate", kind, *asked) == 0
    told = capsys.readouterr().err
    assert "jamba: probed with transformers" in told and "undefined: windows and sinks (" in told
    folders_by_kind = {path.name.partition("-")[0]: path for path in (tmp_path / "outputs" / "models").iterdir()}
    rows = read_jsonl(folders_by_kind["jamba"] / "evaluation.jsonl")
    status = {(row["length"], row["window"], row["extension"]): (row["status"], row["reason"]) for row in rows}
    assert status[96, None, None][0] == "ok"
    assert status[96, 48, None][0] == "undefined" and "does not narrow all of jamba" in status[96, 48, None][1]
    assert status[96, None, "yarn"][0] == "undefined"
    support = json.loads((folders_by_kind["jamba"] / "run.json").read_text())["support"]
    assert support["level"] == "probed" and support["transformers"] == transformers.__version__
    assert set(support["undefined"]) == {"windows and sinks", "extensions"}
    rows = read_jsonl(folders_by_kind["bert"] / "evaluation.jsonl")  # reads to the left and to the right
    assert rows and {row["status"] for row in rows} == {"undefined"} and "not causal" in rows[0]["reason"]
    assert posbench("report", "outputs/models") == 0


HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts without end": ("qwen3_moe", {"num_local_experts": 10**9}, "not that of these weights"),
    "modules without end": ("gpt_neo", {"num_layers": 10**12}, "1,000,000,000,000 layers and"),
    "empty modules without end": ("gpt_neo", {"num_layers": 9_999, "hidden_size": 0}, "model"),
    "a list without end": ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "numbers above 1,048,576"),
    "a mask without end": ("gpt_neo", {"max_position_embeddings": 10**7}, "these weights"),
    "a table of angles without end": ("gptj", {"n_positions": 10**12}, "lower length"),
    "layers of no kind": ("cohere2", {"layer_types": ["evil"] * 3}, "transformers"),
    "no chunk": ("llama4_text", {"attention_chunk_size": 0}, "transformers"),
    "an image model": ("granite", {"model_type": "fuyu"}, "made of several models"),
    "code in its text part": (
        "granite",
        {"text_config": {"model_type": "granite", "auto_map": {"a": "b"}}},
        "auto_map",
    ),
    "attention elsewhere": ("granite", {"position_embedding_type": "x", "hidden_act": "someone/evil"}, "transformers"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_strangers_configuration_ends_in_one_line(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    kind, keys, said = HOSTILE[what]
    refused(on(shelf, kind), tmp_path, monkeypatch, capsys, lambda folder: changed(folder, **keys), said)


@pytest.mark.full
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_folder_is_said_of_any_kind(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    spoil, said = WRONG[what]
    refused(on(shelf, "granite"), tmp_path, monkeypatch, capsys, spoil, re.sub(r"21 tensors.*", "", said))


def test_probed_kinds_and_text_parts_are_not_trained_on(shelf: Path) -> None:
    for kind, said in (("granite", "evaluated only: expected llama"), ("gemma3", "expected its text part alone")):
        with pytest.raises(UserError, match=said):
            elsewhere.train_model(str(on(shelf, kind)), [])


def test_no_kernel_is_fetched_and_no_key_beyond_those_of_the_kind_is_given(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(on(shelf, "granite"), tmp_path / "m")
    changed(tmp_path / "m", _attn_implementation="someone/evil", kernel_config="someone/evil", _name_or_path="/x")
    config = building.configuration(folders.read(tmp_path / "m"), LONG)
    assert "evil" not in str(config.to_dict()) and config._attn_implementation_internal is None
    with pytest.raises(UserError, match="expected llama"):
        changed(tmp_path / "m", model_type="granit")
        folders.read(tmp_path / "m")
    assert "granite" in package.causal_models()
