"""Files of the Hugging Face hub over HTTP: what is there, and fetching it with resume."""

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.message import Message
from io import FileIO
from pathlib import Path
from typing import IO, Any

from llamay.errors import HubError, UsageError
from llamay.hub import files
from llamay.hub.names import HubFile
from llamay.hub.progress import Progress

_TIMEOUT_S = 30
_ATTEMPTS = 5
_PAUSE_S = 1.0
_SHA256 = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?')
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the hub says about a file; `size` and `sha256` are None where it does not say.

    url: names the commit, so that a download that is resumed later continues the same bytes
    """

    name: HubFile
    url: str
    size: int | None
    sha256: str | None


class _BrokenTransferError(Exception):
    """The connection ended before the file did; the message says how."""


def probe(name: HubFile) -> RemoteFile:
    """Asks the hub for size and digest of `name`; raises HubError if it cannot be had.

    Large files are answered by a redirect to another host, and only the redirect itself carries
    the file's size and digest (X-Linked-Size, X-Linked-Etag), so it is not followed.
    """
    headers: Message
    try:
        with _open(name, _url(name, "main"), "HEAD", {}, leave_host=False) as response:
            headers = response.headers
            size, digest = headers.get("Content-Length"), headers.get("ETag")
    except urllib.error.HTTPError as error:
        if not 300 <= error.code < 400:
            raise _refused(name, error) from error
        headers, size, digest = error.headers, None, None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(name, error) from error
    commit = headers.get("X-Repo-Commit", "")
    size = headers.get("X-Linked-Size", size) or ""
    match = _SHA256.fullmatch(headers.get("X-Linked-Etag", digest) or "")
    return RemoteFile(
        name,
        _url(name, commit if _COMMIT.fullmatch(commit) else "main"),
        int(size) if size.isdecimal() else None,
        match[1] if match else None,
    )


def download(remote: RemoteFile, target: Path, part: FileIO, progress: Progress) -> str:
    """Fills `part`, the locked part file of `target`, and returns the SHA-256 of the whole.

    Continues after the bytes that are there; a broken transfer is taken up again, and leaves what
    came for the next run. Bytes that do not match the hub's digest are thrown away, and fetched
    once more from the start if some were from an earlier run. Raises HubError.
    """
    transfer = _Transfer(remote, target, part, progress)
    resumed = transfer.done > 0
    transfer.run()
    if resumed and not transfer.is_sound():
        transfer.restart()
        transfer.run()
    if not transfer.is_sound():
        found = transfer.hasher.hexdigest()
        transfer.restart()
        raise HubError(
            f"{remote.name}: the hub promises SHA-256 {remote.sha256}, and what came has {found}; "
            f"it was thrown away, so repeat `llamay pull {remote.name}`"
        )
    return transfer.hasher.hexdigest()


class _Transfer:
    """One download: `done` bytes are in `part`, and `hasher` has seen exactly those."""

    def __init__(self, remote: RemoteFile, target: Path, part: FileIO, progress: Progress):
        self._remote, self._target, self._part, self._progress = remote, target, part, progress
        self._size = remote.size
        self.done, self.hasher = 0, hashlib.sha256()
        length = part.seek(0, os.SEEK_END)
        # Without a size there is nothing to tell a partial file from one of something else.
        if self._size is None or length > self._size:
            self.restart()
            return
        part.seek(0)
        while chunk := part.read(files.CHUNK_BYTES):
            self.hasher.update(chunk)
            self.done += len(chunk)

    def restart(self) -> None:
        """Forgets all that came."""
        with files.disk_errors(self._target):
            self._part.seek(0)
            self._part.truncate(0)
        self.done, self.hasher = 0, hashlib.sha256()

    def is_sound(self) -> bool:
        return self._remote.sha256 in (None, self.hasher.hexdigest())

    def run(self) -> None:
        """Fetches what is missing, in several attempts as long as each one brings something."""
        name, attempt = self._remote.name, 0
        while self.done != self._size:
            before, attempt = self.done, attempt + 1
            try:
                self._attempt()
                break
            except urllib.error.HTTPError as error:
                raise _refused(name, error) from error
            except (OSError, http.client.HTTPException, _BrokenTransferError) as error:
                if self.done == 0:
                    raise _unreachable(name, error) from error
                if self.done <= before or attempt == _ATTEMPTS:
                    raise HubError(
                        f"{name}: the transfer broke off after {_megabytes(self.done)} of "
                        f"{_megabytes(self._size)} ({_reason(error)}); what came is kept, so "
                        f"repeat `llamay pull {name}` to continue"
                    ) from error
            time.sleep(_PAUSE_S)

    def _attempt(self) -> None:
        wanted = {"Range": f"bytes={self.done}-"} if self.done else {}
        with _open(self._remote.name, self._remote.url, "GET", wanted) as response:
            total = self._total(response)
            if self._size is None:
                self._size = total
            if self._size is None and self._remote.sha256 is None:
                raise HubError(
                    f"{self._remote.name}: the server tells neither size nor SHA-256, so a "
                    "truncated file would go unseen; check HF_ENDPOINT"
                )
            if total is not None and total != self._size:
                raise HubError(
                    f"{self._remote.name}: the hub promises {self._size} bytes, and the server has "
                    f"{total}; repeat later, or check HF_ENDPOINT"
                )
            if self._size is not None:
                files.check_space(self._target, self._size - self.done)
            self._receive(response)

    def _total(self, response: http.client.HTTPResponse) -> int | None:
        """Size of the whole file by this answer; starts over if the answer does not continue."""
        if response.status == 206:
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != self.done:
                raise _BrokenTransferError("the server sent another range than asked for")
            return int(match[2])
        if self.done:
            self.restart()
        length = response.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None

    def _receive(self, response: http.client.HTTPResponse) -> None:
        while chunk := response.read1(files.CHUNK_BYTES):
            if self._size is not None and self.done + len(chunk) > self._size:
                raise _BrokenTransferError("more bytes came than the file has")
            files.append(self._part, chunk, self._target)
            self.hasher.update(chunk)
            self.done += len(chunk)
            self._progress(f"fetching {self._target.name}", self.done, self._size)
        if self._size is not None and self.done < self._size:
            raise _BrokenTransferError("the server closed the connection")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, to other hosts only if `leave_host`, and never takes the token there."""

    def __init__(self, leave_host: bool):
        self._leave_host = leave_host

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        same_host = (old.scheme, old.netloc) == (new.scheme, new.netloc)
        if not same_host and not self._leave_host:
            return None
        request = urllib.request.Request(newurl, headers=req.headers, method=req.get_method())
        if same_host and req.has_header("Authorization"):
            request.add_unredirected_header("Authorization", str(req.get_header("Authorization")))
        return request


