"""Evaluation beyond the training length: rows that are wanted, measured and written.

Read first `protocols` (which tokens are scored), then `requests` (which rows are
wanted), `evaluate` (how a row on text is measured; `problems` for tasks and for probes
that ask) and `job` (what is evaluated, and what is written). `subjects` has the
interface of what can be evaluated, `ngrams` and `mixture` the simple readers that a
model should beat.
"""
