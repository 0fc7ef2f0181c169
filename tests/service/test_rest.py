import asyncio
import json
import logging

import httpx
import pytest
from tests.core.kinds import registry
from tests.wire.strategies import entry_at, report_at

from pollux.core import JobFinished, JobSpec, JobSubmitted, KindsImported, ProfileRegistry, dumps, loads
from pollux.errors import InvalidDocument, InvalidJob, InvalidSpec, Permanent, Temporary
from pollux.service.requests import MAX_BODY_BYTES, MAX_DRAINED_BYTES, MAX_REGISTRY_BYTES
from pollux.service.rest import create_app
from pollux.service.routes import NEXT_OFFSET, ROUTES
from pollux.wire.api import Fault, LogFile

from .fake_service import TOKEN, FakeService
from .rest_client import BEARER, DOCUMENT, URL, ask

JSON = {**BEARER, "Content-Type": "application/json"}
PATIENCE_S = 60.0


@pytest.fixture
def service() -> FakeService:
    return FakeService()


def submitted(service: FakeService, *names: str) -> None:
    for name in names:
        service.hear(JobSubmitted(JobSpec(f"{name}-{len(service.log)}", name=name, team=f"team-{name}")))


def problem_of(answer: httpx.Response, status: int) -> dict:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["status"] == status
    return answer.json()


def test_health_says_whether_it_recovers_or_ends(service):
    assert ask(service, "GET", "/v1/health").json()["status"] == "ok"
    service.is_recovering = True
    assert ask(service, "GET", "/v1/health").json()["status"] == "recovering"
    service.end(stop_jobs=False)
    assert ask(service, "GET", "/v1/health").json()["status"] == "ending"


def test_a_job_is_submitted(service):
    answer = ask(service, "POST", "/v1/jobs", json=DOCUMENT)
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    job = service.job(answer.json()["id"])
    assert (job.spec.command, job.spec.env) == (("python", "train.py"), {"KEY": "hush"})
    assert answer.json()["waits_for"] == "free GPUs"
    assert "hush" not in ask(service, "GET", f"/v1/jobs/{job.id}").text + ask(service, "GET", "/v1/events").text


def test_a_dry_run_submits_nothing(service):
    answer = ask(service, "POST", "/v1/jobs?dry_run=true", json=DOCUMENT)
    assert (answer.status_code, answer.json()["id"], answer.json()["max_gpus"]) == (200, "", 4)
    assert not service.scheduler.state.jobs
    service.refuses = InvalidJob([Fault("min_gpus", "9", "more than there are", "Give 4 or fewer")])
    assert ask(service, "POST", "/v1/jobs?dry_run=true", json=DOCUMENT).status_code == 422


def test_a_bad_job_is_told_every_fault_at_once(service):
    document = {
        "command": "python train.py",
        "working_dir": "here",
        "min_gpus": 0,
        "nonsense": 1,
        "env": {"A": ["hush"]},
    }
    answer = ask(service, "POST", "/v1/jobs", json=document)
    problem = problem_of(answer, 422)
    assert {"working_dir", "min_gpus", "nonsense"} <= {fault["field"] for fault in problem["faults"]}
    assert all(fault["problem"] and fault["fix"] for fault in problem["faults"])
    assert "hush" not in answer.text


def test_jobs_are_listed_in_order_of_arrival(service):
    submitted(service, "a", "b", "c")
    ids = list(service.scheduler.state.jobs)
    service.place(**{ids[0]: {"n0": 1}, ids[1]: {"n1": 2}})
    service.hear(JobFinished(ids[1], 1))

    def listed(query: str) -> list[str]:
        return [job["id"] for job in ask(service, "GET", f"/v1/jobs{query}").json()["jobs"]]

    assert listed("") == [ids[0], ids[2]]
    assert listed("?all=true") == ids
    assert listed("?phase=succeeded") == [ids[1]]
    assert listed("?phase=running&team=team-a") == [ids[0]]
    assert listed("?team=nobody") == []


