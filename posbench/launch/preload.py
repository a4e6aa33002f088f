"""What every job imports. A sweep's fork server imports it once: four to five CPU seconds that each job then saves.

The server is a session of its own, so that a signal to the sweep's terminal or group reaches jobs through the sweep.
"""

import os

import scipy.special  # noqa: F401
import torch._dynamo  # noqa: F401  # as arithmetic on shapes imports it, which sizes some encodings

import posbench.evaluation.curve
import posbench.launch.ranks
import posbench.terminal.console  # noqa: F401

os.setsid()
