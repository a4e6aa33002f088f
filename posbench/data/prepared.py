"""The data of a run: the tokens of a text, or the problems of a task.

Both have a `tokenizer`, a `record` for `run.json`, `batches` to train on and `validation_batches`.
"""

from posbench.config.schema import DataConfig
from posbench.data import problems, tokens
from posbench.data.problems import TaskData
from posbench.data.tokens import Tokens


def prepare(config: DataConfig, cache: str | None) -> Tokens | TaskData:
    """Return the data of a configuration, ready for training; `cache` is `runtime.cache`, for text.

    Raises:
        UserError, RunFailed: as `tokens.prepare` and `problems.prepare`.
    """
    if config.task is not None:
        return problems.prepare(config)
    return tokens.prepare(config, tokens.cache_folder(cache))
