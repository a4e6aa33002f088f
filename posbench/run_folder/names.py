"""The files of a run folder."""

from posbench.config.schema import SAVED

CONFIG, RECORD, LOCK, LOG_TEXT = SAVED, "run.json", ".lock", "log.txt"
TOKENIZER = "tokenizer.json"
METRICS, EVALUATION = "metrics.jsonl", "evaluation.jsonl"
MODEL = "model"  # the folder of a HuggingFace model that was trained on
