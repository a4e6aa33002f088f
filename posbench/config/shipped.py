"""The YAML files that come with posbench."""

from pathlib import Path


def configs_dir() -> Path:
    """Where the YAML files are: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "_configs"
    return packaged if packaged.is_dir() else package.parent / "configs"
