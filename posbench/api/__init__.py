"""The Python interface: `posbench.load`, `runs`, `train`, `evaluate` and `plot`."""
