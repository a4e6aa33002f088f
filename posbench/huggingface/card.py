"""The page of an exported model: what it is, how to load it, its limits and its results."""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from posbench import __version__
from posbench.config.external import TrainedOn, Trains
from posbench.config.schema import Config, to_container
from posbench.data.tokenizer import SEPARATOR
from posbench.huggingface.architectures import Stock
from posbench.huggingface.package import transformers
from posbench.huggingface.parity import Agreement
from posbench.run_folder.rows import EvaluationRow

_SHAPING = ("encoding", "model", "training", "seed")  # sections shown on the card


def card(
    config: Config,
    record: dict[str, Any],
    stock: Stock,
    step: int,
    rows: Sequence[EvaluationRow],
    agreements: Sequence[Agreement],
) -> str:
    """The page in Markdown.

    Args:
        record: content of `run.json`.
        step: number of updates behind the weights.
        rows: evaluation rows of one split.
    """
    length = config.training.train_length
    finished = "" if step >= config.training.steps else f" The training is not finished: {step} updates are done."
    if start := config.start:
        finished += f" It began from a run that was trained on {start.tokens:,} tokens at {start.train_length:,}."
    kind = f"a stock `{stock.architecture}`" if not stock.code else _CODE.format(version=__version__)
    plain = {key: value for key, value in to_container(config).items() if key in _SHAPING}
    sections = [
        _front("positional-encoding", config.encoding.name),
        f"# {record.get('id')}\n\nA small GPT with the positional encoding `{config.encoding.name}`, trained at "
        f"{length:,} tokens of `{_text_of(config)}` by posbench, as {kind}.{finished}",
        _USE.format(trust=", trust_remote_code=True" if stock.code else "", separator=SEPARATOR),
        _limits(stock),
        _results(rows),
        _same(agreements),
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)}```",
    ]
    return "\n\n".join(sections) + "\n"


_CODE = (
    "its own class. **It needs posbench {version}, which is not on PyPI (the package there is another project), and "
    "`trust_remote_code=True`**; after `import posbench.huggingface.modeling` it loads without that"
)
_USE = """## Use

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype=torch.float32{trust})
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("Some text").input_ids]])
logits = model(ids).logits
```

In training `{separator}` began every document. The tokenizer does not add it, and reads the same characters in a text
as plain text: put its id first yourself, as above. Generation also ends at this id."""


def of_trained_on(
    config: TrainedOn, command: object, rows: Sequence[EvaluationRow], agreements: Sequence[Agreement]
) -> str:
    """The page of a model that was trained on: from what, how long, and what it does to its level."""
    model, training = config.model, config.training
    base = {"base_model": model.source} if model.revision else {}
    commit = f" at {model.revision[:12]}" if model.revision else ""
    done = (
        f"`{model.kind}` model `{model.source}`{commit} (sha256 `{model.sha256[:12]}`), trained at "
        f"{config.start.train_length:,} tokens, was trained on by posbench {__version__} at "
        f"**{training.train_length:,} tokens**: {training.tokens:,} tokens of `{_text_of(config)}` in "
        f"{training.steps:,} updates, learning rate {training.learning_rate:g}, seed {config.seed}. Its positions: "
        f"`{config.encoding.name}`."
    )
    options = f"    {json.dumps(config.encoding.options, sort_keys=True)}\n\n    {command}"
    sections = [
        _front("long-context", config.encoding.name, **base),
        f"# {config.id}\n\nThe {done}\n\n{options}",
        "The licence and the limits of the model that it began from hold for it, too.",
        *(
            _results([row for row in rows if row.tokens == tokens], f"after {tokens:,} tokens")
            for tokens in sorted({row.tokens for row in rows if row.tokens is not None})
        ),
        _same(agreements),
    ]
    return "\n\n".join(sections) + "\n"


def _front(*tags: str, **more: str) -> str:
    facts = {"library_name": "transformers", "pipeline_tag": "text-generation", **more, "tags": ["posbench", *tags]}
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


def _limits(stock: Stock) -> str:
    lines = ["It is a model for measuring, not for use."]
    if stock.code:
        lines.append("It has no key-value cache, and refuses padding: all inputs of a batch have one length.")
    if stock.longest is not None:
        lines.append(f"Its positions are a table of {stock.longest:,} rows: longer inputs are an error.")
    else:
        lines.append("Longer inputs are accepted; the results show how well they work.")
    if stock.remark:
        lines.append(stock.remark)
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _results(rows: Sequence[EvaluationRow], when: str = "") -> str:
    if not rows:
        return "## Results\n\nNone: the run was not evaluated."
    lines = [
        "| protocol | tokens | training lengths | nats per token | 95 % | bits per byte |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        nll = f"{row.nll:.4f}" if row.measured else row.status
        interval = "" if row.ci_low is None or row.ci_high is None else f"{row.ci_low:.4f} to {row.ci_high:.4f}"
        byte = "" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
        cells = [f"`{row.curve_name}`", f"{row.length:,}", f"{row.length_ratio:g}", nll, interval, byte]
        lines.append(f"| {' | '.join(cells)} |")
    about = f"On the `{rows[0].split}` text, measured by posbench on the run itself."
    return f"## Results{when and f', {when}'}\n\n" + about + "\n\n" + "\n".join(lines)


def _same(agreements: Sequence[Agreement]) -> str:
    worst = max(one.difference / max(1.0, one.largest_logit) for one in agreements)
    lengths = ", ".join(f"{one.length:,}" for one in agreements)
    return (
        f"## Parity\n\nOn {lengths} random tokens, the logits differ from those of the run's own model by "
        f"at most {worst:.1e} of the largest, in fp32 on a CPU, with transformers {transformers().__version__} and "
        f"posbench {__version__}. Other versions and dtypes were not compared. `posbench_parity.json` has each length."
    )


def _text_of(config: Trains) -> str:
    data = config.data
    return data.name if data.dataset is None else f"{data.dataset} {data.subset or ''}".strip()
