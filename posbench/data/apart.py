"""Run a tokenizer in other processes: an untrusted one, or any one on several cores.

The patterns of a `tokenizer.json` are regular expressions. Their engine gives up a match after ten million steps, which
a pattern can need at every character: hours for a megabyte, in which its process hears no signal. Its normalizer can
put a megabyte in the place of each letter. A process of its own can be killed, has a limit of memory, and does not
show what Rust prints on a panic.
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
from collections.abc import Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
    started: list[_Process] = []
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()

    def answer(texts: list[str]) -> list[np.ndarray]:
        try:
            process = idle.get_nowait()
        except queue.Empty:  # as many threads as processes: one may still be started
            process = _Process(tokenizer)
            started.append(process)
        found = process.encode(texts)
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
            process.process.kill()
        threads.shutdown(cancel_futures=True)
        for process in started:  # one may have been started meanwhile
            process.end()


class _Process:
    """A process that encodes with one tokenizer, and the connection to it."""

    def __init__(self, tokenizer: Path) -> None:
        self.connection, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "posbench.data.apart", str(tokenizer), str(theirs.fileno())]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # one core each
        nothing = subprocess.DEVNULL
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=nothing, stdout=nothing, stderr=nothing, env=environment, pass_fds=[theirs.fileno()]
            )

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text; UserError if the tokenizer fails, or takes too long or too much memory."""
        characters = sum(map(len, texts))
        limit = PATIENCE_SECONDS + characters / FEWEST_PER_SECOND
        try:
            self.connection.send_bytes(json.dumps(texts).encode())
            if not self.connection.poll(limit):
                raise UserError(
                    f"the tokenizer timed out after {limit:.0f} s on {characters:,} characters "
                    "(possibly a pathological regex): refused"
                )
            answer = json.loads(self.connection.recv_bytes())
            ids = np.frombuffer(self.connection.recv_bytes(), dtype=np.uint32)
        except (OSError, EOFError):
            if self.process.wait() in (-signal.SIGABRT, _TOO_MUCH_MEMORY):  # Rust aborts where it gets none
                told = f"needs more than {MOST_MEMORY:,} bytes of memory for {characters:,} characters"
            else:
                told = "ended its process"
            raise UserError(f"the tokenizer {told}: refused") from None
        if "error" in answer:
            raise UserError(answer["error"])
        return np.split(ids, np.cumsum(answer["lengths"])[:-1])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _bound_memory() -> None:
    """Limit this process to so much more memory, on Linux."""
    with contextlib.suppress(OSError):
        data = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        if data:
            limit, hard = int(data[1]) * 1024 + MOST_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]
            if hard == resource.RLIM_INFINITY or limit < hard:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _serve(path: Path, connection: Connection) -> None:
    """Answer requests until the other end closes."""
    tokenizer = from_file(path)
    _bound_memory()
    while True:
        try:
            texts = json.loads(connection.recv_bytes())
        except EOFError:
            return
        found: list[np.ndarray] = []
        answer: dict[str, Any] = {}
        try:
            found = tokenizer.encode(texts)
            answer["lengths"] = [len(ids) for ids in found]
        except UserError as error:
            answer["error"] = str(error)
        connection.send_bytes(json.dumps(answer).encode())
        connection.send_bytes(np.concatenate([np.empty(0, np.uint32), *found]).astype(np.uint32).tobytes())


if __name__ == "__main__":
    try:
        _serve(Path(sys.argv[1]), Connection(int(sys.argv[2])))
    except MemoryError:
        sys.exit(_TOO_MUCH_MEMORY)
