"""The files of a run folder."""

CONFIG, RECORD, LOCK, LOG_TEXT = "config.yaml", "run.json", ".lock", "log.txt"
METRICS, EVALUATION, BLOCKS = "metrics.jsonl", "evaluation.jsonl", "evaluation_blocks.jsonl"
OWN = (CONFIG, RECORD, LOCK, LOG_TEXT, METRICS, EVALUATION, BLOCKS)
