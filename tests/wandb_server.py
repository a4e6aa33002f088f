"""A W&B server on this machine, as far as the real client needs one: its GraphQL, file
streams and uploads.

A run keeps what arrives as the real server does: a line of a stream is put at its
offset, so that a client that counts from zero again overwrites earlier lines.
"""

import contextlib
import dataclasses
import gzip
import http.server
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class ServedRun:
    """What the server knows about one run."""

    name: str
    # one per mutation that described it
    variables: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # by line number
    streams: dict[str, dict[int, str]] = dataclasses.field(
        default_factory=lambda: defaultdict(dict)
    )
    exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged rows, without the client's own keys and the picture."""
        rows = [
            json.loads(line)
            for _, line in sorted(self.streams["wandb-history.jsonl"].items())
        ]
        return [
            {
                key: value
                for key, value in row.items()
                if key[0] != "_" and key != "curve"
            }
            for row in rows
        ]

    @property
    def summary(self) -> dict[str, Any]:
        lines = self.streams["wandb-summary.json"]
        return json.loads(lines[max(lines)]) if lines else {}

    @property
    def config(self) -> dict[str, Any]:
        known = json.loads(self.last("config") or "{}")
        return {key: item["value"] for key, item in known.items() if key != "_wandb"}

    def last(self, name: str) -> Any:
        """Return the newest value of a variable that is not null."""
        return next(
            (v[name] for v in reversed(self.variables) if v.get(name) is not None), None
        )

    def bucket(self) -> dict[str, Any]:
        """Return what the client asks about an existing run."""
        history = self.streams["wandb-history.jsonl"]
        return {
            "id": self.name,
            "name": self.name,
            "displayName": self.name,
            "description": None,
            "notes": None,
            "tags": [],
            "config": self.last("config") or "{}",
            "wandbConfig": json.dumps({"t": 1}),
            "summaryMetrics": json.dumps(self.summary),
            "historyLineCount": len(history),
            "historyTail": json.dumps([history[max(history)]] if history else []),
            "eventsLineCount": len(self.streams["wandb-events.jsonl"]),
            "eventsTail": "[]",
            "logLineCount": len(self.streams["output.log"]),
            "sweepName": self.last("sweep"),
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
            operation = re.search(r"(?:query|mutation) (\w+)", asked["query"])
            data = self.graphql(
                operation[1] if operation else asked["query"],
                asked.get("variables") or {},
            )
            if data is None:
                self.unknown.append(asked["query"])
            return {"data": data or {}}
        if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
            sent = json.loads(body)
            run = self.runs[stream[1]]
            for name, part in (sent.get("files") or {}).items():
                run.streams[name].update(enumerate(part["content"], part["offset"]))
            if sent.get("complete"):
                run.exit_code = sent.get("exitcode")
            return {"limits": {}}
        return {}

    def graphql(self, name: str, v: dict[str, Any]) -> dict[str, Any] | None:
        project = {
            "id": "P",
            "name": v.get("project") or "uncategorized",
            "entity": {"id": "E", "name": "me"},
        }
        if name in ("Viewer", "viewer"):
            return {
                "viewer": {
                    "id": "U",
                    "entity": "me",
                    "username": "me",
                    "flags": "{}",
                    "teams": {"edges": []},
                }
            }
        if name == "RunResumeStatus":
            return {
                "model": {
                    **project,
                    "bucket": self.runs[v["name"]].bucket()
                    if v["name"] in self.runs
                    else None,
                }
            }
        if name == "UpsertBucket":
            inserted = v["name"] not in self.runs
            run = self.runs.setdefault(v["name"], ServedRun(v["name"]))
            run.variables.append(v)
            bucket = run.bucket() | {"project": project, "sweepName": v["sweep"]}
            return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
        if name == "CreateRunFiles":
            files = [
                {"name": file, "uploadUrl": f"{self.url}/upload/{file}"}
                for file in v["files"]
            ]
            return {
                "createRunFiles": {
                    "runID": v["run"],
                    "uploadHeaders": [],
                    "files": files,
                }
            }
        if name == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        return None


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
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
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = (
            gzip.decompress(body)
            if self.headers.get("Content-Encoding") == "gzip"
            else body
        )
        with self.server.lock:
            data = json.dumps(self.server.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _answer
