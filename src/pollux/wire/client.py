"""Posts messages over HTTP, to an address or to a local socket, with nothing but the standard library.

A training job imports this: it must not ask for packages that the job does not have. Proxies of the environment are
not used, redirections are not followed, and each message has a connection of its own.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from pollux.errors import InvalidDocument, InvalidSpec, Permanent, Temporary
from pollux.wire.messages import pack

DEFAULT_PATH = "/v1/reports"
"""Where reports go if the address does not say."""
RETRY_AFTER_S = 1.0
"""What is advised after a failure whose answer advises nothing."""
MAX_ANSWER_BYTES = 4096
"""The first words of a refusal are quoted; the rest of an answer is not read."""

_TOO_LONG_FOR_A_SOCKET = 108  # bytes of sun_path on Linux, the closing zero included
_BUSY = {408, 425, 429}
_BAD_MESSAGE = {400, 413, 422}


class ReportClient:
    """Sends messages to one receiver. Blocks for at most about `timeout_s` to connect and as long for the rest.

    Raises `Temporary` if the same message may arrive later (nobody listens, no answer in time, an answer that is not
    HTTP, 408, 425, 429, 5xx), `InvalidDocument` if this message will not do but the next one may (400, 413, 422, or
    too large), and `Permanent` if nothing of ours will ever be heard there: all other answers, such as 401, 403, 404,
    409 and 410.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 5.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._socket_path, self._host, self._port, self._path = _parse(url)
        self._headers = {"Content-Type": "application/json", "User-Agent": "pollux", "Connection": "close"}
        if token is not None:
            # The value is a secret and does not belong in the message of an error.
            if not token or not _is_plain(token):
                raise InvalidSpec("token", "…", "holds characters that no header may hold", "Give printable ASCII")
            self._headers["Authorization"] = f"Bearer {token}"

    def post(self, message: object) -> None:
        """Deliver one registered message; returns when the receiver has said that it has it."""
        body = pack(message)
        connection = _Connection(self._host, self._port, self._socket_path, self._timeout_s)
        try:
            connection.connect()
            connection.give_up_at_s = time.monotonic() + self._timeout_s
            connection.request("POST", self._path, body, self._headers)
            with connection.getresponse() as answer:
                if not 200 <= answer.status < 300:
                    raise self._refusal(answer, type(message).__name__)
        except (OSError, http.client.HTTPException) as error:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise Temporary(f"{self._url} does not take the message ({what}).", RETRY_AFTER_S) from error
        finally:
            connection.close()

    def _refusal(self, answer: http.client.HTTPResponse, name: str) -> Exception:
        said = b""
        with suppress(OSError, http.client.HTTPException):  # the status is known; the rest would be kind, no more
            said = answer.read(MAX_ANSWER_BYTES)
        words = _words(f"{answer.reason}: {said.decode('utf-8', 'replace')}")
        story = f"{self._url} answers {answer.status} {words}"
        if answer.status >= 500 or answer.status in _BUSY:
            return Temporary(f"{story}.", _seconds(answer.headers.get("Retry-After")))
        if answer.status in _BAD_MESSAGE:
            fix = "Use the same version of Pollux on both sides"
            return InvalidDocument("message", name, f"is refused: {story}", fix)
        return Permanent(f"{story}. Check the address and the token of the job.")


def _parse(url: str) -> tuple[str | None, str, int | None, str]:
    """Socket path, host, port and HTTP path of an address."""
    fix = "Give http://host:port/path or unix:/path/to/socket"
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        if not path.startswith("/") or "\0" in path:
            raise InvalidSpec("url", url, "names no absolute path", fix)
        if len(os.fsencode(path)) >= _TOO_LONG_FOR_A_SOCKET:
            raise InvalidSpec("url", url, "is too long for the path of a socket", "Put the socket into a shorter one")
        return path, "localhost", None, DEFAULT_PATH
    if "@" in url:
        raise InvalidSpec("url", "…@…", "may hold a password, which would be logged", "Pass the token by itself")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # labels that are too long fail here and not in the middle of a post
    except ValueError as error:
        raise InvalidSpec("url", url, f"is no address ({error})", fix) from None
    if parts.scheme != "http" or not host or parts.fragment or not _is_plain(url):
        raise InvalidSpec("url", url, "is no address that reports can go to", fix)
    return None, host, port, (parts.path or DEFAULT_PATH) + (f"?{parts.query}" if parts.query else "")


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _words(text: str) -> str:
    """What a stranger wrote, fit for one line of a log."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(plain.split())[:200].rstrip(": ")


def _seconds(retry_after: str | None) -> float:
    """The seconds of a Retry-After header; dates are not worth the trouble."""
    return float(retry_after) if retry_after and retry_after.isdecimal() and len(retry_after) < 10 else RETRY_AFTER_S


class _Connection(http.client.HTTPConnection):
    """Also to local sockets; and the whole answer has to be there in time, not each byte of it."""

    def __init__(self, host: str, port: int | None, socket_path: str | None, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._socket_path = socket_path
        self.give_up_at_s = 0.0
        self.response_class = self._response  # type: ignore[assignment]  # called like the class

    def connect(self) -> None:
        if self._socket_path is None:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)

    def _response(self, sock: socket.socket, *args: Any, **kwargs: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, *args, **kwargs)
        response.fp = io.BufferedReader(_Impatient(sock, response.fp.detach(), self.give_up_at_s))
        return response


class _Impatient(io.RawIOBase):
    """Reads a socket until a moment. A timeout of the socket alone starts anew with every byte that drips in."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, give_up_at_s: float) -> None:
        self._sock = sock
        self._raw = raw
        """What the socket itself would read by; it keeps the socket open while the answer is read."""
        self._give_up_at_s = give_up_at_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._give_up_at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
