"""The run folder: its files, its owner, its rows and checkpoints."""

from posbench.config.schema import SAVED

CONFIG, RECORD, ROWS, TOKENIZER = SAVED, "run.json", "rows.jsonl", "tokenizer.json"