def test_a_job_is_found_by_its_name(service):
    submitted(service, "a")
    service.reports["a-2"] = report_at(7)
    assert ask(service, "GET", "/v1/jobs/a").json()["job"]["step"] == 7
    submitted(service, "a")
    detail = problem_of(ask(service, "GET", "/v1/jobs/a"), 409)["detail"]
    assert "a-2" in detail
    assert "a-3" in detail
    ask(service, "POST", "/v1/jobs/a-3/cancel")
    assert ask(service, "GET", "/v1/jobs/a").json()["job"]["id"] == "a-2"
    ask(service, "POST", "/v1/jobs/a-2/cancel")
    assert ask(service, "GET", "/v1/jobs/a").json()["job"]["id"] == "a-3"
    assert "'b'" in problem_of(ask(service, "GET", "/v1/jobs/b"), 404)["detail"]


def test_orders_are_given(service):
    submitted(service, "a")
    for verb, phase in (("pause", "paused"), ("resume", "pending"), ("cancel", "cancelled")):
        answer = ask(service, "POST", f"/v1/jobs/a/{verb}")
        assert (answer.status_code, answer.json()["phase"]) == (202, phase)
    problem_of(ask(service, "POST", "/v1/jobs/a/pause"), 409)
    problem_of(ask(service, "POST", "/v1/jobs/nobody/pause"), 404)


def test_a_job_is_scaled(service):
    submitted(service, "a")
    answer = ask(service, "POST", "/v1/jobs/a/scale", json={"min_gpus": 2, "max_gpus": None})
    assert (answer.status_code, answer.json()["min_gpus"], answer.json()["max_gpus"]) == (200, 2, None)
    for body in ({"min_gpus": 0, "max_gpus": 1}, {"min_gpus": 2, "max_gpus": 1}, {"min_gpus": "2", "max_gpus": 3}, {}):
        assert problem_of(ask(service, "POST", "/v1/jobs/a/scale", json=body), 422)["faults"]


def test_a_node_is_drained_and_comes_back(service):
    assert ask(service, "POST", "/v1/nodes/n1/drain").json()["nodes"][1]["state"] == "drained"
    assert ask(service, "POST", "/v1/nodes/n1/undrain").json()["nodes"][1]["state"] == "ready"
    assert "n9" in problem_of(ask(service, "POST", "/v1/nodes/n9/drain"), 404)["detail"]


def test_a_log_is_read_in_parts(service):
    submitted(service, "a")
    service.log_files = (LogFile("a.1", "n0", 11, True, 5.0),)
    service.printed = b"hello world"
    assert ask(service, "GET", "/v1/jobs/a/logs").json()["logs"][0]["replica"] == "a.1"
    part = ask(service, "GET", "/v1/jobs/a/logs/n0/a.1?limit=5")
    assert (part.text, part.headers[NEXT_OFFSET]) == ("hello", "5")
    assert part.headers["content-type"] == "text/plain; charset=utf-8"
    assert ask(service, "GET", "/v1/jobs/a/logs/n0/a.1?offset=-5").text == "world"
    problem_of(ask(service, "GET", "/v1/jobs/a/logs/n0/other"), 404)


def test_events_come_in_pages(service):
    submitted(service, "a", "b")
    service.log.note(1.0, entry_at(5), "a-2")
    page = ask(service, "GET", "/v1/events?limit=3").json()
    assert ([event["sequence"] for event in page["events"]], page["next"]) == ([1, 2, 3], 3)
    page = ask(service, "GET", "/v1/events?after=3").json()
    assert ([event["kind"] for event in page["events"]], page["next"]) == (["JobSubmitted", "CheckpointSaved"], 5)
    page = ask(service, "GET", "/v1/events?job=a").json()
    assert ([event["sequence"] for event in page["events"]], page["next"]) == ([3, 5], 5)
    page = ask(service, "GET", "/v1/events?last=1&job=a").json()
    assert ([event["sequence"] for event in page["events"]], page["next"]) == ([5], 5)
    problem_of(ask(service, "GET", "/v1/events?job=nobody"), 404)


def test_one_who_knows_numbers_of_another_log_is_led_back(service):
    assert ask(service, "GET", "/v1/events?after=999").json() == {"events": [], "next": 2}


def test_a_poll_waits_for_news_of_its_job(service):
    submitted(service, "a")

    async def go() -> dict:
        transport = httpx.ASGITransport(create_app(service, TOKEN))
        async with httpx.AsyncClient(transport=transport, base_url=URL, headers=BEARER) as client:
            poll = asyncio.create_task(client.get("/v1/events?after=3&job=a&wait_s=30"))
            await asyncio.sleep(0.01)
            submitted(service, "b")  # wakes the poll, which does not care
            await asyncio.sleep(0.01)
            assert not poll.done()
            service.pause("a-2")
            return (await asyncio.wait_for(poll, PATIENCE_S)).json()

    page = asyncio.run(go())
    assert ([event["kind"] for event in page["events"]], page["next"]) == (["JobPaused"], 5)


