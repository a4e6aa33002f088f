"""What every run imports. A sweep's fork server imports it once: four to five CPU seconds that each run then saves.

The server is a session of its own, so that a signal to the sweep's terminal or group reaches runs through the sweep.
"""

import os

import scipy.special  # noqa: F401
import torch._dynamo  # noqa: F401  # as arithmetic on shapes imports it, which sizes some encodings

import posbench.evaluation.printed
import posbench.launch.run
import posbench.terminal.console
import posbench.training.train  # noqa: F401

os.setsid()
