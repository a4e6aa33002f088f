"""Write locked.txt: constraints.txt with the sha256 of the files that CI installs, for
each of its Python versions.

Torch and its dependencies are left out: the package index decides their build (CPU or
CUDA).
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parent.parent
PYTHONS = ("3.11.9", "3.12.9", "3.13.2")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)] + [
    "manylinux2014_x86_64"
]
HEAD = (
    "# Written by scripts/locked.py from constraints.txt, for Linux x86-64; all but"
    " torch. In CI: make locked"
)


def digests_of(python: str, pins: list[str]) -> dict[str, str]:
    """Return the digest of the file that pip chooses for each pin, by the package's
    name.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = (
            pathlib.Path(folder, "pins.txt"),
            pathlib.Path(folder, "report.json"),
        )
        wanted.write_text("\n".join(pins), encoding="utf-8")
        platforms = [
            word for platform in PLATFORMS for word in ("--platform", platform)
        ]
        chosen = [
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--python-version",
            python,
            *platforms,
        ]
        files = ["--target", folder, "--report", str(report), "-r", str(wanted)]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", *chosen, *files], check=True
        )
        rows = json.loads(report.read_text(encoding="utf-8"))["install"]
    archives = {
        row["metadata"]["name"]: row["download_info"]["archive_info"] for row in rows
    }
    return {
        canonicalize_name(name): archive["hashes"]["sha256"]
        for name, archive in archives.items()
    }


if __name__ == "__main__":
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "torch=="))]
    digests = [digests_of(python, pins) for python in PYTHONS]
    locked = [HEAD]
    for pin in pins:
        hashes = sorted(
            {each[canonicalize_name(pin.partition("==")[0])] for each in digests}
        )
        locked.append(" ".join([pin, *(f"--hash=sha256:{each}" for each in hashes)]))
    (ROOT / "locked.txt").write_text("\n".join(locked) + "\n", encoding="utf-8")