def test_a_poll_ends_with_nothing_when_its_time_is_over_or_the_service_ends(service):
    assert ask(service, "GET", "/v1/events?after=2&wait_s=0.01").json() == {"events": [], "next": 2}

    async def at_once(after: int, timeout_s: float) -> None:
        pass

    service.wait_for_event = at_once
    assert ask(service, "GET", "/v1/events?after=2&wait_s=30").json() == {"events": [], "next": 2}


def test_the_service_is_ended(service):
    assert ask(service, "POST", "/v1/shutdown", json={"jobs": "stop"}).status_code == 202
    assert ask(service, "POST", "/v1/shutdown", json={"jobs": "leave"}).json()["status"] == "ending"
    assert service.ended_with == [True, False]
    assert problem_of(ask(service, "POST", "/v1/shutdown", json={"jobs": "now"}), 422)["faults"][0]["field"] == "jobs"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_while_it_recovers_it_answers_questions_and_takes_no_orders_but_the_last(service, route):
    submitted(service, "a")
    service.is_recovering = True
    service.log_files = (LogFile("r", "n0", 0, False, 0.0),)
    path = route.path.format(job="a", node="n0", replica="r")
    answer = ask(service, route.method, path, json={} if route.method == "POST" else None)
    if route.method == "GET":
        assert answer.status_code == 200
    elif route.name == "shutdown":
        assert answer.status_code in (202, 422)
    else:
        problem_of(answer, 503)
        assert answer.headers["retry-after"] == "1"
    assert len(service.log) == 3


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        ("wait=3", ["wait"]),
        ("after=x&limit=0&wait_s=31", ["after", "limit", "wait_s"]),
        ("after=1.5", ["after"]),
        ("after=-1", ["after"]),
        ("wait_s=nan", ["wait_s"]),
        ("wait_s=soon", ["wait_s"]),
        (f"after={'9' * 5000}", ["after"]),
        ("after=٣", ["after"]),
        ("after=1&after=2", ["after", "after"]),
    ],
)
def test_wrong_parameters_are_named_all_at_once(service, query, fields):
    faults = problem_of(ask(service, "GET", f"/v1/events?{query}"), 422)["faults"]
    assert [fault["field"] for fault in faults] == fields
    assert all(len(fault["value"]) <= 80 for fault in faults)


@pytest.mark.parametrize("query", ["all=yes", "phase=asleep", "everything=true"])
def test_wrong_filters_are_refused_rather_than_ignored(service, query):
    fault = problem_of(ask(service, "GET", f"/v1/jobs?{query}"), 422)["faults"][0]
    assert fault["field"] == query.partition("=")[0]
    assert fault["fix"]


def test_a_path_without_parameters_says_so(service):
    assert "takes none" in problem_of(ask(service, "GET", "/v1/cluster?x=1"), 422)["faults"][0]["fix"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b'{"retries": NaN}', 400),
        (b'{"name": "a", "name": "b"}', 400),
        (b"\xff\xfe{", 400),
        (b"[" * 200_000, 400),
        (b'{"retries": ' + b"9" * 5000 + b"}", 400),
        (b"{}", 422),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
    ids=["empty", "cut", "list", "text", "nan", "twice", "no text", "deep", "huge number", "no fields", "large"],
)
def test_a_body_that_cannot_be_used_is_refused(service, body, status):
    problem_of(ask(service, "POST", "/v1/jobs", content=body, headers=JSON), status)
    assert not service.scheduler.state.jobs


def test_a_body_that_hides_its_size_is_read_no_further_than_allowed(service):
    read = 0

    async def endless():
        nonlocal read
        while True:
            read += 1 << 16
            yield b" " * (1 << 16)

    problem_of(ask(service, "POST", "/v1/jobs", content=endless(), headers=JSON), 413)
    assert read < 2 * MAX_DRAINED_BYTES


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/yaml", ""])
def test_only_json_is_read(service, kind):
    headers = {**BEARER, "Content-Type": kind}
    problem_of(ask(service, "POST", "/v1/jobs", content=json.dumps(DOCUMENT), headers=headers), 415)


