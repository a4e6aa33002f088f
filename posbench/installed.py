"""Installed packages that extend posbench. They are found by their entry points,
without importing any of their code.

A name in a YAML file or a run folder can only choose among these entry points. The
packages' YAML files are in `posbench_configs/<group>` of the same package.
"""

import functools
import importlib.metadata
import importlib.util
from pathlib import Path

ENCODINGS = "posbench.encodings"  # name -> class
# in a package, where `configs` might be meant for other programs
_CONFIGS = "posbench_configs"


@functools.cache
def points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of a group, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def config_folders() -> list[Path]:
    """Return the `posbench_configs` folders of packages that add something. Imports
    none of them.
    """
    packages = sorted(
        {point.module.partition(".")[0] for point in points(ENCODINGS).values()}
    )
    specs = filter(None, map(importlib.util.find_spec, packages))
    folders = (
        Path(location) / _CONFIGS
        for spec in specs
        for location in spec.submodule_search_locations or ()
    )
    return [folder for folder in folders if folder.is_dir()]
