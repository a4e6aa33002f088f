"""What a run is trained and tested on: the tokens of a text, or the problems of a task.

Both have a `tokenizer`, a `record` for `run.json`, `batches` to train on and `validation_batches`.
"""

from posbench.config.schema import DataConfig
from posbench.data import problems, tokens
from posbench.data.problems import TaskData
from posbench.data.tokens import Tokens


def prepare(config: DataConfig, cache: str | None) -> Tokens | TaskData:
    """Return what a configuration means, ready to be trained on.

    Args:
        cache: `runtime.cache`, for text.

    Raises:
        UserError, RunFailed: as `tokens.prepare` and `problems.prepare`.
    """
    if config.task is not None:
        return problems.prepare(config)
    return tokens.prepare(config, tokens.cache_folder(cache))
