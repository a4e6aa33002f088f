"""What the runs of a sweep cost: runs, tokens, and hours on this machine."""

import shlex
from collections.abc import Sequence

from posbench.launch import pool
from posbench.launch.plans import Plan
from posbench.run import checkpoint
from posbench.run.speed import time_here
from posbench.terminal import console


def cost(todo: list[Plan], trials: Sequence[Plan] = ()) -> str:
    """Return the commands of plans that are not finished, one per line, then how many
    runs and tokens those and the trials of learning rates are, and how long they take.
    """
    lines = []
    rates_are_known = not pool.unfinished(trials)
    if not rates_are_known:
        lines.append("The trials decide the learning rates, and so the commands.")
    all_plans = [*trials, *todo]
    n_finished = 0
    tokens = 0
    work = []
    for plan in all_plans:
        if pool.is_finished(plan):
            n_finished += 1
            continue
        if plan.command and rates_are_known:  # a trial has none
            lines.append(shlex.join(plan.command))
        training = plan.config.training
        n_updates = training.steps
        saved = checkpoint.every(plan.folder)
        if saved:
            n_updates -= saved[0].step
        if n_updates:  # else it is only evaluated
            n_tokens = n_updates * training.tokens_per_step
            tokens += n_tokens
            work.append((plan.config, float(n_tokens)))

    runs = console.plural(len(all_plans), "run")
    counts = f"{n_finished} finished, {len(all_plans) - n_finished} to do"
    lines.append(f"{runs}: {counts}, {tokens:,} tokens to train on.")
    if work:
        outputs = {plan.folder.parent.parent for plan in all_plans}
        lines.append(time_here(work, outputs))
    lines.append("Nothing was run or written.")
    return "\n".join(lines)
