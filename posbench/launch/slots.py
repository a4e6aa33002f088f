"""How many runs there are at a time, and the GPUs and threads of each."""

import os

import torch

from posbench import machine
from posbench.config.schema import Config
from posbench.data.tokens import data_of
from posbench.launch import pool
from posbench.launch.execute import run
from posbench.launch.plans import Plan
from posbench.launch.pool import Status
from posbench.model.gpt import GPT, parameter_counts

# a model with at most so many parameters leaves a large GPU idle most of the time
_SMALL = 30_000_000
_AT_MOST_ON_A_GPU = 4


def execute(todo: list[Plan], n_jobs: int | None) -> dict[str, Status]:
    """Run plans, each in its own process, and return the status of each by run id."""
    return pool.run(todo, slots_for(todo, n_jobs), run)


def slots_for(todo: list[Plan], n_jobs: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each place for a run; none if all are done,
    perhaps on another machine.

    As many run at a time as there are cores, or as the GPUs hold (`runs_on_a_gpu`), and
    a run sees only its GPU; a run of several processes takes one for each of them. If
    more run at a time than there are GPUs, they share these evenly.
    """
    missing = pool.unfinished(todo)
    if not missing:
        return []
    runtime = todo[0].config.runtime
    size = max(plan.config.runtime.processes or 1 for plan in todo)
    device = machine.resolve(runtime.device)
    groups = []  # of GPUs, `size` in each
    if device.type != "cpu" and runtime.device in ("auto", "cuda"):
        names = [str(number) for number in range(torch.cuda.device_count())]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible:
            names = visible.split(",")
        for start in range(0, len(names) - size + 1, size):
            group = ",".join(names[start : start + size])
            groups.append({"CUDA_VISIBLE_DEVICES": group})
    # By default one group without any variable: a run sees all that there is, as with
    # cuda:1 or mps.
    gpus = groups or [dict[str, str]()]

    threads_of_run = size * (runtime.threads or 1)
    at_a_time = max(1, machine.cores() // threads_of_run)
    if device.type == "cuda":
        memory = machine.device_memory(device)  # the GPUs of a machine are alike
        shares = [runs_on_a_gpu(plan.config, memory) for plan in missing]
        at_a_time = max(len(gpus), min(min(shares) * len(gpus), at_a_time))
    elif device.type != "cpu":
        at_a_time = len(gpus)
    n_slots = min(len(todo), n_jobs or at_a_time)
    n_threads = runtime.threads or machine.threads_each(n_slots * size)
    of_every_run = {
        "OMP_NUM_THREADS": str(n_threads),
        machine.SHARED_BY: str(-(-n_slots // len(gpus))),  # rounded up
    }
    slots = []
    for number in range(n_slots):
        group_of_run = gpus[number % len(gpus)]
        slots.append(group_of_run | of_every_run)
    return slots


def runs_on_a_gpu(config: Config, memory: int) -> int:
    """Return how many runs of a configuration share a GPU with `memory` bytes.

    The GPU waits for the host in updates of a small model. So runs in one process whose
    model has at most 30 million parameters are up to four on a GPU: as many as fit into
    nine tenths of its memory. Each is taken to need

    - 4 GiB for CUDA, kernels and what the allocator keeps;
    - 16 bytes a parameter: weights, gradients and two moments;
    - 100 bytes a token and channel: in training of all layers, in evaluation of one;
    - 8 bytes a pair of tokens and head, of all layers: scores without a fused kernel.
    """
    model = config.model
    training = config.training
    evaluation = config.evaluation
    processes = config.runtime.processes or 1
    if processes > 1:
        return 1

    tokenizer = data_of(config.data, config.runtime.cache).tokenizer
    encoding = config.build_encoding(tokenizer.texts)
    with torch.device("meta"):  # weights without numbers
        gpt = GPT(model, tokenizer.vocab_size, encoding)
    parameters = parameter_counts(gpt)["total"]
    if parameters > _SMALL:
        return 1

    length = training.train_length
    trained = training.batch_size * length * model.n_layers
    longest = round(max(evaluation.ratios) * length)
    evaluated = max(evaluation.batch_tokens, longest)

    needed = 4 * 2**30
    needed += 16 * parameters
    needed += 100 * (trained + evaluated) * model.d_model
    needed += 8 * trained * length * model.n_heads
    fitting = int(0.9 * memory // needed)
    return max(1, min(fitting, _AT_MOST_ON_A_GPU))
