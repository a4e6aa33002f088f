"""The page of an exported model: what it is, how to load it, its limits and its results.

Content of the run's files is untrusted data here too: names are set as code and the configuration as an indented block,
so that neither becomes a link, a heading or HTML.
"""

import json
from collections.abc import Sequence
from pathlib import PurePath
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

_SHAPING = ("encoding", "model", "data", "training", "seed")  # sections shown on the card


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
    sections = [
        _front("positional-encoding", config.encoding.name),
        f"# {_code(record.get('id'))}\n\nA small GPT with the positional encoding `{config.encoding.name}`, trained at "
        f"{length:,} tokens by posbench, as {_kind(stock)}.{finished}",
        _use(stock),
        _limits(config, stock),
        _results(rows),
        _same(agreements),
        _versions(stock),
        f"## Configuration\n\n{_indented(_shaping(config))}",
    ]
    return "\n\n".join(sections) + "\n"


def of_trained_on(
    config: TrainedOn, command: object, rows: Sequence[EvaluationRow], agreements: Sequence[Agreement]
) -> str:
    """The page of a model that was trained on: from what, how long, and what it does to its level."""
    model, training = config.model, config.training
    base = {"base_model": model.source} if model.revision else {}
    commit = f" at {model.revision[:12]}" if model.revision else ""
    done = (
        f"`{model.kind}` model {_code(model.source)}{commit} (sha256 `{model.sha256[:12]}`), trained at "
        f"{config.start.train_length:,} tokens, was trained on by posbench {__version__} at "
        f"**{training.train_length:,} tokens**: {training.tokens:,} tokens of {_text_of(config)} in {training.steps:,} "
        f"updates, learning rate {training.learning_rate:g}, seed {config.seed}. Its positions: "
        f"`{config.encoding.name}`."
    )
    options = f"    {json.dumps(config.encoding.options, sort_keys=True)}\n\n    {command}"
    sections = [
        _front("long-context", config.encoding.name, **base),
        f"# {_code(config.id)}\n\nThe {done}\n\n{options}",
        "The licence and the limits of the model that it began from hold for it, too.",
        *(
            _results([row for row in rows if row.tokens == tokens], f"after {tokens:,} tokens")
            for tokens in sorted({row.tokens for row in rows if row.tokens is not None})
        ),
        _same(agreements),
    ]
    return "\n\n".join(sections) + "\n"


def _kind(stock: Stock) -> str:
    if not stock.code:
        return f"a stock `{stock.architecture}`"
    needed = f"posbench {__version__}, which is not on PyPI (the package there is another project)"
    return f"its own class. **It needs {needed}, and `trust_remote_code=True`**"


def _front(*tags: str, **more: str) -> str:
    facts = {"library_name": "transformers", "pipeline_tag": "text-generation", **more, "tags": ["posbench", *tags]}
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


def _use(stock: Stock) -> str:
    trust = ", trust_remote_code=True" if stock.code else ""
    loaded = (
        "The folder's `modeling_posbench.py` imports posbench and nothing else. After `import "
        "posbench.huggingface.modeling` the model loads without `trust_remote_code`:"
        if stock.code
        else "Plain transformers, without code from elsewhere:"
    )
    return f"""## Use

{loaded}

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype=torch.float32{trust})
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("Some text").input_ids]])
logits = model(ids).logits
```

In training {_code(SEPARATOR)} began every document. The tokenizer does not add it, and reads the same characters in a
text as plain text: put its id first yourself, as above. Generation also ends at this id."""


def _limits(config: Config, stock: Stock) -> str:
    length = config.training.train_length
    lines = [f"Trained at {length:,} tokens, on {_text_of(config)}. It is a model for measuring, not for use."]
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
        name = _code(row.curve_name).replace("|", "\\|")
        cells = [name, f"{row.length:,}", f"{row.length_ratio:g}", nll, interval, byte]
        lines.append(f"| {' | '.join(cells)} |")
    about = f"On the {_code(rows[0].split)} text, measured by posbench on the run itself."
    return f"## Results{when and f', {when}'}\n\n" + about + "\n\n" + "\n".join(lines)


def _same(agreements: Sequence[Agreement]) -> str:
    worst = max(one.difference / max(1.0, one.largest_logit) for one in agreements)
    lengths = ", ".join(f"{one.length:,}" for one in agreements)
    return (
        f"## Parity\n\nOn {lengths} random tokens, the logits differ from those of the run's own model by "
        f"at most {worst:.1e} of the largest, in fp32 on a CPU. `posbench_parity.json` has each length."
    )


def _versions(stock: Stock) -> str:
    cache = "true: `generate()` has the same logits with a cache" if stock.cached else "false (see Limits)"
    return (
        f"## Versions\n\nWritten and compared with transformers {_code(transformers().__version__)} and posbench "
        f"{_code(__version__)}. Other versions and other dtypes were not compared. `use_cache` is {cache}."
    )


def _text_of(config: Trains) -> str:
    data = config.data
    return _code(data.name if data.dataset is None else f"{data.dataset} {data.subset or ''}".strip())


def _shaping(config: Config) -> str:
    """The settings that shape the weights, as YAML; of a path only the last name: paths describe the machine."""
    plain = {key: value for key, value in to_container(config).items() if key in _SHAPING}
    for key in ("path", "dataset", "tokenizer"):
        if plain["data"][key] is not None and PurePath(plain["data"][key]).is_absolute():
            plain["data"][key] = PurePath(plain["data"][key]).name
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _code(value: object) -> str:
    """Text as inline code."""
    return f"`{str(value).replace('`', chr(39))}`"
