"""The reference of the API in Markdown, made from its OpenAPI document alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pollux.service.routes import JOB_DOCUMENT

HEAD = """\
# REST API

Written by `python -m pollux.service.openapi --markdown`; do not edit. As OpenAPI 3.1: [openapi.json](openapi.json).

"""


def pages(document: dict[str, Any]) -> str:
    """The whole reference: routes, errors, objects."""
    return HEAD + "\n".join([document["info"]["description"], "", *_routes(document), *_objects(document)])


def _routes(document: dict[str, Any]) -> Iterator[str]:
    yield "## Routes"
    yield ""
    common: dict[str, str] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"### {method.upper()} {path}"
            yield ""
            yield operation["summary"] + (" Needs no token." if operation.get("security") == [] else "")
            yield ""
            yield from _parameters(operation.get("parameters", []))
            yield from _exchange(operation, common)
    yield "## Errors"
    yield ""
    yield "The body is a [Problem](#problem)."
    yield ""
    yield "| status | meaning |"
    yield "|---|---|"
    for status, text in sorted(common.items()):
        yield f"| {status} | {text} |"
    yield ""


def _parameters(parameters: list[dict[str, Any]]) -> Iterator[str]:
    if not parameters:
        return
    yield "| parameter | in | type | default | meaning |"
    yield "|---|---|---|---|---|"
    for each in parameters:
        schema = each["schema"]
        default = f"`{_json(schema['default'])}`" if "default" in schema else ""
        yield f"| `{each['name']}` | {each['in']} | {_kind(schema)} | {default} | {each['description']} |"
    yield ""


def _exchange(operation: dict[str, Any], common: dict[str, str]) -> Iterator[str]:
    """What is sent and what comes back; the meanings of errors are gathered in `common`."""
    if "requestBody" in operation:
        yield f"Body: {_link(operation['requestBody']['content']['application/json']['schema'])}."
        yield ""
    problems: list[str] = []
    for status, answer in operation["responses"].items():
        (kind, content), *_ = answer["content"].items()
        if kind == "application/problem+json":
            common[status] = answer["description"]
            problems.append(status)
            continue
        headers = "".join(
            f"; header `{name}`: {each['description']}" for name, each in answer.get("headers", {}).items()
        )
        what = "plain text" if kind == "text/plain" else _link(content["schema"])
        yield f"Answer {status} ({answer['description'].rstrip('.')}): {what}{headers.rstrip('.')}."
        yield ""
    yield f"Errors: {', '.join(problems)}."
    yield ""


def _objects(document: dict[str, Any]) -> Iterator[str]:
    yield "## Objects"
    yield ""
    for name, schema in document["components"]["schemas"].items():
        yield f"### {name}"
        yield ""
        if name == JOB_DOCUMENT:
            yield "The specification of a job, as JSON: see [job-specification.md](job-specification.md)."
            yield ""
            continue
        if "description" in schema:
            yield " ".join(schema["description"].split())
            yield ""
        yield "| field | type | meaning |"
        yield "|---|---|---|"
        for field, each in schema["properties"].items():
            yield f"| `{field}` | {_kind(each)} | {' '.join(each.get('description', '').split())} |"
        yield ""


def _link(schema: dict[str, Any]) -> str:
    if "$ref" not in schema:
        return "a JSON object"
    name = schema["$ref"].rpartition("/")[2]
    return f"[{name}](#{name.lower()})"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _link(schema)
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any JSON")
    name, or_null = (kind[0], " or null") if isinstance(kind, list) else (kind, "")
    if name == "array":
        return f"list of {_kind(schema['items'])}{or_null}"
    if "additionalProperties" in schema:
        return f"map of text to {_kind(schema['additionalProperties'])}{or_null}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None:
        return f"{name}{or_null}"
    return f"{name}, {low} or more" if high is None else f"{name}, {low} to {high}"


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
