"""What a model would need is known, and refused, before any of it is made."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import support
import yaml

from posbench import encodings, machine
from posbench.config import size
from posbench.config.schema import Config, EncodingConfig, ModelConfig, from_container, to_container
from posbench.config.shape import shape_of
from posbench.errors import RunFailed, UserError
from posbench.model.gpt import build, parameter_counts


def with_model(config: Config, **changes: Any) -> Config:
    model: ModelConfig = dataclasses.replace(config.model, **changes)
    return dataclasses.replace(config, model=model)


@pytest.mark.parametrize(
    ("mlp", "norm", "tied", "d_ff"),
    [*itertools.product(("gelu", "swiglu"), ("layernorm", "rmsnorm"), (True, False), (None, 48))],
)
def test_parameters_are_counted_as_they_are_built(
    tiny_config: Config, mlp: str, norm: str, tied: bool, d_ff: int | None
) -> None:
    config = with_model(tiny_config, mlp=mlp, norm=norm, tie_embeddings=tied, d_ff=d_ff)
    assert size.parameters(config, 257) == parameter_counts(build(config, 257))["total"]


@pytest.mark.parametrize(
    "override",
    ["model.n_layers=1000000", "model.d_model=1000000000", "training.batch_size=1000000000", "data.vocab_size=10**12"],
)
def test_what_no_machine_holds_is_refused_before_it_is_made(tiny_config: Config, override: str) -> None:
    key, _, value = override.partition("=")
    section, _, name = key.partition(".")
    plain = to_container(tiny_config)
    plain["data"]["tokenizer"] = "bpe"
    plain["training"]["tokens"] = 10**15
    plain[section][name] = eval(value)
    config = from_container(plain)
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        size.refuse_too_large(config, "cpu", "train")
    assert time.monotonic() - began < 1
    told = r"needs at least [\d,.]+ GiB \([\d,]+ parameters .*, there are [\d.]+ GiB \(.*\): .*POSBENCH_MEMORY_GIB=GIB"
    assert re.search(told, str(caught.value)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", encodings.names())
def test_an_encoding_is_measured_without_being_made(tiny_config: Config, name: str) -> None:
    config = dataclasses.replace(tiny_config, encoding=EncodingConfig(name))
    made = encodings.build(name, shape_of(config))
    assert size._of_encoding(config, 4) == sum(each.nbytes for each in [*made.parameters(), *made.buffers()])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shaw", {"max_distance": 10**9}),
        ("cope", {"max_position": 10**12}),
        ("t5", {"num_buckets": 10**11, "max_distance": 10**12}),
        ("path", {"rank": 10**10}),
        ("randomized", {"inner": "cope", "inner_options": {"max_position": 10**10}}),
        ("layered", {"layers": [{"name": "rope"}, {"name": "shaw", "max_distance": 10**11}]}),
    ],
)
def test_tables_of_an_encoding_that_no_machine_holds_are_refused(
    tiny_config: Config, name: str, options: dict[str, Any]
) -> None:
    config = dataclasses.replace(tiny_config, encoding=EncodingConfig(name, options))
    for purpose in ("build", "evaluate", "train"):
        with pytest.raises(UserError, match=rf"the model with '{name}' needs at least .* GiB .*there are .* GiB \("):
            size.refuse_too_large(config, "cpu", purpose)  # type: ignore[arg-type]
    assert not size.fits(config)


def test_the_positions_that_a_draw_orders_are_bounded(tiny_config: Config) -> None:
    config = dataclasses.replace(tiny_config, encoding=EncodingConfig("randomized", {"max_length": 10**12}))
    with pytest.raises(UserError, match=r"max_length is 1000000000000 .*at most 16,777,216"):
        size.refuse_too_large(config, "cpu", "train")


def with_evaluation(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, **changes))


def test_windows_that_no_machine_holds_are_refused(tiny_config: Config) -> None:
    config = with_evaluation(tiny_config, ratios=(1.0, 1e9))
    for purpose in ("evaluate", "train"):
        with pytest.raises(UserError, match=r"a window of [\d,]{14,} tokens needs at least .* lower the last of ev"):
            size.refuse_too_large(config, "cpu", purpose)  # type: ignore[arg-type]
    size.refuse_too_large(config, "cpu", "build")  # what only shows the model does not read so far


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ratios": tuple(range(1, 20_001))}, "evaluation.ratios has 20,000 entries: expected at most 256"),
        ({"extensions": tuple(map(str, range(65)))}, "evaluation.extensions has 65 entries: expected at most 64"),
        ({"ratios": (1, 1e300)}, r"evaluation reaches 1e\+300 training lengths: expected at most 1,000,000,000"),
        ({"longest": 1e10}, r"evaluation reaches 1e\+10 training lengths: expected at most 1,000,000,000"),
    ],
)
def test_evaluations_without_end_are_refused(tiny_config: Config, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        with_evaluation(tiny_config, **changes)


def test_the_limit_can_be_set(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    size.refuse_too_large(tiny_config, "cpu", "train")
    monkeypatch.setenv("POSBENCH_MEMORY_GIB", "0.0001")
    with pytest.raises(UserError, match=r"there are 0\.0 GiB \(POSBENCH_MEMORY_GIB\)"):
        size.refuse_too_large(tiny_config, "cpu", "train")
    monkeypatch.setenv("POSBENCH_MEMORY_GIB", "1e9")
    size.refuse_too_large(with_model(tiny_config, n_layers=1_000_000), "cpu", "train")
    monkeypatch.setenv("POSBENCH_MEMORY_GIB", "much")
    with pytest.raises(UserError, match="expected a number of GiB"):
        machine.memory_limit("cpu")


def test_limits_of_control_groups_count(tmp_path: pathlib.Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("12:memory:/box/job\n4:cpu:/box\n0::/slice/unit\n")
    for path, text in (
        ("memory/box/job/memory.limit_in_bytes", "5000"),
        ("memory/box/memory.limit_in_bytes", "3000"),
        ("slice/unit/memory.max", "max"),
        ("slice/memory.max", "2000"),
        ("cpu/box/memory.max", "1"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    assert sorted(machine._cgroup_limits(tmp_path, own)) == [2000, 3000, 5000]


@pytest.mark.full
def test_a_limit_of_the_process_counts(tiny_config: Config) -> None:
    code = "from posbench import machine; print(machine.memory_limit('cpu'))"
    command = f"ulimit -v 8000000; exec '{sys.executable}' -c \"{code}\""
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"({8_000_000 * 1024}, 'ulimit -v')"


@pytest.mark.full
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.n_layers=1000000", "needs at least"),
        ("model.d_model=1000000000", "needs at least"),
        ("runtime.threads=1000000000", "runtime.threads is 1000000000: expected at most 1,024"),
    ],
)
def test_train_answers_at_once(override: str, told: str, tmp_path: pathlib.Path) -> None:
    support.write_text(tmp_path)
    given = [*support.TINY, "data.path=text.txt", "training.tokens=128", "runtime.cache=cache", override]
    command = [sys.executable, "-m", "posbench", "train", *support.each_once(given)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "outputs").exists() and not (tmp_path / "cache").exists()


@pytest.mark.full
def test_a_strangers_run_of_a_huge_model_is_not_built(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    config = to_container(with_model(tiny_config, n_layers=1_000_000))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (tmp_path / "run.json").write_text(json.dumps({"status": "done"}), encoding="utf-8")
    for command in (["evaluate"], ["report"]):
        done = subprocess.run(
            [sys.executable, "-m", "posbench", *command, str(tmp_path)], capture_output=True, text=True, timeout=60
        )
        assert "Traceback" not in done.stderr
        if command == ["evaluate"]:
            assert done.returncode == 2 and "the model needs at least" in done.stderr


def test_no_memory_names_what_may_fit() -> None:
    with (
        pytest.raises(RunFailed, match="out of memory: you tried to allocate 9 GB; a smaller model may fit") as caught,
        machine.out_of_memory_as_failure("a smaller model"),
    ):
        raise MemoryError("you tried to allocate 9 GB")
    assert caught.value.reason == "oom"
    with pytest.raises(RuntimeError, match="shapes"), machine.out_of_memory_as_failure("a smaller model"):
        raise RuntimeError("shapes differ")
