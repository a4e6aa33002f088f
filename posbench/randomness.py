"""Every random draw comes from a generator named by (seed, stream), never from global
state.

Streams are independent of each other, so that runs of one seed see the same weights and
the same batches whatever the encoding draws, and resuming needs no generator state: a
draw is a pure function of its name.
"""

import hashlib

import torch


def derive(seed: int, *stream: str | int) -> int:
    """Return a 63-bit seed for a named stream of a run's seed."""
    path = "/".join(map(str, (seed, *stream)))
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(
    seed: int, *stream: str | int, device: torch.device | str = "cpu"
) -> torch.Generator:
    return torch.Generator(device).manual_seed(derive(seed, *stream))
