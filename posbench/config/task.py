"""The synthetic task of a configuration, and what it needs of the rest."""

from posbench import tasks
from posbench.config.schema import Config, DataConfig
from posbench.config.shape import planned
from posbench.errors import UserError
from posbench.tasks.base import Task


def task_of(data: DataConfig) -> Task:
    """The task of data that is one. Raises UserError for an unknown task and for an option that is wrong."""
    assert data.task is not None
    options = {key: value for key, value in data.task.items() if key != "name"}
    return tasks.build(data.task["name"], options)


def check(config: Config) -> None:
    """Refuse a task that cannot be trained as the configuration says; text passes.

    Raises:
        UserError: an option of the task, problems longer than a training sequence, or positions that cannot be shifted.
    """
    data, room = config.data, config.training.train_length
    if data.task is None:
        return
    task = task_of(data)
    needed = task.size(task.longest) + data.offset
    if needed > room:
        shifted = f" from position {data.offset}" if data.offset else ""
        told = f"training.train_length is {room}: problems of '{data.name}' of length {task.longest}{shifted}"
        raise UserError(f"{told} take {needed} tokens, expected at least as many")
    if data.offset and "positions" in planned(config).hooks:
        raise UserError(f"data.offset is {data.offset}: '{config.encoding.name}' chooses positions itself, expected 0")


def remarks(config: Config) -> list[str]:
    """Warnings about training this encoding on a task, a line each."""
    encoding = config.encoding
    if config.data.task is None or encoding.name != "minmax" or encoding.options.get("norm", "batch") != "batch":
        return []
    told = "minmax: norm=batch divides by the last position of a row, whatever fills it behind a shorter problem"
    return [f"{told}; tests have no filling, encoding.norm=length is not changed by it"]
