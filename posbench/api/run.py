"""A run folder as a Python object."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from posbench.config.external import AnyConfig, TrainedElsewhere, TrainedOn
from posbench.errors import UserError
from posbench.results import frame
from posbench.results.headline import MAIN, MAIN_OF_TASK, Headline, headline
from posbench.run_folder.folder import load_any_config, load_record
from posbench.run_folder.jsonl import number, read_jsonl
from posbench.run_folder.names import METRICS
from posbench.run_folder.rows import COLUMNS, EVALUATION_KEY, PLAIN, EvaluationRow, evaluation_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from posbench.data.tokenizer import Tokenizer
    from posbench.model.gpt import GPT

# Whole numbers that a row may lack.
_COUNTS = (
    "problem_length", "offset", "stride", "window", "n_tokens", "n_bytes", "n_blocks", "n_documents",
    "peak_memory_bytes",
)  # fmt: skip


# Of `curve`: the columns that come first.
_FIRST = (
    "protocol",
    "length",
    "length_ratio",
    "nll",
    "ci_low",
    "ci_high",
    "learned",
    "perplexity",
    "extension",
    "status",
)
_FIRST_OF_TASK = (
    "task", "problem_length", "length_ratio", "offset", "accuracy", "exact_match", "learned", "nll", "status",
)  # fmt: skip


def load(run: str | Path) -> "LoadedRun":
    """Read a run folder, finished or not.

    Args:
        run: the folder, `outputs/STUDY/RUN`.

    Raises:
        UserError: it is no run folder, or its files cannot be read as what they should be.
    """
    return LoadedRun(Path(run))


class LoadedRun:
    """A run folder as it was when it was read: load it again to see what came later.

    Attributes:
        folder: where it lies.
        config: what was asked for.
        record: what became of it, the content of `run.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: AnyConfig = load_any_config(folder)
        self.record: dict[str, Any] = load_record(folder)
        self._rows = evaluation_rows(folder)
        self._frame = frame.read([folder])
        if self.status == "unreadable":
            raise UserError(f"{folder}: {self._frame['run_reason'].iloc[0]}")

    @property
    def id(self) -> str:
        """The run's name; its last eight digits are those of all that shapes its weights."""
        return str(self.record.get("id") or self.folder.name)

    @property
    def status(self) -> str:
        """`done`, `running`, `stopped`, or why it failed: `diverged`, `oom`, `disk`, `error`."""
        return str(self._frame["run_status"].iloc[0])

    @functools.cached_property
    def headline(self) -> Headline:
        """The run in a few values: `learned`, `nll_1x` .. and `rise_4x` .. (nats per token), `reach` and `uses`.

        The last two are lengths in tokens, and None for a run that has not learned. Of a run on a task: `learned`,
        `steps_to_gate`, `accuracy_1x` .. and `exact_match_1x` .. (shares).
        """
        return headline(self._frame)

    @property
    def learned(self) -> str | None:
        """Whether it has learned: `yes`, `no` or `not resolved`; None if that is not known.

        Text: its nll at the training length is below that of the best n-gram model on the same targets, by a 95 %
        interval over documents. Rows of earlier versions cannot be paired by document: there the two numbers decide.
        Task: 99 % of the answers' tokens are right at every trained length.

        It is not known if nothing was evaluated, if a version without n-gram models did, or if the model was trained
        elsewhere.
        """
        found = self.headline["learned"]
        return None if found is None else str(found)

    # -- what was measured -----------------------------------------------------------------------------------------

    def curve(self) -> pd.DataFrame:
        """What was evaluated, a row each: fixed_target as trained first, then narrowed or extended, then the rest.

        `length` is in tokens, `nll` and its 95 % interval `ci_low`, `ci_high` in nats per token. What is undefined is
        NaN; `status` and `reason` say why. `learned` is that of the run, in every row. `curve` names the rows that
        belong together: fixed_target, windowed, nonoverlap, fixed_target_yarn ...

        Of a run on a task: `accuracy` and `exact_match`, shares of tokens and of problems, by `problem_length`; as
        trained first, then with shifted positions (`offset`), then narrowed, extended or varied.
        """
        first, order = (_FIRST, _order) if self.config.data.task is None else (_FIRST_OF_TASK, _order_of_task)
        rows = sorted(self._rows, key=order)
        columns = ["curve", *first, *(column for column in COLUMNS if column not in first)]
        of_run = {"learned": self.learned}
        frame = pd.DataFrame([{"curve": row.curve_name, **row.to_json(), **of_run} for row in rows], columns=columns)
        return frame.astype(dict.fromkeys(_COUNTS, "Int64"))

    def metrics(self) -> pd.DataFrame:
        """Training as it went, a row per logged step: `step`, `tokens`, `train/loss`, `validation/nll` (nats), ..."""
        lines = read_jsonl(self.folder / METRICS)
        rows = [{key: number(value) for key, value in line.items()} for line in lines]
        frame = pd.DataFrame(
            rows, columns=list(dict.fromkeys(["step", "tokens", *(key for row in rows for key in row)]))
        )
        frame = frame.dropna(subset=["step", "tokens"]).groupby("step", as_index=False).last()
        return frame.astype({"step": "int64", "tokens": "int64"})

    def units(self) -> pd.DataFrame:
        """The sums behind `curve`, a row per unit of text: for statistics of one's own.

        `tokens`; in nats `nll` and `ngram`, that of the best n-gram model. The nth units of rows of equal
        `targets_sha256` are of the same tokens, in other runs, too. A unit is a `document`, or a segment of one where
        there are few.
        """
        lists = [name for name in self._frame if name.startswith("unit_") and self._frame[name].notna().any()]
        rows = self._frame.dropna(subset=lists)[[*EVALUATION_KEY, "targets_sha256", *lists]]
        names = {name: name.removeprefix("unit_").removesuffix("s") for name in lists} | {"unit_tokens": "tokens"}
        return rows.explode(lists, ignore_index=True).rename(columns=names)

    # -- the model -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer it was trained with: `encode(texts)`, `decode(ids)`, and the `separator` before each document.

        Raises:
            UserError: the folder has no tokenizer yet.
        """
        from posbench.run_folder.trained import tokenizer_of

        return tokenizer_of(self.folder)

    def model(self, device: str = "cpu") -> "GPT":
        """The trained model, its newest checkpoint, in eval mode: `model(run.ids(text))` is logits (1, T, vocab_size).

        Args:
            device: cpu, cuda, cuda:1, mps or auto.

        Raises:
            UserError: no complete checkpoint, no such device, or a model that was trained elsewhere.
        """
        from posbench import machine
        from posbench.run_folder.trained import model_of

        if isinstance(self.config, TrainedOn):
            raise UserError(f"{self.folder / 'model'} is a HuggingFace model: transformers loads it")
        if isinstance(self.config, TrainedElsewhere):
            raise UserError(f"{self.folder} holds results of {self.config.model.source}: transformers loads that model")
        return model_of(self.folder, self.config, self.tokenizer).to(machine.resolve(device))

    def ids(self, text: str) -> "Tensor":
        """Token ids (1, T) of a text, the separator first."""
        import torch

        return torch.tensor([[self.tokenizer.separator, *self.tokenizer.encode([text])[0].tolist()]])

    # -- to look at ------------------------------------------------------------------------------------------------

    def plot(self) -> "Figure":
        """The curve beyond the training length, as in a report: its level, and its rise on the same target tokens.

        Of a run on a task: accuracy by problem length.

        Raises:
            UserError: the run has not ended, or nothing was evaluated.
        """
        from posbench.report import charts

        return charts.of_runs(self._frame)

    def __repr__(self) -> str:
        numbers = "".join(f", {name} {value}" for name, value in self._shown())
        return f"<run {self.id}: {self.status}{numbers}; {self.folder}>"

    def _shown(self) -> list[tuple[str, str]]:
        """The known values, by name."""
        named = ((name, self.headline.get(name)) for name in (MAIN if self.config.data.task is None else MAIN_OF_TASK))
        return [
            (name, value if isinstance(value, str) else f"{value:.4g}") for name, value in named if value is not None
        ]


def _order(row: EvaluationRow) -> tuple[Any, ...]:
    """fixed_target as trained first, then narrowed or extended, then the rest."""
    return not row.is_headline, row.curve_name != "fixed_target", row.curve_name, row.length


def _order_of_task(row: EvaluationRow) -> tuple[Any, ...]:
    """The task as trained first, then with shifted positions, then narrowed, extended or varied."""
    varied = ":" in (row.task or "") or row.kind != PLAIN
    return varied, bool(row.offset), row.curve_name, row.offset or 0, row.length_ratio
