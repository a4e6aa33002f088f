"""What a configuration names, built: its encoding and its task, so that their options are checked before any work."""

from typing import TYPE_CHECKING

from posbench import encodings, tasks
from posbench.config.schema import Config, DataConfig
from posbench.errors import UserError
from posbench.tasks.base import Task

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding


def encoding_of(config: Config, vocabulary: tuple[str, ...] = ()) -> "Encoding":
    """The encoding of a configuration. Raises UserError if an option is wrong, or the file of its class is another.

    Args:
        vocabulary: token texts by id; none before there is a tokenizer.
    """
    from posbench.encodings.base import Shape  # torch comes with it

    model, length, asked = config.model, config.original_length, config.encoding
    if asked.file:
        from posbench.encodings.own import from_file

        encodings.register(from_file(asked.file, asked.file_sha256)[0])
    kv_heads = model.n_kv_heads or 0
    shape = Shape(
        model.d_model, model.n_heads, model.n_layers, length, vocabulary, model.token_rms, n_kv_heads=kv_heads
    )
    return encodings.build(asked.name, shape, asked.options)


def build_encoding(config: Config) -> "Encoding":
    """The same, alone a few megabytes; whoever asks draws the same random numbers afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        return encoding_of(config)


def task_of(data: DataConfig) -> Task:
    """The task of data that is one. Raises UserError for an unknown task and for an option that is wrong."""
    assert data.task is not None
    return tasks.build(data.task["name"], {key: value for key, value in data.task.items() if key != "name"})


def check_task(config: Config) -> None:
    """Refuse problems longer than a training sequence, and positions that cannot be shifted; text passes."""
    data, room = config.data, config.training.train_length
    if data.task is None:
        return
    task = task_of(data)
    if (needed := task.size(task.longest) + data.offset) > room:
        wrong = f"training.train_length is {room}: problems of '{data.name}' of length {task.longest}"
        raise UserError(f"{wrong} and data.offset={data.offset} take {needed} tokens, expected at least as many")
    if data.offset and "positions" in build_encoding(config).hooks:
        raise UserError(f"data.offset is {data.offset}: '{config.encoding.name}' chooses positions itself, expected 0")
