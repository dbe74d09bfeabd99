"""As much of a Weights & Biases server as a run needs, in this process: runs, history, files, artifacts, all kept."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class KeptRun:
    """What the server knows of a run."""

    about: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        return {key: entry["value"] for key, entry in json.loads(self.about["config"]).items()}

    @property
    def trials(self) -> list[int]:
        return [row["trial"] for row in self.history if "trial" in row]


class Server:
    """Answers on `url`; with a `status` other than 200 every question is refused with it.

    Runs and artifacts are by name, uploaded files by the path that they were put to; `heard` is all that was received.
    """

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.runs: dict[str, KeptRun] = {}
        self.artifacts: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.heard: list[bytes] = []
        self.answers = threading.Event()  # while it is not set, whoever asks waits
        self.answers.set()
        self.url = ""
        self._lock = threading.Lock()

    def post(self, path: str, body: bytes) -> Any:
        with self._lock:
            self.heard.append(body)
            if path.endswith("/file_stream"):
                self._stream(self._run(path.split("/")[-2]), json.loads(body))
                return {}
            if path.endswith("/graphql"):
                asked = json.loads(body)
                return {"data": self._answer(asked["query"], asked.get("variables") or {})}
            return {}

    def put(self, path: str, body: bytes) -> None:
        with self._lock:
            self.heard.append(body)
            self.files[path] = body

    def _run(self, name: str) -> KeptRun:
        return self.runs.setdefault(name, KeptRun())

    def _stream(self, run: KeptRun, sent: dict[str, Any]) -> None:
        for name, part in (sent.get("files") or {}).items():
            rows = [json.loads(line) for line in part["content"]]
            if name == "wandb-history.jsonl":
                run.history[part["offset"] : part["offset"] + len(rows)] = rows
            elif name == "wandb-summary.json":
                run.summary = rows[-1]
        if sent.get("complete"):
            run.exit_codes.append(sent["exitcode"])

    def _answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "P", "name": "p", "entity": {"id": "E", "name": "me"}}
        if "upsertBucket(" in query:
            name = (given["name"] or given["id"]).removeprefix("ID:")
            is_new = name not in self.runs
            run = self._run(name)
            run.about |= {key: value for key, value in given.items() if value is not None}
            bucket = {"id": f"ID:{name}", "name": name, "displayName": name, "project": project}
            bucket |= {"config": run.about["config"], "historyLineCount": len(run.history)}
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if "RunResumeStatus" in query:
            return {"model": {**project, "bucket": self._resumed(given["name"])}}
        if "viewer" in query:
            return {"viewer": {"id": "V", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if "createRunFiles(" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/{given['run']}/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": f"ID:{given['run']}", "uploadHeaders": [], "files": files}}
        if "ServerFeatures" in query:
            return {"serverInfo": {"features": []}}
        return self._answer_of_artifacts(query, given)

    def _resumed(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        return {
            "id": f"ID:{name}",
            "name": name,
            "displayName": name,
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(run.history),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
            "eventsTail": "[]",
            "config": run.about["config"],
            "tags": [],
            "wandbConfig": json.dumps({"t": 1}),
        }

    def _answer_of_artifacts(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "ArtifactType(" in query:
            return {"project": {"artifact": None}}
        if "createArtifact(" in query:
            kept = {**given["input"], "id": f"A{len(self.artifacts)}", "is_committed": False}
            self.artifacts.append(kept)
            made = {"id": kept["id"], "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        if "createArtifactManifest(" in query:
            file = {"id": "F", "uploadUrl": f"{self.url}/{given['artifactID']}/manifest", "uploadHeaders": []}
            return {"createArtifactManifest": {"artifactManifest": {"id": f"M:{given['artifactID']}", "file": file}}}
        if "createArtifactFiles(" in query:
            nodes = [
                {
                    "storagePath": file["name"],
                    "uploadUrl": f"{self.url}/{file['artifactID']}/{file['name']}",
                    "uploadHeaders": [],
                    "artifact": {"id": file["artifactID"]},
                }
                for file in given["input"]["artifactFiles"]
            ]
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        if "commitArtifact(" in query:
            (kept,) = (kept for kept in self.artifacts if kept["id"] == given["artifactID"])
            kept["is_committed"] = True
            return {"commitArtifact": {"artifact": {"id": kept["id"], "digest": kept["digest"]}}}
        return {}


@contextlib.contextmanager
def serving(status: int = 200) -> Iterator[Server]:
    """A server on a free port of this machine, while the block lasts."""
    server = Server(status)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            server.answers.wait()
            answer = server.post(self.path, self._body()) if server.status == 200 else {"errors": [{"message": "no"}]}
            self._reply(json.dumps(answer).encode())

        def do_PUT(self) -> None:
            server.put(self.path, self._body())
            self._reply(b"{}")

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while num_bytes := int(self.rfile.readline(), 16):
                body += self.rfile.read(num_bytes)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _reply(self, body: bytes) -> None:
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away is none."""

    with Quiet(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.answers.set()
            listening.shutdown()
            thread.join()
