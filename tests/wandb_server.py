"""A W&B server on this machine, as far as the real client needs one: its GraphQL, file streams and uploads.

A run keeps what arrives as the real server does: a line of a stream stands where its offset says, so that a client
that counts from zero again writes over what was there.
"""

import contextlib
import dataclasses
import gzip
import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

KEY = "x" * 40  # an API key that passes the client's own check


@dataclasses.dataclass
class ServedRun:
    """What a server knows of one run."""

    name: str
    variables: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of each mutation that described it
    streams: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)  # file -> line number -> line
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    exit_code: int | None = None
    number: int = 0

    @property
    def history(self) -> list[dict[str, Any]]:
        """Logged rows, the client's own keys left out."""
        lines = self.streams.get("wandb-history.jsonl", {})
        rows = [json.loads(lines[at]) for at in sorted(lines)]
        return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]

    @property
    def summary(self) -> dict[str, Any]:
        lines = self.streams.get("wandb-summary.json", {})
        return json.loads(lines[max(lines)]) if lines else {}

    @property
    def config(self) -> dict[str, Any]:
        held: dict[str, Any] = {}
        for variables in self.variables:
            held |= json.loads(variables.get("config") or "{}")
        return {key: item["value"] for key, item in held.items() if key != "_wandb"}

    @property
    def _metrics(self) -> list[dict[str, Any]]:
        """What the client says of metrics, numbered fields, the axis by its place."""
        held = json.loads(self.last("config") or "{}").get("_wandb", {}).get("value", {})
        return list(held.get("m", []))

    @property
    def axes(self) -> dict[str, str]:
        """Metric -> its x axis."""
        return {metric["1"]: self._metrics[metric["5"] - 1]["1"] for metric in self._metrics if "5" in metric}

    @property
    def hidden(self) -> set[str]:
        """Metrics without a panel."""
        return {metric["1"] for metric in self._metrics if 2 in metric.get("6", [])}

    def last(self, name: str) -> Any:
        """The newest value that is not null among those that the client gave."""
        return next((v[name] for v in reversed(self.variables) if v.get(name) is not None), None)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, ServedRun] = {}
        self.sweep = ""  # its YAML
        self.commands: list[dict[str, Any]] = []  # for an agent, one at each heartbeat; then it exits
        self.unknown: list[str] = []  # that this server had no answer to

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError):  # clients may hang up
            self.unknown.append(repr(error))

    def environment(self) -> dict[str, str]:
        """What sends a client here."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self) -> None:
        body = self._body()
        with self.server.lock:
            answer = self._routed(body)
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _answer

    def _routed(self, body: bytes) -> Any:
        server = self.server
        if self.path == "/graphql":
            asked = json.loads(body)
            operation = re.search(r"(?:query|mutation) (\w+)", asked["query"])
            name = operation[1] if operation else asked["query"]
            answer = _graphql(server, name, asked.get("variables") or {})
            if answer is None:
                server.unknown.append(asked["query"])
            return {"data": answer or {}}
        if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            sent, run = json.loads(body), server.runs[stream[1]]
            for name, part in (sent.get("files") or {}).items():
                lines = run.streams.setdefault(name, {})
                lines.update(enumerate(part["content"], part["offset"]))
            if sent.get("complete"):
                run.exit_code = sent.get("exitcode")
            return {"limits": {}}
        if upload := re.fullmatch(r"/upload/run/([^/]+)/(.+)", self.path):
            server.runs[upload[1]].files[upload[2]] = body
        return {}


def _graphql(server: Server, name: str, v: dict[str, Any]) -> dict[str, Any] | None:
    project = {"id": "P", "name": v.get("project"), "entity": {"id": "E", "name": "me"}}
    if name in ("Viewer", "viewer"):
        return {"viewer": {"id": "U", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
    if name == "RunResumeStatus":
        run = server.runs.get(v["name"])
        return {"model": {**project, "bucket": _bucket(run) if run else None}}
    if name == "UpsertBucket":
        inserted = v["name"] not in server.runs
        run = server.runs.setdefault(v["name"], ServedRun(v["name"], number=len(server.runs)))
        run.variables.append(v)
        project["name"] = v["project"] or "uncategorized"
        bucket = _bucket(run) | {"project": project, "sweepName": v["sweep"]}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
    if name == "CreateRunFiles":
        files = [{"name": file, "uploadUrl": f"{server.url}/upload/run/{v['run']}/{file}"} for file in v["files"]]
        return {"createRunFiles": {"runID": v["run"], "uploadHeaders": [], "files": files}}
    if name == "ServerFeaturesQuery":
        return {"serverInfo": {"features": []}}
    return _sweep_answer(server, name, v)


def _sweep_answer(server: Server, name: str, v: dict[str, Any]) -> dict[str, Any] | None:
    if name == "SweepWithRuns":
        names = ("id", "name", "method", "state", "description", "config", "createdAt", "heartbeatAt", "updatedAt")
        rest = ("earlyStopJobRunning", "bestLoss", "controller", "scheduler")
        known = {"id": "S", "name": v["sweep"], "state": "RUNNING", "config": server.sweep, "runs": {"edges": []}}
        return {"project": {"sweep": dict.fromkeys((*names, *rest)) | known}}
    if name == "CreateAgent":
        return {"createAgent": {"agent": {"id": "A"}}}
    if name == "Heartbeat":
        ended = server.runs and all(run.exit_code is not None for run in server.runs.values())
        commands = [server.commands.pop(0)] if server.commands else [{"type": "exit"}] if ended else []
        return {"agentHeartbeat": {"agent": {"id": "A"}, "commands": json.dumps(commands)}}
    server.unknown.append(json.dumps(v))
    return None


def _bucket(run: ServedRun) -> dict[str, Any]:
    def lines(file: str) -> dict[int, str]:
        return run.streams.get(file, {})

    history = lines("wandb-history.jsonl")
    config: dict[str, Any] = {}
    for variables in run.variables:
        config |= json.loads(variables.get("config") or "{}")
    return {
        "id": f"run{run.number}",
        "name": run.name,
        "displayName": run.last("displayName") or run.name,
        "description": None,
        "notes": None,
        "tags": run.last("tags") or [],
        "config": json.dumps(config),
        "wandbConfig": json.dumps({"t": 1}),
        "summaryMetrics": json.dumps(run.summary),
        "historyLineCount": len(history),
        "historyTail": json.dumps([history[max(history)]] if history else []),
        "eventsLineCount": len(lines("wandb-events.jsonl")),
        "eventsTail": "[]",
        "logLineCount": len(lines("output.log")),
        "sweepName": run.last("sweep"),
    }
