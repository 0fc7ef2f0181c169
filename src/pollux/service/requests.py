"""Reads what came in: parameters of the query by their declarations, and bodies in JSON. All faults at once."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from pollux.core import ProfileRegistry, codec, decode
from pollux.core.hints import known
from pollux.errors import InvalidDocument
from pollux.service.problems import Refused, fault, told
from pollux.service.routes import Parameter, RouteSpec
from pollux.wire.api import Fault

T = TypeVar("T")

MAX_BODY_BYTES = 1 << 20
MAX_REGISTRY_BYTES = 32 << 20
"""One that is full has about 14 MiB."""
MAX_DRAINED_BYTES = 16 << 20
"""A body of unknown length is read on so far, and thrown away: who still sends does not hear an answer."""
_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_BOOLS = {"true": True, "false": False}


def query(request: Request, route: RouteSpec) -> dict[str, Any]:
    """The parameters of the query by name, defaults filled in."""
    declared = {parameter.name: parameter for parameter in route.parameters}
    values: dict[str, Any] = {name: parameter.default for name, parameter in declared.items()}
    faults: list[Fault] = []
    given = request.query_params.multi_items()
    times = Counter(name for name, _ in given)
    for name, text in given:
        if name not in declared:
            fix = known(name, declared) if declared else "This path takes none"
            faults.append(fault(name, text, "is no parameter of this path", fix))
        elif times[name] > 1:
            faults.append(fault(name, text, "is given more than once", "Give it once"))
        else:
            value = _value(text, declared[name])
            if isinstance(value, Fault):
                faults.append(value)
            values[name] = value
    if faults:
        raise Refused(422, told("The query", len(faults)), faults)
    return values


def _value(text: str, parameter: Parameter) -> Any:
    """The value, or what is wrong with it."""
    name, kind = parameter.name, parameter.kind
    if kind is str:
        if parameter.choices and text not in parameter.choices:
            return fault(name, text, "is not one of the values it may have", known(text, parameter.choices))
        return text
    if kind is bool:
        value = _BOOLS.get(text)
        return fault(name, text, "must be true or false", "Give true or false") if value is None else value
    number = _number(text, kind)
    if number is None:
        wanted = "a whole number" if kind is int else "a number"
        return fault(name, text, f"must be {wanted}", f"Give {wanted}{_range(parameter)}")
    if (parameter.minimum is not None and number < parameter.minimum) or (
        parameter.maximum is not None and number > parameter.maximum
    ):
        return fault(name, text, "is out of range", f"Give a number{_range(parameter)}")
    return number


def _number(text: str, kind: type) -> float | None:
    if kind is int:
        return int(text) if _WHOLE.fullmatch(text) else None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _range(parameter: Parameter) -> str:
    if parameter.minimum is None:
        return ""
    return f" of {parameter.minimum:g} or more" + (
        "" if parameter.maximum is None else f", up to {parameter.maximum:g}"
    )


async def document(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body: an object in JSON, not too large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"The body is of type {kind or 'unknown'!r}. Send application/json.")
    body = await _body(request, max_bytes)
    try:
        plain = json.loads(body, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, f"The body is not JSON: {what}.") from None
    if not isinstance(plain, dict):
        raise Refused(400, "The body is no JSON object. Send {…}.")
    return plain


async def body_of(request: Request, kind: type[T]) -> T:
    """The body as one of the small classes of `wire.api`."""
    plain = await document(request)
    try:
        return decode(plain, kind)
    except InvalidDocument as error:
        raise _unreadable(error) from None


async def registry(request: Request) -> ProfileRegistry:
    """The body as a profile registry, as it is written to files."""
    plain = await document(request, MAX_REGISTRY_BYTES)
    try:
        return codec.unwrap(plain, ProfileRegistry)
    except InvalidDocument as error:
        raise _unreadable(error) from None


def _unreadable(error: InvalidDocument) -> Refused:
    return Refused(422, told("The body", 1), [fault(error.field, error.value, error.problem, error.fix)])


async def _body(request: Request, max_bytes: int) -> bytes:
    too_large = Refused(413, f"The body is larger than {max_bytes} bytes.", headers={"Connection": "close"})
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    timeout_s = request.app.state.patience.for_body(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size <= max_bytes:
                    parts.append(part)
                elif size > MAX_DRAINED_BYTES:
                    raise too_large
    except TimeoutError:
        raise Refused(
            408, f"The body was not there after {timeout_s:.3g} s.", headers={"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise Refused(400, "The connection ended before the body did.") from None
    if size > max_bytes:
        raise too_large
    return b"".join(parts)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} is given twice")
    return content


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
