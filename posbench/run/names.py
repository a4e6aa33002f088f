"""The files of a run folder."""

from posbench.config.schema import SAVED

CONFIG, RECORD, ROWS, LOG_TEXT, TOKENIZER = SAVED, "run.json", "rows.jsonl", "log.txt", "tokenizer.json"
METRICS, EVALUATION = "metrics.jsonl", "evaluation.jsonl"  # of earlier versions
MODEL = "model"  # the folder of a HuggingFace model that was trained on
