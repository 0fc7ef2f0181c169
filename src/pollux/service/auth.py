"""Who may ask: the guard in front of the API.

A request without the token is refused before anybody looks at its path; so is one with the credential of a job, which
is for the daemon of its node and good for nothing here. A service that listens on loopback answers
only to names of loopback: else a page in a browser could reach it by a name of its own that resolves to 127.0.0.1.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pollux.errors import InvalidSpec
from pollux.service.problems import Refused, answer_to
from pollux.wire.credentials import PREFIX, holder

LOG = logging.getLogger(__name__)

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class Guard:
    """ASGI middleware: checks the Host, then the token, and has no answer kept by anybody."""

    def __init__(self, app: ASGIApp, token: str, host: str, open_paths: Iterable[str] = ()) -> None:
        """`host` is where the service listens; `open_paths` need no token."""
        self._app = app
        self._token = token.encode("ascii")
        self._hosts = LOOPBACK_NAMES | {_bare(host)} if is_loopback(host) else None
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        app = self._app if refusal is None else answer_to(refusal)
        await app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _named(headers.getlist("host")) not in self._hosts:
            LOG.warning("refused a request to a foreign Host")
            return Refused(421, "This service answers on loopback only, by the names localhost, 127.0.0.1 and [::1].")
        given = _bearer(scope)
        if (replica := holder(self._token.decode("ascii"), given.decode("utf-8", "replace"))) is not None:
            LOG.warning("refused a request with the credential of a replica", extra={"job": replica.job})
            detail = (
                f"This credential belongs to replica {replica.replica} of job {replica.job}. It is for its reports to "
                "the daemon of its node, and nothing of this API is for jobs."
            )
            return Refused(403, detail)
        if scope["path"] in self._open_paths or hmac.compare_digest(given, self._token):
            return None
        advice = (
            "Send the header Authorization: Bearer TOKEN. The token is in the file `token` of the cluster's folder."
        )
        return Refused(401, advice, headers={"WWW-Authenticate": 'Bearer realm="pollux"'})


def _bearer(scope: Scope) -> bytes:
    """What the request shows as its token; empty: nothing, or not in the one way that there is."""
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    return token.strip() if scheme.lower() == b"bearer" else b""


def check_token(token: str) -> str:
    """The token, if a header can hold it; it is a secret, and the message of the error does not have it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidSpec("token", "…", "holds characters that no header may hold", "Give printable ASCII")
    if token.startswith(PREFIX):
        raise InvalidSpec("token", "…", "begins as the credential of a job does", "Remove the file: another is made")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a service that listens there."""
    try:
        return ipaddress.ip_address(_bare(host)).is_loopback
    except ValueError:
        return _bare(host) == "localhost"


def _named(hosts: list[str]) -> str:
    """The name in a Host header, without its port; empty if there is not exactly one header."""
    if len(hosts) != 1:
        return ""
    host = hosts[0].strip()
    if host.startswith("["):
        name, bracket, port = host.partition("]")
        return _bare(name + bracket) if not port or port.startswith(":") else ""
    return _bare(host.partition(":")[0])


def _bare(host: str) -> str:
    return host.strip().strip("[]").lower()
