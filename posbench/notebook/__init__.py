"""Runs from Python: what `posbench.load`, `runs`, `train`, `evaluate` and `plot` give to a notebook or a script."""
