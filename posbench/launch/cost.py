"""What the runs of a sweep cost: runs, tokens, and hours on this machine."""

import shlex

from posbench.launch import pool
from posbench.launch.plans import Plan
from posbench.run import checkpoint
from posbench.run.speed import time_here
from posbench.terminal import console


def cost(todo: list[Plan]) -> str:
    """Return the commands of plans that are not finished, one per line, then how many
    runs and tokens those are, and how long they take.
    """
    lines = []
    n_finished = 0
    tokens = 0
    work = []
    for plan in todo:
        if pool.is_finished(plan):
            n_finished += 1
            continue
        if plan.command:  # a trial of a learning rate has none
            lines.append(shlex.join(plan.command))
        is_evaluated_only = pool.is_trained(plan) and checkpoint.every(plan.folder)
        if not is_evaluated_only:
            training = plan.config.training
            n_tokens = training.steps * training.tokens_per_step
            tokens += n_tokens
            work.append((plan.config, float(n_tokens)))

    runs = console.plural(len(todo), "run")
    counts = f"{n_finished} finished, {len(todo) - n_finished} to do"
    lines.append(f"{runs}: {counts}, {tokens:,} tokens to train on.")
    if work:
        outputs = {plan.folder.parent.parent for plan in todo}
        lines.append(time_here(work, outputs))
    lines.append("Nothing was run or written.")
    return "\n".join(lines)
