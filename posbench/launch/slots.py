"""How many runs there are at a time, and the GPUs and threads of each."""

import os

import torch

from posbench import machine
from posbench.launch import pool
from posbench.launch.plans import Plan
from posbench.launch.pool import Status
from posbench.launch.run import run


def execute(todo: list[Plan], n_jobs: int | None) -> dict[str, Status]:
    """Run plans, each in its own process, and return the status of each by run id.

    As many run at a time as there are cores or GPUs, and a run sees only its GPU; a run
    of several processes takes one for each of them. If more run at a time than there
    are GPUs, they share these evenly.
    """
    runtime = todo[0].config.runtime
    size = runtime.processes or 1
    # The variables of each group of GPUs. By default one group without any: a run sees
    # all that there is, as with cuda:1 or mps.
    gpus = [dict[str, str]()]
    if machine.resolve(runtime.device).type == "cpu":
        threads_of_run = size * (runtime.threads or 1)
        at_a_time = max(1, machine.cores() // threads_of_run)
    else:
        if runtime.device in ("auto", "cuda"):
            gpus = _groups_of_gpus(size) or gpus
        at_a_time = len(gpus)

    n_slots = n_jobs or min(len(todo), at_a_time)
    n_threads = runtime.threads or machine.threads_each(n_slots * size)
    slots = []
    for number in range(n_slots):
        group = gpus[number % len(gpus)]
        slots.append(group | {"OMP_NUM_THREADS": str(n_threads)})
    return pool.run(todo, slots, run)


def _groups_of_gpus(size: int) -> list[dict[str, str]]:
    """Return the variable that shows a run `size` GPUs, for each such group of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        names = visible.split(",")
    else:
        names = [str(number) for number in range(torch.cuda.device_count())]
    groups = []
    for start in range(0, len(names) - size + 1, size):
        group = ",".join(names[start : start + size])
        groups.append({"CUDA_VISIBLE_DEVICES": group})
    return groups
