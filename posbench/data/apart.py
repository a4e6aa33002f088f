"""Run a tokenizer in processes of its own: one that is not trusted, or any one on several cores.

The patterns of a `tokenizer.json` are regular expressions. Their engine gives up a match after ten million steps, which
a pattern can need at every character: hours for a megabyte, in which its process hears no signal. Its normalizer can
put a megabyte in the place of each letter. Here it can be ended, and has a limit of memory; and what its Rust code
prints when it panics is not shown.
"""

import collections
import concurrent.futures
import contextlib
import json
import os
import queue
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


def encoded(tokenizer: Path, batches: Iterable[list[str]], n_jobs: int = 1) -> Iterator[np.ndarray]:
    """The ids of each text of each batch, as from `Tokenizer.encode` of a `tokenizer.json`, in their order.

    Args:
        n_jobs: processes; batches that are few start fewer. Twice as many batches are held in memory.

    Raises:
        UserError: it fails at a text, or takes too long for it.
    """
    started: list[subprocess.Popen[bytes]] = []
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    command = [sys.executable, "-P", "-m", "posbench.data.apart", str(tokenizer)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # one core each
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL

    def answer(texts: list[str]) -> list[np.ndarray]:
        try:
            process = idle.get_nowait()
        except queue.Empty:  # as many threads as processes: one may still be started
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment)
            started.append(process)
        found = _asked(process, texts)
        idle.put(process)
        return found

    threads = concurrent.futures.ThreadPoolExecutor(n_jobs)
    asked: collections.deque[concurrent.futures.Future[list[np.ndarray]]] = collections.deque()
    try:
        for batch in batches:
            asked.append(threads.submit(answer, batch))
            if len(asked) == 2 * n_jobs:
                yield from asked.popleft().result()
        while asked:
            yield from asked.popleft().result()
    finally:
        for process in started:  # no thread then waits for one
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in started:  # one may have been started meanwhile
            process.kill()
            with contextlib.suppress(OSError):  # of what it will not read any more
                process.stdin.close()  # type: ignore[union-attr]
            process.stdout.close()  # type: ignore[union-attr]
            process.wait()


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
