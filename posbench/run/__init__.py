"""The run folder: its files, its owner, its rows and checkpoints."""

from posbench.config import identity
from posbench.config.schema import SAVED

CONFIG, RECORD, TOKENIZER = SAVED, identity.RECORD, identity.TOKENIZER
ROWS = "rows.jsonl"
