"""A sweep as one Slurm array: a file of commands, a script that runs one of them, and
sbatch. Nothing follows the jobs.

A task that comes near its time limit saves its run and returns to the queue. The same
sweep later does what is missing.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from posbench.errors import UserError
from posbench.launch.plans import Plan
from posbench.terminal import console

_SCRIPT = """#!/bin/bash
#SBATCH --requeue --open-mode=append --signal=B:USR1@120
cd {here} || exit 1
[ "$SLURM_CPUS_PER_TASK" ] && export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
command=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {commands})
processes=
if [ "${{SLURM_NTASKS:-1}}" -gt 1 ]; then  # they are the processes of one run
    command="srun --kill-on-bad-exit $command"
    processes=processes=$SLURM_NTASKS
fi
eval "exec $command" &
run=$!
near_limit() {{
    if [ $SECONDS -gt 20 ]; then
        again=1
    else
        echo "error: expected --time=4 or more"
    fi
    kill -TERM $run
}}
# 120 s before the time limit: it saves itself. With less time than that it would be
# queued again for ever.
trap near_limit USR1
# scancel and scontrol requeue: so, too, and no second requeue
trap 'kill -TERM $run' TERM
# a wait ends with each signal, the last one with the run
while kill -0 $run 2>/dev/null; do wait $run; done
wait $run
code=$?
if [ $code -eq 143 ] && [ "$again" ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit $code
"""


def submit(todo: list[Plan], options: list[str]) -> None:
    """Submit an array with one task for each plan, and print its job id. Raises
    UserError if sbatch cannot.
    """
    parent = todo[0].output.parent.absolute()
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=parent))
    script = folder / "array.sh"
    commands = folder / "commands.txt"
    lines = ""
    for plan in todo:
        lines += shlex.join([sys.executable, "-P", "-m", *plan.command])
        if plan.config.runtime.processes is None:
            lines += " $processes"
        lines += "\n"
    commands.write_text(lines, encoding="utf-8")
    here = shlex.quote(str(Path.cwd()))
    text = _SCRIPT.format(here=here, commands=shlex.quote(str(commands)))
    script.write_text(text, encoding="utf-8")

    array = ["--parsable", f"--array=0-{len(todo) - 1}", f"--output={folder}/%a.log"]
    # if an option is given twice, the later one holds
    command = ["sbatch", *array, *options, str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise UserError(
            "there is no sbatch here: --slurm is for a machine that submits to Slurm"
        ) from None
    except subprocess.CalledProcessError as error:
        message = error.stderr.strip() or str(error)
        raise UserError(message.splitlines()[0]) from None
    tasks = console.plural(len(todo), "task")
    job = done.stdout.strip().partition(";")[0]  # where there are several clusters
    print(f"Slurm job {job} has {tasks}, logs in {folder}.")
    print("The same sweep later does what is missing and reports.")
