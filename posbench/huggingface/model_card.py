"""The model card of an exported run."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from posbench import __version__
from posbench.config.schema import Config, to_container
from posbench.run import checkpoint
from posbench.run.rows import evaluation_rows, headline_split
from posbench.tasks.base import SEPARATOR

# of the run's configuration
_SECTIONS = ("encoding", "model", "start", "training", "seed")
_USE = f"""\
```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", OPTIONS)
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("EXAMPLE").input_ids]])
logits = model(ids).logits
```

In training `{SEPARATOR}` began every document. The tokenizer does not add it: put its
id first yourself, as above. Generation also ends at this id."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """A trained model in transformers' terms."""

    settings: dict[str, Any]  # the content of config.json
    tensors: dict[str, Tensor]
    remark: str = ""  # what its users must know
    # files of code by name, with their text
    code: dict[str, str] = dataclasses.field(default_factory=dict)


def write_card(
    new: Path,
    run: Path,
    config: Config,
    exported: Exported,
    agreement: str,
    example: str,
) -> None:
    """Write a model's README.md, with the results in the run's rows.

    Args:
        agreement: how far logits are from the run's.
        example: a text that the tokenizer can split.
    """
    results = [
        "| protocol | after tokens | tokens | nats per token |",
        "|---|---:|---:|---:|",
    ]
    rows = evaluation_rows(run)
    split = headline_split(rows, config.evaluation.split)
    for row in rows:
        if row.split == split:
            nll = f"{row.nll:.4f}" if row.measured else row.status
            trained = f"{row.tokens or 0:,}"
            of_curve = f"| `{row.curve_name}` | {trained} | {row.length:,} | {nll} |"
            results.append(of_curve)

    (architecture,) = exported.settings["architectures"]
    step = checkpoint.trained(run).step
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["posbench", "positional-encoding", config.encoding.name],
    }
    text = config.data.dataset or config.data.name
    length = config.training.train_length
    about = (
        f"A small GPT, trained at {length:,} tokens of `{text}` by posbench"
        f" {__version__}, as `{architecture}`, after {step:,} of"
        f" {config.training.steps:,} updates. It is for measuring, not for"
        f" use.{exported.remark}"
    )
    options = "dtype=torch.float32"
    if exported.code:
        options += ", trust_remote_code=True"
    parity = f"On random tokens, in fp32 on a CPU, it has in transformers {agreement}."
    settings = to_container(config)
    shown = {section: settings[section] for section in _SECTIONS}
    parts = [
        f"---\n{yaml.safe_dump(front)}---",
        f"# {run.name}",
        about,
        _USE.replace("OPTIONS", options).replace("EXAMPLE", example),
        "\n".join(results),
        parity,
        f"```yaml\n{yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)}```\n",
    ]
    (new / "README.md").write_text("\n\n".join(parts), encoding="utf-8")
