"""What every run imports, and a sweep's fork server once: four to five CPU seconds that each run then saves."""

import os

import scipy.special  # noqa: F401
import torch._dynamo  # noqa: F401  # as arithmetic on shapes imports it, which sizes some encodings

import posbench.launch.run  # noqa: F401

os.setsid()  # a signal to the sweep's terminal or group reaches runs through the sweep
