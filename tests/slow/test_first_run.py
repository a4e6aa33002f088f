"""What a newcomer reads in the first minute on a fresh machine."""

import os
import pathlib
import pty
import re
import subprocess
import sys

import pytest
from support import TINY, write_text


@pytest.mark.slow
def test_a_first_run_on_a_terminal_shows_no_nan_and_says_once_what_wandb_does(tmp_path: pathlib.Path) -> None:
    write_text(tmp_path)
    mine = [word for word in TINY if not word.startswith(("tracking=", "training.warmup_tokens="))]
    command = [sys.executable, "-m", "posbench", "train", *mine, "data.path=text.txt", "training.tokens=1280"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    fresh = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "400"}
    ours, theirs = pty.openpty()
    environment = kept | fresh | {"NETRC": str(tmp_path / "none"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # the last process that had the terminal has ended
        pass
    os.close(ours)
    assert process.wait() == 0, written
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())
    assert "0/20 starting" in shown and not re.search(r"\bnan\b", shown)
    assert shown.count("W&B: an offline run is written to outputs/demo/rope-s0-") == 1
    assert shown.count("the learning rate rises over the first 2 of 20 updates instead") == 1