def _open(
    name: HubFile, url: str, method: str, headers: dict[str, str], leave_host: bool = True
) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, method=method, headers={"User-Agent": "llamay"} | headers)
    if token := os.environ.get("HF_TOKEN"):
        if not token.isprintable() or not token.isascii():
            raise UsageError("HF_TOKEN holds characters that no token has; set it again")
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(_Redirects(leave_host))
    response = opener.open(request, timeout=_TIMEOUT_S)
    if not isinstance(response, http.client.HTTPResponse):
        raise HubError(f"{name}: {url} led to something that is not HTTP; check HF_ENDPOINT")
    return response


def _url(name: HubFile, revision: str) -> str:
    path = "/".join(map(urllib.parse.quote, [name.owner, name.repo, "resolve", revision]))
    return f"{_endpoint()}/{path}/{urllib.parse.quote(name.file)}"


def _endpoint() -> str:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        parts = urllib.parse.urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not endpoint.isprintable() or " " in endpoint:
        raise UsageError(f"HF_ENDPOINT is {endpoint!r}: expected http(s)://HOST")
    return endpoint.rstrip("/")


def _refused(name: HubFile, error: urllib.error.HTTPError) -> HubError:
    if error.code == 404:
        return HubError(
            f"{name}: the hub has no such file (404); check owner, repository and file name"
        )
    if error.code in (401, 403):
        return HubError(
            f"{name}: the hub denies access ({error.code}); check the name and, if the repository "
            "is private or gated, accept its terms and set HF_TOKEN to a token that may read it"
        )
    return HubError(f"{name}: the hub answered {error.code} {error.reason}; repeat later")


def _unreachable(name: HubFile, error: Exception) -> HubError:
    host = urllib.parse.urlsplit(_endpoint()).netloc
    return HubError(
        f"{name}: cannot be fetched from {host} ({_reason(error)}); check the network or "
        f"HF_ENDPOINT, then repeat `llamay pull {name}`"
    )


def _reason(error: BaseException) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__


def _megabytes(count: int | None) -> str:
    return "an unknown size" if count is None else f"{count / 1e6:,.1f} MB"
