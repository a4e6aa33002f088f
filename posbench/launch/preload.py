"""The imports of every run. A sweep's fork server makes them once, which saves each run
four to five CPU seconds.
"""

import os

import scipy.special  # noqa: F401
import torch._dynamo  # noqa: F401  # some encodings compute with shapes, which imports it

import posbench.launch.execute  # noqa: F401

os.setsid()  # a signal to the sweep's terminal or group reaches runs through the sweep
