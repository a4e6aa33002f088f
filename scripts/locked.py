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
PYTHONS = ("3.11.9", "3.12.9", "3.13.2", "3.14.0")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)]
PLATFORMS.append("manylinux2014_x86_64")
HEAD = (
    "# Written by scripts/locked.py from constraints.txt, for Linux x86-64; all but"
    " torch. In CI: make locked"
)


def digests_of(python: str, pins: list[str]) -> dict[str, str]:
    """Return the digest of the file that pip chooses for each pin, by the package's
    name.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = pathlib.Path(folder, "pins.txt")
        report = pathlib.Path(folder, "report.json")
        wanted.write_text("\n".join(pins), encoding="utf-8")
        words = ["--dry-run", "--ignore-installed", "--no-deps"]
        words += ["--python-version", python, "--target", folder]
        words += ["--report", str(report), "-r", str(wanted)]
        for platform in PLATFORMS:
            words += ["--platform", platform]
        pip = [sys.executable, "-m", "pip", "install", "-q"]
        subprocess.run([*pip, *words], check=True)
        rows = json.loads(report.read_text(encoding="utf-8"))["install"]
    digests = {}
    for row in rows:
        name = canonicalize_name(row["metadata"]["name"])
        archive = row["download_info"]["archive_info"]
        digests[name] = archive["hashes"]["sha256"]
    return digests


if __name__ == "__main__":
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "torch=="))]
    digests = [digests_of(python, pins) for python in PYTHONS]
    locked = [HEAD]
    for pin in pins:
        name = canonicalize_name(pin.partition("==")[0])
        hashes = sorted({each[name] for each in digests})
        words = [f"--hash=sha256:{digest}" for digest in hashes]
        locked.append(" ".join([pin, *words]))
    (ROOT / "locked.txt").write_text("\n".join(locked) + "\n", encoding="utf-8")
