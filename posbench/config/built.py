"""What a configuration names, built: its encoding and its task, so that their options are checked before any work."""

from typing import TYPE_CHECKING

from posbench import encodings, tasks
from posbench.config.schema import Config, DataConfig
from posbench.errors import UserError
from posbench.tasks.base import Task

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding


def encoding_of(config: Config, vocabulary: tuple[str, ...] = ()) -> "Encoding":
    """Build the encoding of a configuration, with token texts by id, if there is a tokenizer.

    Raises UserError if an option is wrong, or the file of its class is another.
    """
    from posbench.encodings.base import Shape  # torch comes with it

    model, asked = config.model, config.encoding
    if asked.file:
        from posbench.encodings.own import from_file

        encodings.register(from_file(asked.file, asked.file_sha256)[0])
    sizes = (model.d_model, model.n_heads, model.n_layers, config.original_length)
    shape = Shape(*sizes, vocabulary, model.token_rms, n_kv_heads=model.n_kv_heads or 0)
    return encodings.build(asked.name, shape, asked.options)


def build_encoding(config: Config) -> "Encoding":
    """Build the same for a look at it: whoever asks draws the same random numbers afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        return encoding_of(config)


def task_of(data: DataConfig) -> Task:
    """Build the task of data that is one. Raises UserError for an unknown task and for an option that is wrong."""
    options = dict(data.task or {})
    return tasks.build(options.pop("name"), options)


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
