"""A small stand-in for the Hugging Face hub on 127.0.0.1, with the faults that a real one has."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
PATH = "/owner/repo/resolve/{revision}/Q4/file.gguf"


@dataclass
class Hub:
    """What the server has and how it misbehaves; tests change it between requests.

    linked:         HEAD answers with a redirect that carries size and digest, as for large files
    status:         answered instead of anything else
    ranges:         whether Range is honoured
    promised_size, promised_sha256: what HEAD says, if not the truth
    cut_after:      bytes after which an answer's connection is closed, for the first `cuts` answers
    requests:       (method, path, Range, Authorization) of every request so far
    """

    content: bytes
    linked: bool = True
    status: int | None = None
    ranges: bool = True
    promised_size: int | None = None
    promised_sha256: str | None = None
    cut_after: int | None = None
    cuts: int = 0
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    url: str = ""
    cdn_url: str = ""


@contextmanager
def serve(hub: Hub) -> Iterator[None]:
    """Serves `hub` on two ports, the hub's and that of the host which it redirects to."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            wanted = self.headers.get("Range")
            token = self.headers.get("Authorization")
            hub.requests.append((self.command, self.path, wanted, token))
            if hub.status is not None:
                self.empty(hub.status, {})
            elif self.path == "/cdn":
                self.send_content(wanted)
            elif self.path == PATH.format(revision="main"):
                self.describe()
            elif self.path == PATH.format(revision=COMMIT):
                if hub.linked:
                    self.empty(302, {"Location": f"{hub.cdn_url}/cdn"})
                else:
                    self.send_content(wanted)
            else:
                self.empty(404, {})

        def describe(self) -> None:
            size = hub.promised_size or len(hub.content)
            sha256 = hub.promised_sha256 or hashlib.sha256(hub.content).hexdigest()
            headers = {"X-Repo-Commit": COMMIT}
            if hub.linked:
                headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{sha256}"'}
                self.empty(302, headers | {"Location": f"{hub.cdn_url}/cdn"})
            else:
                self.start(200, headers | {"Content-Length": str(size), "ETag": '"5d41402a"'})

        def send_content(self, wanted: str | None) -> None:
            start = 0
            if wanted and hub.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                size = len(hub.content)
                self.start(
                    206,
                    {
                        "Content-Length": str(size - start),
                        "Content-Range": f"bytes {start}-{size - 1}/{size}",
                    },
                )
            else:
                self.start(200, {"Content-Length": str(len(hub.content))})
            rest = hub.content[start:]
            if hub.cut_after is not None and hub.cuts > 0:
                hub.cuts -= 1
                rest = rest[: hub.cut_after]
                self.close_connection = True
            self.wfile.write(rest)

        def empty(self, status: int, headers: dict[str, str]) -> None:
            self.start(status, headers | {"Content-Length": "0"})

        def start(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