def test_the_type_may_name_its_letters(service):
    headers = {**BEARER, "Content-Type": "Application/JSON; charset=utf-8"}
    assert ask(service, "POST", "/v1/jobs", content=json.dumps(DOCUMENT), headers=headers).status_code == 201


def test_unknown_paths_and_methods_are_problems_too(service):
    problem_of(ask(service, "GET", "/"), 404)
    problem_of(ask(service, "GET", "/v1/jobs/"), 404)
    problem_of(ask(service, "GET", "/v1/jobs/a/b/c/d/e"), 404)
    answer = ask(service, "DELETE", "/v1/jobs")
    problem_of(answer, 405)
    assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Permanent("It is rigid."), 409),
        (InvalidSpec("min_gpus", 0, "must be at least 1", "Give more"), 422),
        (Temporary("Node n0 is away.", 2.5), 503),
    ],
)
def test_what_the_service_refuses_becomes_a_status(service, error, status):
    submitted(service, "a")
    service.refuses = error
    answer = ask(service, "POST", "/v1/jobs/a/pause")
    problem_of(answer, status)
    assert answer.headers.get("retry-after") == ("3" if status == 503 else None)


@pytest.mark.parametrize(
    "error", [ValueError("the secret inside"), InvalidDocument("x", "the secret inside", "p", "f")]
)
def test_what_nobody_expected_is_logged_and_not_told(service, caplog, error):
    submitted(service, "a")
    service.refuses = error
    with caplog.at_level(logging.ERROR):
        answer = ask(service, "POST", "/v1/jobs/a/pause")
    problem_of(answer, 500)
    assert "secret" not in answer.text
    assert caplog.records[0].exc_info is not None


def test_a_thousand_jobs_do_not_make_a_message_endless(service):
    submitted(service, *(f"job-with-a-long-name-{number}" for number in range(1000)))
    assert len(problem_of(ask(service, "GET", "/v1/jobs/nobody"), 404)["detail"]) <= 2000


def test_head_is_answered_like_get(service):
    assert ask(service, "HEAD", "/v1/cluster").status_code == 200


class TestRegistry:
    def test_what_is_exported_can_be_imported_elsewhere(self, service):
        service.hear(KindsImported(registry("net", "other").kinds))
        exported = ask(service, "GET", "/v1/kinds/export")
        assert loads(exported.content, ProfileRegistry).kinds == service.scheduler.state.pool.kinds
        elsewhere = FakeService()
        for jobs, query in ((3, ""), (6, ""), (3, "?replace=true")):
            answer = ask(elsewhere, "POST", f"/v1/kinds/import{query}", content=exported.content, headers=JSON)
            assert [(each["kind"], each["jobs"]) for each in answer.json()["kinds"]] == [("net", jobs), ("other", jobs)]
        assert ask(elsewhere, "GET", "/v1/kinds").json() == answer.json()
        assert ask(elsewhere, "GET", "/v1/events?last=1").json()["events"][0]["detail"]["kinds"] == {
            "net": 2,
            "other": 2,
        }

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"schema": 2}, "schema"),
            ({"type": "Profile"}, "type"),
            ({"body": {"kinds": {"net": {"num_jobs": -1}}}}, 'body.kinds["net"].num_jobs'),
            ({"body": {"kinds": {"net": {"profile": {"observations": {"t4": [[1]]}}}}}}, "body.kinds"),
            ({"body": {"kinds": {}, "more": 1}}, "body.more"),
            ({"more": 1}, "document"),
        ],
    )
    def test_what_is_no_registry_is_refused_and_changes_nothing(self, service, change, field):
        document = {**json.loads(dumps(registry())), **change}
        problem = problem_of(ask(service, "POST", "/v1/kinds/import", json=document), 422)
        assert problem["faults"][0]["field"].startswith(field)
        assert problem["faults"][0]["fix"]
        assert not service.scheduler.state.pool.kinds

    def test_a_registry_may_be_larger_than_other_bodies(self, service):
        padding = b" " * MAX_BODY_BYTES
        document = dumps(registry()).encode() + padding
        assert ask(service, "POST", "/v1/kinds/import", content=document, headers=JSON).status_code == 200
        document += b" " * MAX_REGISTRY_BYTES
        problem_of(ask(service, "POST", "/v1/kinds/import", content=document, headers=JSON), 413)
        service.is_recovering = True
        problem_of(ask(service, "POST", "/v1/kinds/import", json={}), 503)
