"""A stranger's tokenizer at work in a process of its own.

The patterns of a `tokenizer.json` are regular expressions. Their engine gives up a match after ten million steps, which
a pattern can need at every character: hours for a megabyte, in which its process hears no signal. Here it can be
ended; and what its Rust code prints when it panics is not shown.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from posbench.data.tokenizer import from_file
from posbench.errors import UserError

PATIENCE_SECONDS = 60.0  # for any batch of texts, the start of the process included
FEWEST_PER_SECOND = 20_000  # characters; ordinary tokenizers do a million


def encoded(tokenizer: Path, batches: Iterable[list[str]]) -> Iterator[np.ndarray]:
    """The ids of each text of each batch, as `Tokenizer.encode` has them.

    Args:
        tokenizer: a `tokenizer.json`.

    Raises:
        UserError: it fails at a text, or takes too long for it.
    """
    command = [sys.executable, "-P", "-m", "posbench.data.apart", str(tokenizer)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            for batch in batches:
                yield from _asked(process, batch)
        finally:
            process.kill()
            with contextlib.suppress(OSError):  # of what it will not read any more
                process.stdin.close()  # type: ignore[union-attr]


def _asked(process: "subprocess.Popen[bytes]", texts: list[str]) -> list[np.ndarray]:
    assert process.stdin is not None and process.stdout is not None
    characters, too_late = sum(map(len, texts)), threading.Event()
    limit = PATIENCE_SECONDS + characters / FEWEST_PER_SECOND

    def end() -> None:
        too_late.set()
        process.kill()

    watch = threading.Timer(limit, end)
    watch.start()
    try:
        _put(process.stdin, json.dumps(texts).encode())
        answer = json.loads(_got(process.stdout))
        ids = np.frombuffer(_got(process.stdout), dtype=np.uint32)
    except (OSError, EOFError):
        if too_late.is_set():
            told = f"takes more than {limit:.0f} s for {characters:,} characters, as a pattern can be made to"
        else:
            told = "ended its process"
        raise UserError(f"the tokenizer {told}: refused") from None
    finally:
        watch.cancel()
    if "error" in answer:
        raise UserError(answer["error"])
    return np.split(ids, np.cumsum(answer["lengths"])[:-1])


def _put(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little"))
    stream.write(data)
    stream.flush()


def _got(stream: IO[bytes]) -> bytes:
    """The next piece of what the other process put.

    Raises:
        EOFError: it has ended.
    """
    head = stream.read(8)
    data = stream.read(int.from_bytes(head, "little"))
    if len(head) < 8 or len(data) < int.from_bytes(head, "little"):
        raise EOFError
    return data


def _serve(path: Path) -> None:
    """Answer until nothing is asked any more."""
    tokenizer = from_file(path)
    while True:
        try:
            texts = json.loads(_got(sys.stdin.buffer))
        except EOFError:
            return
        found: list[np.ndarray] = []
        answer: dict[str, Any] = {}
        try:
            found = tokenizer.encode(texts)
            answer["lengths"] = [len(ids) for ids in found]
        except UserError as error:
            answer["error"] = str(error)
        _put(sys.stdout.buffer, json.dumps(answer).encode())
        _put(sys.stdout.buffer, np.concatenate([np.empty(0, np.uint32), *found]).astype(np.uint32).tobytes())


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
