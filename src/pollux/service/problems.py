"""Errors as answers: one table from the exceptions of Pollux to statuses, and problem+json for all of them."""

from __future__ import annotations

import http
import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pollux.errors import (
    DiskFull,
    InvalidDocument,
    InvalidInput,
    InvalidJob,
    Permanent,
    PolluxError,
    StaleGeneration,
    Temporary,
    UnknownName,
)
from pollux.wire.answers import to_plain
from pollux.wire.api import Fault, Problem

LOG = logging.getLogger(__name__)

MAX_DETAIL = 2000
"""Letters. A message may list every job of the cluster."""
MAX_VALUE = 80
STATUSES: tuple[tuple[type[PolluxError], int | None], ...] = (
    (UnknownName, 404),
    (InvalidDocument, None),  # what was sent is read before: this one is of ours
    (InvalidInput, 422),
    (StaleGeneration, 409),
    (DiskFull, 507),
    (Permanent, 409),
    (Temporary, 503),
)
"""The first that fits counts; None and all others are 500."""


class Refused(Exception):  # noqa: N818 - never leaves the API: it becomes an answer
    """A handler's way to answer with a problem."""

    def __init__(
        self, status: int, detail: str, faults: Iterable[Fault] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(http.HTTPStatus(status).phrase, status, detail, faults=tuple(faults))
        self.headers = dict(headers or {})


def json_answer(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON, `wire.api` class or plain."""
    body = json.dumps(to_plain(answer), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    kind = "application/problem+json" if isinstance(answer, Problem) else "application/json"
    return Response(body.encode("utf-8", "replace"), status, dict(headers or {}), kind)


def answer_to(error: Exception) -> Response:
    """The answer to whatever was raised. What nobody expected is logged, and not told."""
    refused = error if isinstance(error, Refused) else _refused(error)
    if refused is None:
        LOG.error("a request failed", exc_info=error)
        refused = Refused(500, "The service failed to answer. Its log says why.")
    return json_answer(refused.problem, refused.problem.status, refused.headers)


async def answer_to_http(_request: Request, error: Exception) -> Response:
    """For what the framework itself refuses: no such path, or no such method there."""
    assert isinstance(error, HTTPException)
    texts = {404: "There is no such path. GET /v1/openapi.json lists all.", 405: "This path has other methods."}
    detail = texts.get(error.status_code, error.detail)
    return answer_to(Refused(error.status_code, detail, headers=error.headers))


def fault(field: str, value: object, problem: str, fix: str) -> Fault:
    """One thing that is wrong, with the value shortened."""
    text = value if isinstance(value, str) else repr(value)
    return Fault(field, _cut(text, MAX_VALUE), problem, fix)


def told(what: str, count: int) -> str:
    """The sentence above a list of faults."""
    return f"{what} has {'a fault' if count == 1 else f'{count} faults'}."


def _refused(error: Exception) -> Refused | None:
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), None)
    if status is None:
        return None
    if isinstance(error, InvalidJob):
        faults = tuple(Fault(each.field, each.value, each.problem, each.fix, each.line) for each in error.faults)
        return Refused(status, told("The job", len(faults)), faults)
    if isinstance(error, InvalidInput) and not isinstance(error, UnknownName):
        return Refused(status, told("What was sent", 1), [fault(error.field, error.value, error.problem, error.fix)])
    if isinstance(error, Temporary):
        return Refused(status, str(error.args[0]), headers={"Retry-After": str(max(math.ceil(error.retry_after_s), 1))})
    return Refused(status, _cut(str(error), MAX_DETAIL))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
