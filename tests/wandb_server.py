"""A W&B server on this machine, as far as the real client needs one: its GraphQL, file
streams and uploads.

A run keeps what arrives as the real server does: a line of a stream is put at its
offset, so that a client that counts from zero again overwrites earlier lines.
"""

import contextlib
import gzip
import http.server
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


class ServedRun:
    """What the server knows about one run."""

    def __init__(self, name: str) -> None:
        self.name = name
        # one per mutation that described it
        self.variables: list[dict[str, Any]] = []
        # by line number
        self.streams = defaultdict[str, dict[int, str]](dict)
        self.exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged rows, without the client's own keys and the picture."""
        rows = []
        for _, line in sorted(self.streams["wandb-history.jsonl"].items()):
            row = json.loads(line)
            row.pop("curve", None)
            own = {key: row[key] for key in row if not key.startswith("_")}
            rows.append(own)
        return rows

    @property
    def summary(self) -> dict[str, Any]:
        lines = self.streams["wandb-summary.json"]
        if not lines:
            return {}
        last = max(lines)
        return json.loads(lines[last])

    @property
    def config(self) -> dict[str, Any]:
        known = json.loads(self.last("config") or "{}")
        known.pop("_wandb", None)
        return {key: item["value"] for key, item in known.items()}

    def last(self, name: str) -> Any:
        """Return the newest value of a variable that is not null."""
        for variables in reversed(self.variables):
            if variables.get(name) is not None:
                return variables[name]
        return None

    def bucket(self) -> dict[str, Any]:
        """Return what the client asks about an existing run."""
        history = self.streams["wandb-history.jsonl"]
        tail = []
        if history:
            last = max(history)
            tail.append(history[last])
        return {
            "id": self.name,
            "name": self.name,
            "config": self.last("config") or "{}",
            "wandbConfig": json.dumps({"t": 1}),
            "summaryMetrics": json.dumps(self.summary),
            "historyLineCount": len(history),
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "eventsLineCount": len(self.streams["wandb-events.jsonl"]),
            "logLineCount": len(self.streams["output.log"]),
        }


VIEWER = {
    "id": "U",
    "entity": "me",
    "username": "me",
    "flags": "{}",
    "teams": {"edges": []},
}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, ServedRun] = {}
        self.unknown: list[str] = []  # queries that this server had no answer to

    # clients may hang up
    def handle_error(self, request: Any, client_address: Any) -> None: ...

    def answer(self, path: str, body: bytes) -> Any:
        if path == "/graphql":
            asked = json.loads(body)
            query = asked["query"]
            operation = re.search(r"(?:query|mutation) (\w+)", query)
            name = operation[1] if operation else query
            data = self.graphql(name, asked.get("variables") or {})
            if data is None:
                self.unknown.append(query)
            return {"data": data or {}}
        stream = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path)
        if stream:
            run = self.runs[stream[1]]
            self.append(run, json.loads(body))
            return {"limits": {}}
        return {}

    def append(self, run: ServedRun, sent: dict[str, Any]) -> None:
        for name, part in (sent.get("files") or {}).items():
            lines = enumerate(part["content"], part["offset"])
            run.streams[name].update(lines)
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")

    def graphql(self, name: str, asked: dict[str, Any]) -> dict[str, Any] | None:
        if name in ("Viewer", "viewer"):
            return {"viewer": VIEWER}
        if name == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if name == "CreateRunFiles":
            files = []
            for file in asked["files"]:
                files.append({"name": file, "uploadUrl": f"{self.url}/upload/{file}"})
            created = {"runID": asked["run"], "uploadHeaders": [], "files": files}
            return {"createRunFiles": created}

        project = {
            "id": "P",
            "name": asked.get("project") or "uncategorized",
            "entity": {"id": "E", "name": "me"},
        }
        run = self.runs.get(asked.get("name", ""))
        if name == "RunResumeStatus":
            bucket = run.bucket() if run else None
            return {"model": {**project, "bucket": bucket}}
        if name == "UpsertBucket":
            inserted = run is None
            if run is None:
                run = ServedRun(asked["name"])
                self.runs[run.name] = run
            run.variables.append(asked)
            bucket = run.bucket()
            bucket["project"] = project
            bucket["sweepName"] = asked["sweep"]
            return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
        return None


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    with Server() as server:
        work = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        work.start()
        try:
            yield server
        finally:
            server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None: ...

    def _answer(self) -> None:
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            size = int(self.rfile.readline(), 16)
            while size:
                body += self.rfile.read(size)
                self.rfile.readline()
                size = int(self.rfile.readline(), 16)
            self.rfile.readline()
        else:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        with self.server.lock:
            answer = self.server.answer(self.path, body)
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _answer
