"""The description of the API in OpenAPI 3.1, and as pages for people, both made from the table of `routes`.

python -m pollux.service.openapi > docs/openapi.json
python -m pollux.service.openapi --markdown > docs/rest-api.md
"""

from __future__ import annotations

import http
import json
import sys
from functools import cache
from typing import Any

from pollux.core import FrozenMap
from pollux.service.json_schemas import Schema, reachable, record_schema
from pollux.service.routes import JOB_DOCUMENT, REGISTRY_DOCUMENT, ROUTES, Parameter, RouteSpec
from pollux.wire import api, jobspec

PROBLEMS: FrozenMap[int, str] = FrozenMap(
    {
        400: "The body is not a JSON object.",
        401: "The token is missing or wrong.",
        403: "The credential of a job: it is for its reports to the daemon of its node, and for nothing here.",
        404: "There is no such job, node or log.",
        408: "The body did not come in time. A connection whose request does not even begin to is closed.",
        409: "Not possible as it stands: it has ended, or several jobs have that name.",
        413: "The body is larger than 1 MiB, or than 32 MiB where a registry is imported.",
        415: "The body is not application/json.",
        421: "A name other than loopback's in the Host header.",
        422: "What was sent cannot be used; `faults` lists everything that is wrong.",
        500: "The service failed; its log says why.",
        503: "Not now: the service recovers, or a node is out of reach. Retry-After says when to come back.",
        507: "The disk of the service is full, and nothing has changed. Make room, and ask again.",
    }
)
"""What the statuses of errors mean here."""
COMMON = (403, 421, 422, 500)
INTRODUCTION = (
    "Errors are application/problem+json. All routes but /v1/health need the header `Authorization: Bearer TOKEN`; "
    "the token is in the file `token` of the cluster's folder. Times are seconds since 1970 by the service's clock, "
    "durations seconds; null is what nobody has measured yet. Unknown parameters are refused. Fields may be added to "
    "answers in a later version: pass over those that you do not know."
)

REGISTRY_SCHEMA: Schema = {
    "type": "object",
    "description": "The profile registry as `pollux registry export` writes it: see registry.md.",
    "properties": {
        "schema": {"type": "integer", "description": "Version of the format."},
        "type": {"type": "string", "description": "ProfileRegistry."},
        "body": {"type": "object", "description": "`kinds`, by name, and `made_by`: sums of times, and counts."},
    },
    "required": ["schema", "type", "body"],
    "additionalProperties": False,
}

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


@cache
def document() -> dict[str, Any]:
    """The whole OpenAPI document. Do not change it."""
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    bodies = {route.body.__name__ for route in ROUTES if isinstance(route.body, type)}
    kinds = [kind for route in ROUTES for kind in (route.answer, route.body) if isinstance(kind, type)]
    schemas: dict[str, Schema] = {
        name: record_schema(kind, is_sent=name not in bodies) for name, kind in reachable([*kinds, api.Problem]).items()
    }
    schemas[JOB_DOCUMENT] = {key: value for key, value in jobspec.json_schema().items() if key != "$schema"}
    schemas[REGISTRY_DOCUMENT] = REGISTRY_SCHEMA
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pollux", "version": "1", "description": INTRODUCTION},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: RouteSpec) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary}
    if route.is_open:
        operation["security"] = []
    parameters = [_parameter(each, "path") for each in route.path_parameters]
    parameters += [_parameter(each, "query") for each in route.parameters]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(route.body)}}}
    answers = {route.status: http.HTTPStatus(route.status).phrase, **route.also}
    responses = {str(status): _answer(route, text) for status, text in sorted(answers.items())}
    for status in sorted({*route.problems, *COMMON}):
        content = {"application/problem+json": {"schema": _ref(api.Problem)}}
        responses[str(status)] = {"description": PROBLEMS[status], "content": content}
    return {**operation, "responses": responses}


def _answer(route: RouteSpec, text: str) -> dict[str, Any]:
    kind, schema = "application/json", {"type": "object"} if route.answer is dict else _ref(route.answer)
    if route.answer is str:
        kind, schema = "text/plain", {"type": "string"}
    answer: dict[str, Any] = {"description": text, "content": {kind: {"schema": schema}}}
    if route.headers:
        answer["headers"] = {
            name: {"description": text, "schema": {"type": "integer"}} for name, text in route.headers.items()
        }
    return answer


def _parameter(parameter: Parameter, place: str) -> dict[str, Any]:
    schema: Schema = {"type": _TYPES[parameter.kind]}
    if parameter.default is not None:
        schema["default"] = parameter.default
    if parameter.minimum is not None:
        schema["minimum"] = parameter.minimum
    if parameter.maximum is not None:
        schema["maximum"] = parameter.maximum
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    common = {"name": parameter.name, "in": place, "description": parameter.description, "schema": schema}
    return {**common, "required": True} if place == "path" else common


def _ref(kind: Any) -> Schema:
    return {"$ref": f"#/components/schemas/{kind if isinstance(kind, str) else kind.__name__}"}


def main(arguments: list[str]) -> int:
    """Write the document, or the pages with --markdown, to the standard output."""
    if arguments not in ([], ["--markdown"]):
        sys.stderr.write("usage: python -m pollux.service.openapi [--markdown]\n")
        return 2
    if arguments:
        from pollux.service.rest_pages import pages

        sys.stdout.write(pages(document()))
    else:
        sys.stdout.write(to_text(document()))
    return 0


def to_text(content: dict[str, Any]) -> str:
    """The document as it is published."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
