"""Whether a run compiles what lies between attention layers: what `runtime.compile=auto` comes to."""

import os
import shutil
import sys

import torch

from posbench.config import size
from posbench.config.external import Trains
from posbench.config.schema import Config
from posbench.processes import World

# Operations in matrix products per CPU thread: minutes of training, which make up for the seconds of the start.
PAYS_FROM = 2e14


def is_compiled(config: Trains, device: torch.device, world: World) -> bool:
    """Whether the compiler serves a run.

    `auto` compiles what it was measured to make faster by more than its start takes (docs/performance.md): on CPUs with
    a C++ compiler, blocks of RMSNorm and SwiGLU, if there are minutes to train. GPT blocks gained nothing, and on other
    devices nothing was measured. It follows from the configuration and the machine, so a continued run does the same.

    Args:
        world: the processes that share the work; threads are as set in this one.
    """
    if not isinstance(config, Config):
        return False  # a model of transformers runs as it is
    asked, model = config.runtime.compile, config.model
    if asked != "auto":
        return asked
    if device.type != "cpu" or (model.norm, model.mlp) != ("rmsnorm", "swiglu"):
        return False
    operations = 6 * size.parameters(config, size.vocabulary(config)) * config.training.tokens
    if operations < PAYS_FROM * torch.get_num_threads() * world.size:
        return False
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None
