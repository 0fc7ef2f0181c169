"""Asks the service over its REST API, with nothing but the standard library: one method for each route.

Proxies of the environment are not used and redirections are not followed. Answers are the classes of `wire.api`; what
a newer service says beyond them is passed over.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from pollux.errors import InvalidDocument, InvalidSpec, Permanent, Refusal, Temporary
from pollux.wire.answers import from_plain, to_plain
from pollux.wire.api import (
    ClusterView,
    EventPage,
    Health,
    JobDetail,
    JobList,
    JobView,
    KindList,
    LogList,
    Problem,
    ScaleRequest,
    ShutdownRequest,
)
from pollux.wire.nodes import LogPart

T = TypeVar("T")

RETRY_AFTER_S = 1.0
"""What is advised if nobody answers, and if an answer advises nothing."""
MAX_ANSWER_BYTES = 64 * 2**20
NEXT_OFFSET = "Pollux-Next-Offset"
_DROPPED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError, ConnectionAbortedError)


class ServiceClient:
    """One service, at its address. For one thread at a time.

    Raises `Refusal` for what the service refuses (a wrong token is one with status 401), `Temporary` if nobody answers
    or if it is to be tried again later (503), and `Permanent` for an answer that is not of a Pollux service.

    Questions use one connection again and again. One that was dropped meanwhile, as by a restart of the service, is
    made anew and the question asked again, once. Orders (POST) have a connection of their own and are sent once: after
    a failure it is not known whether they arrived.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        """`timeout_s` is how long to wait for a connection, and for each part of an answer; None asks without token."""
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._is_secure, self._host, self._port, self._path = _parse(url)
        self._headers = {"Accept": "application/json", "User-Agent": "pollux"}
        if token is not None:
            # The value is a secret and does not belong in the message of an error.
            if not token or not _is_plain(token):
                raise InvalidSpec("token", "…", "holds characters that no header may hold", "Give printable ASCII")
            self._headers["Authorization"] = f"Bearer {token}"
        self._kept: http.client.HTTPConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection. The client may be used again."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def health(self) -> Health:
        return self._get("/v1/health", Health)

    def openapi(self) -> dict[str, Any]:
        return self._json(self._ask("/v1/openapi.json")[0])

    def job_schema(self) -> dict[str, Any]:
        return self._json(self._ask("/v1/job-schema.json")[0])

    def cluster(self) -> ClusterView:
        return self._get("/v1/cluster", ClusterView)

    def drain(self, node: str) -> ClusterView:
        return self._post(f"/v1/nodes/{_part(node)}/drain", ClusterView)

    def undrain(self, node: str) -> ClusterView:
        return self._post(f"/v1/nodes/{_part(node)}/undrain", ClusterView)

    def submit(self, document: Mapping[str, object], *, dry_run: bool = False) -> JobView:
        """Submit a job; with `dry_run` only check it, and tell what it would be."""
        return self._post("/v1/jobs", JobView, dict(document), dry_run=True if dry_run else None)

    def jobs(self, *, all: bool = False, team: str | None = None, phase: str | None = None) -> JobList:
        """Jobs in order of arrival; `all`: those that have ended, too."""
        return self._get("/v1/jobs", JobList, all=True if all else None, team=team, phase=phase)

    def job(self, job: str) -> JobDetail:
        """One job, by its id or its name; as in all methods that follow."""
        return self._get(f"/v1/jobs/{_part(job)}", JobDetail)

    def pause(self, job: str) -> JobView:
        return self._post(f"/v1/jobs/{_part(job)}/pause", JobView)

    def resume(self, job: str) -> JobView:
        return self._post(f"/v1/jobs/{_part(job)}/resume", JobView)

    def cancel(self, job: str) -> JobView:
        return self._post(f"/v1/jobs/{_part(job)}/cancel", JobView)

    def scale(self, job: str, min_gpus: int, max_gpus: int | None) -> JobView:
        """Set both bounds; None: no upper one."""
        return self._post(f"/v1/jobs/{_part(job)}/scale", JobView, to_plain(ScaleRequest(min_gpus, max_gpus)))

    def logs(self, job: str) -> LogList:
        return self._get(f"/v1/jobs/{_part(job)}/logs", LogList)

    def read_log(self, job: str, node: str, replica: str, offset: int = 0, limit: int = 1 << 16) -> LogPart:
        """A part of what one replica has printed; a negative offset counts from the end."""
        path = f"/v1/jobs/{_part(job)}/logs/{_part(node)}/{_part(replica)}"
        body, headers = self._ask(path, {"offset": offset, "limit": limit})
        following = headers.get(NEXT_OFFSET, "")
        if not following.isdecimal():
            raise self._foreign(f"sends no header {NEXT_OFFSET}")
        return LogPart(body.decode("utf-8", "replace"), int(following))

    def events(
        self,
        after: int = 0,
        *,
        last: int | None = None,
        limit: int | None = None,
        job: str | None = None,
        wait_s: float = 0.0,
    ) -> EventPage:
        """What came after that number; if there is nothing, wait up to `wait_s` (30 at most) for the first."""
        wanted = {"after": after, "last": last, "limit": limit, "job": job, "wait_s": wait_s or None}
        return self._read(self._ask("/v1/events", wanted, patience_s=wait_s)[0], EventPage)

    def kinds(self) -> KindList:
        """The profile registry in figures."""
        return self._get("/v1/kinds", KindList)

    def export_kinds(self) -> dict[str, Any]:
        """The profile registry as the document that `import_kinds` takes."""
        return self._json(self._ask("/v1/kinds/export")[0])

    def import_kinds(self, document: Mapping[str, object], *, replace: bool = False) -> KindList:
        """Add a registry to the service's; `replace`: put it in its place."""
        return self._post("/v1/kinds/import", KindList, dict(document), replace=True if replace else None)

    def shutdown(self, jobs: str = "leave") -> Health:
        """Have the service end: `leave` lets the jobs go on, `stop` has them save and end."""
        return self._post("/v1/shutdown", Health, to_plain(ShutdownRequest(jobs)))

    def _get(self, path: str, kind: type[T], **query: object) -> T:
        return self._read(self._ask(path, query)[0], kind)

    def _post(self, path: str, kind: type[T], body: dict[str, Any] | None = None, **query: object) -> T:
        try:
            text = json.dumps({} if body is None else body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidDocument("body", "…", f"is not JSON ({error})", "Give plain values") from None
        connection = self._connection()
        try:
            headers = {**self._headers, "Content-Type": "application/json", "Connection": "close"}
            return self._read(self._exchange(connection, "POST", _target(path, query), text.encode(), headers)[0], kind)
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from error
        finally:
            connection.close()

    def _ask(
        self, path: str, query: Mapping[str, object] | None = None, patience_s: float = 0.0
    ) -> tuple[bytes, http.client.HTTPMessage]:
        target = _target(path, query or {})
        is_again = self._kept is None  # a new connection that is dropped was dropped for a reason
        while True:
            self._kept = self._kept or self._connection()
            try:
                self._be_patient(self._kept, self._timeout_s + patience_s)
                return self._exchange(self._kept, "GET", target, None, self._headers)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if is_again or not isinstance(error, _DROPPED):
                    raise self._silent(error) from error
                is_again = True
            except BaseException:
                self.close()  # half of an answer may be left in it
                raise

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> tuple[bytes, http.client.HTTPMessage]:
        connection.request(method, f"{self._path}{target}", body, headers)
        with connection.getresponse() as answer:
            content = answer.read(MAX_ANSWER_BYTES + 1)
            if len(content) > MAX_ANSWER_BYTES:
                raise self._foreign(f"sends more than {MAX_ANSWER_BYTES} bytes")
            if not 200 <= answer.status < 300:
                raise self._refusal(answer, content)
            return content, answer.headers

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)

    @staticmethod
    def _be_patient(connection: http.client.HTTPConnection, timeout_s: float) -> None:
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)

    def _refusal(self, answer: http.client.HTTPResponse, content: bytes) -> Exception:
        kind = answer.headers.get_content_type()
        if kind != "application/problem+json":
            return self._foreign(f"answers {answer.status} {answer.reason} with {kind}")
        problem = self._read(content, Problem)
        if problem.status == 503:
            return Temporary(problem.detail, _seconds(answer.headers.get("Retry-After")))
        return Refusal(problem.status, problem.title, problem.detail, problem.faults)

    def _read(self, content: bytes, kind: type[T]) -> T:
        try:
            return from_plain(self._json(content), kind)
        except InvalidDocument as error:
            raise self._foreign(f"sends something else ({error})") from error

    def _json(self, content: bytes) -> dict[str, Any]:
        with suppress(ValueError, RecursionError):
            plain = json.loads(content)
            if isinstance(plain, dict):
                return plain
        raise self._foreign("sends no JSON object")

    def _silent(self, error: Exception) -> Temporary:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        return Temporary(f"The service at {self.url} does not answer ({what}).", RETRY_AFTER_S)

    def _foreign(self, problem: str) -> Permanent:
        fix = "Check the address, and use the same version of Pollux on both sides"
        return Permanent(f"What answers at {self.url} is no Pollux service of this version: it {problem}. {fix}.")


def _parse(url: str) -> tuple[bool, str, int | None, str]:
    """Whether by TLS, host, port, and what stands before the paths of the API."""
    fix = "Give http://host:port"
    if "@" in url:
        raise InvalidSpec("url", "…@…", "may hold a password, which would be logged", "Pass the token by itself")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # labels that are too long fail here and not in the middle of a request
    except ValueError as error:
        raise InvalidSpec("url", url, f"is no address ({error})", fix) from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not _is_plain(url):
        raise InvalidSpec("url", url, "is no address of a service", fix)
    return parts.scheme == "https", host, port, parts.path.rstrip("/")


def _target(path: str, query: Mapping[str, object]) -> str:
    given = {name: "true" if value is True else value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _part(name: str) -> str:
    """A name as one part of a path."""
    if name in ("", ".", ".."):
        raise InvalidSpec("name", name, "is no name", "Give the id or the name, as pollux ps shows it")
    return quote(name, safe="")


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _seconds(retry_after: str | None) -> float:
    return float(retry_after) if retry_after and retry_after.isdecimal() and len(retry_after) < 10 else RETRY_AFTER_S
