"""Check an evaluation before any work is done for it."""

import contextlib

from posbench.config.built import build_encoding, check_task
from posbench.config.schema import Config
from posbench.encodings.extend import methods
from posbench.errors import Undefined
from posbench.evaluation import probes
from posbench.evaluation.plan import from_training_on
from posbench.evaluation.variants import parse_choice


def check(config: Config) -> None:
    """Refuse mistyped settings. What an encoding lacks, or lacks at a length, becomes an `undefined` row instead.

    Raises:
        UserError: a task that does not fit, an unknown probe or extension, or an option that it does not have, of
            another type or out of range.
    """
    check_task(config)
    for text in config.evaluation.tasks:
        probes.of(text, [], config.evaluation.targets, config.training.train_length)
    if config.evaluation.extensions:
        _check_extensions(config)


def _check_extensions(config: Config) -> None:
    """Try each extension at every length: the allowed options can depend on encoding and length."""
    encoding, train_length = build_encoding(config), config.training.train_length
    for text in config.evaluation.extensions:
        method, options = parse_choice(text)
        for length in from_training_on(config.evaluation, train_length):
            with contextlib.suppress(Undefined):
                methods.extended(encoding, method, length, train_length, **options)
