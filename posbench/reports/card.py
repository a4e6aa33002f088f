"""The facts that decide between encodings: results, cost, kernels, cache, exports, and
models that have them.
"""

import pandas as pd

from posbench import encodings
from posbench.encodings.base import Encoding, Shape
from posbench.errors import UserError
from posbench.reports.render import Column, Table
from posbench.reports.tables import interval_cell, main_table
from posbench.run.rows import PLAIN

# the shape of experiment=demo
DEMO = Shape(d_model=128, n_heads=4, n_layers=4, train_length=64)
# the encoding of cost 1; the probe, at 4 training lengths
BESIDE, PROBE, FARTHER = "none", "passkey", 4
# By encoding, the model types of transformers that have it. Any rotary model has RoPE's
# scalings, by its `rope_type`.
MODELS = {
    "rope": "llama, mistral, qwen3, olmo2, gemma2",
    "partial_rope": "gpt_neox, phi, stablelm, nemotron, glm4",
    "p_rope": "gemma4",
    "decoupled_rope": "deepseek_v2, deepseek_v3",
    "learned_sinks": "gpt_oss",
    "pi": "rope_type linear",
    "dynamic_ntk": "rope_type dynamic",
    "llama3": "rope_type llama3",
    "yarn": "rope_type yarn: gpt_oss, ministral3",
    "longrope": "rope_type longrope: phi3",
    "temperature": "llama4, ministral3",
    "layered": "gemma3, cohere2, olmo3, smollm3, llama4",
    "alibi": "bloom, mpt, falcon",
    "t5": "t5, mt5, umt5, switch_transformers",
    "transformer_xl": "xlnet",
    "deberta": "deberta, deberta-v2",
    "learned": "gpt2, opt, gpt_neo, bert",
    "sinusoidal": "marian, m2m_100, xglm",
}


def decision_card(encoding: Encoding) -> dict[str, str]:
    """Return what is known of an encoding before any run."""
    architectures = encodings.architectures(encoding)
    return {
        "kernels": encodings.kernels(encoding),
        "cache": encodings.cache(encoding),
        "architectures": ", ".join(architectures) or "posbench's class",
        "models": MODELS.get(encoding.name, ""),
    }


def card_table(frame: pd.DataFrame, table: pd.DataFrame) -> Table:
    """Return a table to decide between schemes; `table`: what `results.compare.compare`
    returns for rows `frame`.
    """
    time, memory = (
        frame[["train_seconds", "cpu_seconds"]].min(axis=1),
        frame["peak_memory_bytes"].astype("float64"),
    )
    rows = frame.assign(time=time, memory=memory)[
        (frame["run_status"] == "done") & (frame["variant"] == PLAIN)
    ]
    rows_far = rows[
        (rows["length_ratio"] == FARTHER) & rows["newest"] & ~rows["repeated"]
    ]
    peaks = (
        rows_far[rows_far["protocol"] == "fixed_target"]
        .groupby("label")["memory"]
        .min()
    )
    cost = pd.concat([rows.groupby("label")["time"].min(), peaks], axis=1)
    accuracy = (
        rows_far[rows_far["task"] == PROBE]
        .groupby("label")["accuracy"]
        .mean()
        .rename("right")
    )
    cards = []
    for name in table["encoding"]:
        try:
            cards.append(decision_card(encodings.build(name, DEMO)))
        except UserError:  # it needs an option, or is not known here
            cards.append({})
    facts = pd.DataFrame(cards, table["label"])
    joined = table.join(
        pd.concat([cost / cost.reindex([BESIDE]).iloc[0], accuracy, facts], axis=1),
        on="label",
    )
    columns = [
        *(
            column
            for column in main_table(table).columns
            if column.name in ("encoding", "loss", "holds_to")
        ),
        Column("interval", "95 %", interval_cell("low", "high", ".3f"), of="nll"),
        Column("right", f"{PROBE} at {FARTHER}x", ".0%"),
        *(Column(name, f"{name} of {BESIDE}", ".2f") for name in ("time", "memory")),
        *(Column(name, name, text=True) for name in ("kernels", "cache")),
        Column("architectures", "exports", text=True),
        Column("models", "in transformers", text=True),
    ]
    note = (
        f"time (of the fastest seed) and memory (at {FARTHER}x): as multiples of"
        f" {BESIDE}'s; kernels: any, with a bias, or posbench's own; cache: whether"
        " keys and values suffice"
    )
    return Table("To decide", joined, columns, note)
