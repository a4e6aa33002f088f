"""`posbench doctor`: what a bug report needs. It names no secret, no user and no host."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import posbench
from posbench.config.shipped import configs_dir
from posbench.errors import UserError

_PACKAGES = (
    "torch", "typer", "hydra-core", "omegaconf", "pydantic", "datasets", "tokenizers", "safetensors", "numpy",
    "wandb", "rich",
)  # fmt: skip
_ENVIRONMENT = (
    "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "WANDB_MODE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "POSBENCH_NATIVE",
)  # fmt: skip


def show(as_json: bool) -> None:
    """Print the report: JSON, or one `key: value` per line."""
    facts = report()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key.replace('_', ' ') + ':':{width + 2}}{'-' if shown is None else shown}")


def report() -> dict[str, Any]:
    """Facts about this installation and machine."""
    import torch

    from posbench import machine, processes
    from posbench.data.tokens import cache_folder
    from posbench.kernels import library
    from posbench.run_folder.wandb_session import choose_mode

    device = machine.resolve("auto")
    return {
        "posbench": posbench.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu_model(),
        "cpu_threads": f"{torch.get_num_threads()} used by torch, {os.cpu_count()} in the machine",
        "cpu_flags": _cpu_flags(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "devices": ", ".join(_devices()),
        "between_processes": ", ".join(processes.backends()) or "nothing: this torch trains in one process only",
        "attention": library.described(),
        "precision_auto": f"{machine.dtype_name(machine.resolve_precision('auto', device))} on {device}",
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "wandb_mode": choose_mode("auto"),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "cache": _short(cache_folder(None)),
        "configs": _short(configs_dir()),
        "configs_found": len(list(configs_dir().rglob("*.yaml"))),
        "runs_in_outputs": _runs() or None,
        "terminal": f"{'yes' if sys.stdout.isatty() else 'no'}, {sys.stdout.encoding}",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cpu_flags() -> str:
    from posbench import machine

    wanted = ("avx2", "avx512_f", "avx512_bf16", "amx_tile", "amx_bf16", "arm_bf16")
    return ", ".join(flag for flag in wanted if flag in machine.cpu_flags()) or "none of interest"


def _devices() -> list[str]:
    import torch

    cuda = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _runs() -> dict[str, str]:
    """The number of runs in ./outputs by status; `died`: killed before it could record its end."""
    from posbench.run_folder.finding import run_folders
    from posbench.run_folder.folder import load_record
    from posbench.run_folder.lock import died

    counted: Counter[str] = Counter()
    with contextlib.suppress(UserError, OSError):
        for folder in run_folders([Path("outputs")]):
            status = str(load_record(folder).get("status"))
            counted["died" if status == "running" and died(folder) else status] += 1
    return {status: str(number) for status, number in counted.most_common()}


def _short(path: Path) -> str:
    """A path without the user's name."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
