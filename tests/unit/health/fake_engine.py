"""A Docker Engine on a unix socket that runs nothing: what the SDK asks of it is kept, and containers change state.

In: containers as a test makes them. Out: the engine's JSON, as much of it as health needs. Never: a request that it
does not know answered as if all were well.
"""

from __future__ import annotations

import json
import socketserver
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

PROJECT = "shop"
NETWORK = "shop_backplane"


@dataclass
class FakeContainer:
    """One container."""

    id: str
    name: str
    labels: dict[str, str]
    env: list[str] = field(default_factory=lambda: ["JOYNEXUS_INSTANCE={host}"])
    status: str = "running"
    started: int = 1
    code: int = 0
    body: dict[str, Any] = field(default_factory=dict)  # what it was made from
    heeds: bool = True  # it ends when it is asked to

    def describe(self) -> dict[str, Any]:
        up = self.status == "running"
        return {
            "Id": self.id,
            "Name": f"/{self.name}",
            "Image": "sha256:abc",
            "State": {
                "Status": self.status, "Pid": 1000 + self.started if up else 0, "ExitCode": self.code,
                "StartedAt": f"2026-01-01T00:00:{self.started:02}Z", "OOMKilled": False,
            },
            "Config": {
                "Hostname": self.id[:12], "Image": "joynexus/env:1", "Env": self.env, "Labels": self.labels,
                "Cmd": ["python", "-m", "services.env"], "User": "10001:10001",
            },
            "HostConfig": {"ReadonlyRootfs": True, "CapDrop": ["ALL"], "Memory": 1 << 30, "NetworkMode": NETWORK},
            "NetworkSettings": {"Networks": {NETWORK: {"Aliases": [self.name], "IPAddress": "10.0.0.9"}}},
        }  # fmt: skip


class FakeEngine:
    """The engine: a context."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder / 'docker.sock'}"
        self.containers: dict[str, FakeContainer] = {}
        self.asked: list[str] = []  # all but questions
        self.broken = ""
        self.refuses: dict[str, int] = {}  # status by method
        self._made = 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}") if length else {}
                status, answer = engine.answer(self.command, self.path, body)
                data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = do_PUT = do_HEAD = handle_any  # noqa: N815 - http.server's names

            def address_string(self) -> str:
                return "local"

            def log_message(self, *_: object) -> None:
                pass

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(str(folder / "docker.sock"), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, service: str, number: int = 1, *, project: str = PROJECT, id: str = "", **more: Any) -> FakeContainer:
        """Put a container there, as compose would have."""
        self._made += 1
        labels = {
            "com.docker.compose.project": project,
            "com.docker.compose.service": service,
            "com.docker.compose.container-number": str(number),
            "com.docker.compose.oneoff": "False",
        }
        container = FakeContainer(id or f"{self._made:064x}", f"{project}-{service}-{number}", labels, **more)
        self.containers[container.id] = container
        return container

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Do what is asked."""
        split = urlsplit(path)
        words, query = split.path.strip("/").split("/"), parse_qs(split.query)
        if words[0].startswith("v1."):
            words.pop(0)
        if self.broken:
            return 500, {"message": self.broken}
        if method == "GET" and words == ["version"]:
            return 200, {"ApiVersion": "1.45", "MinAPIVersion": "1.24", "Version": "26.1"}
        if words[0] != "containers":
            self.asked.append(f"{method} {'/'.join(words)}")
            return 404, {"message": "page not found"}
        match method, words[1:]:
            case "GET", ["json"]:
                wanted = json.loads(query["filters"][0])["label"]
                return 200, [
                    {"Id": c.id, "Labels": c.labels}
                    for c in self.containers.values()
                    if all(f"{key}={value}" in wanted for key, value in c.labels.items() if f"{key}=" in str(wanted))
                ]
            case "POST", ["create"]:
                return self._create(query["name"][0], body)
        found = next((c for c in self.containers.values() if words[1] in (c.id, c.id[:12], c.name)), None)
        if found is None:
            return 404, {"message": f"No such container: {words[1]}"}
        if method == "GET" and words[2:] == ["json"]:
            return 200, found.describe()
        self.asked.append(f"{method} {found.name} {' '.join(words[2:])} {split.query}".strip())
        if method in self.refuses:
            return self.refuses[method], {"message": "not now"}
        match method, words[2:]:
            case "POST", ["restart"] | ["start"]:
                found.status, found.started = "running", found.started + 1
            case "POST", ["kill"]:
                if found.status != "running":
                    return 409, {"message": "is not running"}
                if found.heeds or query["signal"] == ["SIGKILL"]:
                    found.status = "exited"
            case "DELETE", []:
                del self.containers[found.id]
            case _:
                return 404, {"message": "page not found"}
        return 204, None

    def _create(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(f"POST create {name}")
        if any(c.name == name for c in self.containers.values()):
            return 409, {"message": f"the name {name} is in use"}
        labels = body["Labels"]
        made = self.add(labels["com.docker.compose.service"], int(labels["com.docker.compose.container-number"]))
        made.labels, made.env, made.body, made.status, made.started = labels, body["Env"], body, "created", 10
        return 201, {"Id": made.id, "Warnings": []}
