"""The page of an exported model, or of one that was trained further: what it is, how to load it, its results."""

from collections.abc import Sequence

import yaml

from posbench.config.external import Trains
from posbench.config.schema import to_container
from posbench.data.tokenizer import SEPARATOR
from posbench.run_folder.rows import EvaluationRow

_PAGE = """---
{front}---

# {name}

{about}

## Results

{table}

Measured by posbench. On random tokens the logits in transformers differ from those of the run's own model by at most
{worst:.1e} of the largest, in fp32 on a CPU; `posbench_parity.json` has each length.

## Configuration

```yaml
{configuration}```
"""
_USE = """
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


def card(config: Trains, name: str, about: str, rows: Sequence[EvaluationRow], worst: float) -> str:
    """The page, in Markdown.

    Args:
        about: what the model is, in Markdown.
        rows: its results.
        worst: the largest difference of logits, as a share of the largest logit.
    """
    tags = ["posbench", "positional-encoding", config.encoding.name]
    lines = ["| protocol | after tokens | tokens | nats per token | bits per byte |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        nll = f"{row.nll:.4f}" if row.measured else row.status
        byte = "" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
        lines.append(f"| `{row.curve_name}` | {row.tokens or 0:,} | {row.length:,} | {nll} | {byte} |")
    sections = ("encoding", "model", "start", "training", "seed")
    facts = {key: part for key, part in to_container(config).items() if key in sections}
    return _PAGE.format(
        front=yaml.safe_dump({"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}),
        name=name,
        about=about,
        table="\n".join(lines),
        worst=worst,
        configuration=yaml.safe_dump(facts, sort_keys=False, allow_unicode=True),
    )


def how_to_load(trust: bool) -> str:
    """How an exported model is loaded and fed, in Markdown; `trust`: it is posbench's class."""
    return _USE.format(trust=", trust_remote_code=True" if trust else "", separator=SEPARATOR)
