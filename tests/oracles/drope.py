"""torch's own attention without any position: what is left after the drop (test_wrappers.py has it before)."""

from oracles import none

CASES = [{}, {"drop_at": 0.0, "layout": "half"}]
reads_positions = none.reads_positions
reference = none.reference
