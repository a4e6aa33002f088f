"""The run folder: its files, its owner, its rows and checkpoints."""

import re

CONFIG = "config.yaml"
RECORD = "run.json"
TOKENIZER = "tokenizer.json"
ROWS = "rows.jsonl"
# the name of a folder that `--restart` put beside the new run's
MOVED_ASIDE = re.compile(r".+\.old-\d+")
