"""Run an untrusted tokenizer in a process of its own.

The patterns of a `tokenizer.json` are regular expressions. Their engine gives up a match after ten million steps, which
a pattern can need at every character: hours for a megabyte, in which its process hears no signal. Its normalizer can
put a megabyte in the place of each letter. Here it can be ended, and has a limit of memory; and what its Rust code
prints when it panics is not shown.
"""

import contextlib
import json
import re
import resource
import signal
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
MOST_MEMORY = 2 * 2**30  # bytes, beside what the process and its tokenizer have before any text
_TOO_MUCH_MEMORY = 3  # exit code


def encoded(tokenizer: Path, batches: Iterable[list[str]]) -> Iterator[np.ndarray]:
    """The ids of each text of each batch, as from `Tokenizer.encode` of a `tokenizer.json`.

    Raises UserError if it fails at a text, or takes too long for it.
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
            told = f"timed out after {limit:.0f} s on {characters:,} characters (possibly a pathological regex)"
        elif process.wait() in (-signal.SIGABRT, _TOO_MUCH_MEMORY):  # Rust aborts where it gets none
            told = f"needs more than {MOST_MEMORY:,} bytes of memory for {characters:,} characters"
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
    """Read the next message of the other process; EOFError if it has ended."""
    head = stream.read(8)
    data = stream.read(int.from_bytes(head, "little"))
    if len(head) < 8 or len(data) < int.from_bytes(head, "little"):
        raise EOFError
    return data


def _bound_memory() -> None:
    """Limit this process to so much more memory, on Linux."""
    with contextlib.suppress(OSError):
        data = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        if data:
            limit, hard = int(data[1]) * 1024 + MOST_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]
            if hard == resource.RLIM_INFINITY or limit < hard:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _serve(path: Path) -> None:
    """Answer requests until the input closes."""
    tokenizer = from_file(path)
    _bound_memory()
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
    try:
        _serve(Path(sys.argv[1]))
    except MemoryError:
        sys.exit(_TOO_MUCH_MEMORY)
