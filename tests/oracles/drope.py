"""torch's own attention without any position: what is left after the drop (test_wrappers.py has it before)."""

from oracles.none import reads_positions, reference

CASES = [{}, {"drop_at": 0.0, "layout": "half"}]
