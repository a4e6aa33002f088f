"""The run folder: its files, its owner, its rows and checkpoints."""

from posbench.config import identity, schema

CONFIG = schema.SAVED
RECORD = identity.RECORD
TOKENIZER = identity.TOKENIZER
ROWS = "rows.jsonl"
