"""Record in a run's folder that it begins or ends."""

import dataclasses
from typing import Any

from posbench.config.schema import Config, to_container
from posbench.data.tokens import TaskData, Tokens
from posbench.errors import UserError
from posbench.run import TOKENIZER, checkpoint
from posbench.run.folder import Run


def record_begin(
    run: Run, config: Config, tokens: Tokens | TaskData, resources: dict[str, Any]
) -> None:
    """Begin an attempt of a run. Raises UserError if it may not be continued on this
    text or in this precision.
    """
    run.refuse_changes(tokens.meta["sha256"], tokens.tokenizer.sha256)
    newest = checkpoint.newest(run.folder, (checkpoint.STATE,))
    if newest and newest.step < config.training.steps:
        saved, dtype = newest.state()["dtype"], resources["dtype"]
        if saved != dtype:
            raise UserError(
                f"{run.folder} was trained in {saved} up to step {newest.step} and"
                f" would go on in {dtype} here: continue it where training.precision is"
                " that, or begin anew with --restart"
            )
    run.begin_attempt(**resources)
    tokens.tokenizer.save(run.folder / TOKENIZER)
    run.update(tokenizer_sha256=tokens.tokenizer.sha256)


def record_end(run: Run | None, config: Config) -> None:
    """Record that a run is done, in the process that has its folder."""
    if run is None:
        return
    if run.record.status != "done":
        run.write_config(dataclasses.replace(run.config, evaluation=config.evaluation))
    run.update(evaluated=to_container(config)["evaluation"])
    run.finish("done")
