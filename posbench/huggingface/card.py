"""The page of an exported model, or of one that was trained further: what it is, how to load it, its results."""

from collections.abc import Sequence

import yaml

from posbench.config.external import Trains
from posbench.config.schema import to_container
from posbench.data.tokenizer import SEPARATOR
from posbench.run.rows import EvaluationRow

Agreements = list[dict[str, float]]  # by length: `length`, `difference` of logits, `largest_logit`, `limit`
USE = f"""
```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("Some text").input_ids]])
logits = model(ids).logits
```

In training `{SEPARATOR}` began every document. The tokenizer does not add it, and reads the same characters in a text
as plain text: put its id first yourself, as above. Generation also ends at this id."""


def card(config: Trains, name: str, about: str, rows: Sequence[EvaluationRow], agreements: Agreements) -> str:
    """The page, in Markdown; `about`: what the model is, `agreements`: its logits in transformers and in the run."""
    tags = ["posbench", "positional-encoding", config.encoding.name]
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    lines = ["| protocol | after tokens | tokens | nats per token | bits per byte |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        nll = f"{row.nll:.4f}" if row.measured else row.status
        byte = "" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
        lines.append(f"| `{row.curve_name}` | {row.tokens or 0:,} | {row.length:,} | {nll} | {byte} |")
    sections = ("encoding", "model", "start", "training", "seed")
    facts = {key: part for key, part in to_container(config).items() if key in sections}
    parity = (
        f"On random tokens its logits in transformers differ from the run's by at most {worst(agreements):.1e} of the "
        "largest, in fp32 on a CPU; `posbench_parity.json` has each length."
    )
    configuration = f"```yaml\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}```"
    parts = [f"---\n{yaml.safe_dump(front)}---", f"# {name}", about, "\n".join(lines), parity, configuration]
    return "\n\n".join(parts) + "\n"


def worst(agreements: Agreements) -> float:
    """The largest difference of logits, as a share of the largest logit, or of 1 if that is larger."""
    return max(one["difference"] / max(1.0, one["largest_logit"]) for one in agreements)
