import json
import re
from pathlib import Path

import pytest
from tests.core.kinds import registry
from tests.wire.strategies import entry_at, report_at

from pollux.core import JobSpec, JobSubmitted, KindsImported, dumps
from pollux.service.json_schemas import field_docs
from pollux.service.openapi import document, main, to_text
from pollux.service.rest import Answers
from pollux.service.rest_pages import pages
from pollux.service.routes import ROUTES
from pollux.wire.api import JobView, LogFile

from .fake_service import FakeService
from .rest_client import DOCUMENT, ask

DOCS = Path(__file__).resolve().parents[2] / "docs"
BODIES = {
    "submit_job": DOCUMENT,
    "scale_job": {"min_gpus": 1, "max_gpus": 2},
    "import_kinds": json.loads(dumps(registry())),
    "shutdown": {"jobs": "leave"},
}


def faults(value: object, schema: object, path: str = "$") -> list[str]:
    """Where the value is not what the schema says: for the words that our schemas use, and no others."""
    if schema is False:
        return [f"{path}: not allowed"]
    known = {"$ref", "anyOf", "type", "enum", "items", "properties", "required", "additionalProperties"}
    assert schema.keys() <= known | {"description"}, schema.keys()
    if "$ref" in schema:
        return faults(value, resolve(schema["$ref"]), path)
    if "anyOf" in schema:
        found = [faults(value, each, path) for each in schema["anyOf"]]
        return [] if [] in found else found[0]
    kinds = schema.get("type", [])
    if kinds and not any(is_of(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return [f"{path}: {value!r} is no {kinds}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path}: {value!r} is not in {schema['enum']}"]
    if isinstance(value, list):
        return [
            fault for i, item in enumerate(value) for fault in faults(item, schema.get("items", {}), f"{path}[{i}]")
        ]
    if not isinstance(value, dict):
        return []
    properties = schema.get("properties", {})
    wrong = [f"{path}.{name}: missing" for name in schema.get("required", []) if name not in value]
    for name, part in value.items():
        wrong += faults(part, properties.get(name, schema.get("additionalProperties", {})), f"{path}.{name}")
        if properties and name not in properties:
            wrong.append(f"{path}.{name}: not described")
    return wrong


def is_of(value: object, kind: str) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}[kind])


def resolve(reference: str) -> dict:
    found = document()
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def references(part: object) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [found for each in part.values() for found in references(each)]
    return [found for each in part for found in references(each)] if isinstance(part, list) else []


def furnished() -> FakeService:
    service = FakeService()
    service.hear(JobSubmitted(JobSpec("a", name="train", max_gpus=4)))
    service.hear(JobSubmitted(JobSpec("b")))
    service.hear(KindsImported(registry().kinds))
    service.place(a={"n0": 1, "n1": 2})
    service.reports["a"] = report_at(5, goodput=2.0, loss=0.5)
    service.log.note(1.0, entry_at(5), "a")
    service.log_files = (LogFile("r", "n0", 11, True, 5.0),)
    service.printed = b"hello world"
    return service


def test_every_reference_leads_somewhere():
    assert references(document())
    for reference in references(document()):
        assert resolve(reference)


def test_every_object_is_used():
    used = {reference.rpartition("/")[2] for reference in references(document())}
    assert set(document()["components"]["schemas"]) == used


def test_every_route_has_its_function_and_its_entry():
    names = [route.name for route in ROUTES]
    assert len(set(names)) == len(names)
    assert all(callable(getattr(Answers, name, None)) for name in names)
    described = [each["operationId"] for found in document()["paths"].values() for each in found.values()]
    assert sorted(described) == sorted(names)
    public = {name for name in vars(Answers) if not name.startswith("_")} - {"to"}
    assert public == set(names)


@pytest.mark.parametrize("path", document()["paths"])
def test_every_part_of_a_path_is_described(path):
    for operation in document()["paths"][path].values():
        described = {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"}
        assert described == set(re.findall(r"{(\w+)}", path))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_the_answer_of_every_route_is_as_described(route):
    path = route.path.format(job="a", node="n0", replica="r")
    answer = ask(furnished(), route.method, path, json=BODIES.get(route.name))
    assert answer.status_code == route.status
    described = document()["paths"][route.path][route.method.lower()]["responses"][str(route.status)]
    ((kind, content),) = described["content"].items()
    assert answer.headers["content-type"].partition(";")[0] == kind
    assert all(name in answer.headers for name in described.get("headers", {}))
    if kind == "application/json":
        assert faults(answer.json(), content["schema"]) == []


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_the_problems_of_every_route_are_described(route):
    path = route.path.format(job="nobody", node="nowhere", replica="r")
    described = document()["paths"][route.path][route.method.lower()]["responses"]
    answers = [
        ask(furnished(), route.method, f"{path}?unknown=1"),
        ask(furnished(), route.method, path, headers={}),
        ask(furnished(), route.method, path, headers={"Host": "evil.example"}),
        ask(furnished(), route.method, path),
    ]
    for answer in answers:
        if answer.status_code >= 400:
            schema = described[str(answer.status_code)]["content"]["application/problem+json"]["schema"]
            assert faults(answer.json(), schema) == []


def test_a_request_body_is_checked_as_described():
    schema = resolve("#/components/schemas/ScaleRequest")
    assert faults({"min_gpus": 1, "max_gpus": None}, schema) == []
    assert faults({"min_gpus": 1}, schema)
    assert schema["additionalProperties"] is False


def test_fields_are_described_by_the_text_under_them():
    assert field_docs(JobView)["progress"] == "From 0 to 1."
    assert resolve("#/components/schemas/JobView")["properties"]["progress"]["description"] == "From 0 to 1."
    assert "id" not in field_docs(JobView)


def test_the_validator_of_this_test_sees_what_is_wrong():
    health = resolve("#/components/schemas/Health")
    assert faults({"status": 1, "version": "1"}, health)
    assert faults({"status": "ok"}, health)
    assert faults({"status": "ok", "version": "1", "more": 1}, health)
    assert faults({"jobs": [{}]}, resolve("#/components/schemas/JobList"))


def test_the_published_document_is_up_to_date():
    assert (DOCS / "openapi.json").read_text() == to_text(document()), (
        "python -m pollux.service.openapi > docs/openapi.json"
    )


def test_the_published_pages_are_up_to_date():
    fix = "python -m pollux.service.openapi --markdown > docs/rest-api.md"
    assert (DOCS / "rest-api.md").read_text() == pages(document()), fix


def test_the_pages_name_every_route_and_link_to_what_is_there():
    text = pages(document())
    for route in ROUTES:
        assert f"### {route.method} {route.path}\n" in text
    headings = {re.sub(r"[^\w-]", "", line.lstrip("# ").lower().replace(" ", "-")) for line in text.splitlines()}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= headings


def test_the_script_writes_either(capsys):
    assert main([]) == 0
    assert json.loads(capsys.readouterr().out) == document()
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out == pages(document())
    assert main(["--html"]) == 2
