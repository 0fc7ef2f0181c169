"""The client against the real application in a real server, on a port of loopback."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import uvicorn
from tests.service.fake_service import TOKEN, FakeService
from tests.wire.strategies import entry_at

from pollux.core import JobSpec, JobSubmitted, Phase
from pollux.errors import InvalidDocument, InvalidSpec, Permanent, Refusal, Temporary
from pollux.service.rest import create_app
from pollux.service.routes import NEXT_OFFSET, ROUTES
from pollux.wire import service_client
from pollux.wire.api import LogFile
from pollux.wire.service_client import ServiceClient

PATIENCE_S = 60.0
DOCUMENT = {"command": ["python", "train.py"], "working_dir": "/work", "max_gpus": 4}


class Running:
    """A service in a thread of its own; `do` runs something in its loop."""

    def __init__(self, port: int = 0) -> None:
        self.service = FakeService()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = create_app(self.service, TOKEN)
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, timeout_keep_alive=60, timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve([self._listener]))
        self._loop.close()

    def do(self, call: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(call)

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._listener.close()


@contextlib.contextmanager
def running(port: int = 0) -> Iterator[Running]:
    server = Running(port)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def client(shared) -> Iterator[ServiceClient]:
    with ServiceClient(shared.url, TOKEN, timeout_s=PATIENCE_S) as made:
        yield made


@contextlib.contextmanager
def answering(behave: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Somebody else's server, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            behave(self)

        do_POST = do_GET  # noqa: N815 - the name is http.server's

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()


def reply(status: int, body: bytes, kind: str = "application/json") -> Callable[[BaseHTTPRequestHandler], None]:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_job_lives_its_life(client, shared):
    assert client.health().status == "ok"
    assert client.submit(DOCUMENT, dry_run=True).id == ""
    job = client.submit({**DOCUMENT, "name": "train"})
    assert job.phase is Phase.PENDING
    assert client.job("train").command == ("python", "train.py")
    assert [each.id for each in client.jobs().jobs] == [job.id]
    assert client.pause(job.id).phase is Phase.PAUSED
    assert client.resume(job.id).phase is Phase.PENDING
    scaled = client.scale(job.id, 2, None)
    assert (scaled.min_gpus, scaled.max_gpus) == (2, None)
    assert client.cancel(job.id).phase is Phase.CANCELLED
    assert client.jobs().jobs == ()
    assert [each.id for each in client.jobs(all=True, team="", phase="cancelled").jobs] == [job.id]


def test_the_cluster_is_read_and_drained(client):
    assert client.cluster().free_gpus == 4
    assert client.drain("n0").nodes[0].state == "drained"
    assert client.undrain("n0").nodes[0].state == "ready"


def test_schemas_are_read(client):
    assert client.openapi()["openapi"] == "3.1.0"
    assert client.job_schema()["type"] == "object"


def test_logs_are_read_in_parts(client, shared):
    shared.service.hear(JobSubmitted(JobSpec("talker")))
    shared.service.log_files = (LogFile("r 1/2", "n0", 12, True, 5.0),)
    shared.service.printed = "Grüße, Welt".encode()
    assert client.logs("talker").logs == shared.service.log_files
    with pytest.raises(Refusal, match="no such name"):
        client.read_log("talker", "n0", "other")
    shared.service.log_files = (LogFile("r 1", "n0", 12, True, 5.0),)
    part = client.read_log("talker", "n0", "r 1", limit=7)
    assert (part.text, part.next_offset) == ("Grüße", 7)
    assert client.read_log("talker", "n0", "r 1", part.next_offset).text == ", Welt"
    assert client.read_log("talker", "n0", "r 1", -4).text == "Welt"


def test_a_poll_is_woken_by_what_happens(client, shared):
    last = client.events(last=1).next
    threading.Timer(0.05, shared.do, [lambda: shared.service.log.note(1.0, entry_at(5), "j")]).start()
    page = client.events(last, wait_s=30.0)
    assert [event.kind for event in page.events] == ["CheckpointSaved"]
    assert page.events[0].detail["checkpoint"] == "checkpoints/5"
    assert client.events(page.next, job=None, limit=1).events == ()


def test_a_refusal_carries_every_fault(client):
    with pytest.raises(Refusal) as caught:
        client.submit({"command": "python train.py", "min_gpus": 0, "nonsense": 1})
    assert caught.value.status == 422
    assert {"min_gpus", "nonsense", "working_dir"} <= {fault.field for fault in caught.value.faults}
    assert "nonsense" in str(caught.value)


def test_a_wrong_token_is_told_without_the_token(shared):
    with pytest.raises(Refusal) as caught:
        ServiceClient(shared.url, "wr0ng-token").cluster()
    assert caught.value.status == 401
    assert "wr0ng" not in str(caught.value)
    with ServiceClient(shared.url) as anybody:
        assert anybody.health().version


def test_a_service_that_recovers_is_to_be_asked_again(client, shared):
    shared.service.is_recovering = True
    try:
        assert client.health().status == "recovering"
        with pytest.raises(Temporary) as caught:
            client.submit(DOCUMENT)
        assert caught.value.retry_after_s == 1.0
    finally:
        shared.service.is_recovering = False


def test_a_connection_is_used_again(client):
    client.health()
    kept = client._kept.sock
    assert kept is not None
    client.cluster()
    assert client._kept.sock is kept
    client.drain("n0")
    client.undrain("n0")
    client.health()
    assert client._kept.sock is kept


def test_a_restart_of_the_service_is_survived():
    with running() as first:
        client = ServiceClient(first.url, TOKEN, timeout_s=PATIENCE_S)
        client.cluster()
    with pytest.raises(Temporary, match="does not answer"):
        client.cluster()
    with running(first.port):
        assert client.cluster().free_gpus == 4
        before = client._kept.sock
    with running(first.port):
        assert client.cluster().free_gpus == 4  # nothing in between has told it that its connection is gone
        assert client._kept.sock is not before
        assert client.drain("n0").free_gpus == 2
        client.close()


def test_an_order_is_sent_once_and_a_question_asked_again_only_on_a_connection_that_was_good_before():
    requests = []

    def drop(handler: BaseHTTPRequestHandler) -> None:
        requests.append(handler.command)
        handler.close_connection = True

    with answering(drop) as url, ServiceClient(url, TOKEN, timeout_s=PATIENCE_S) as client:
        with pytest.raises(Temporary):
            client.cancel("j")
        with pytest.raises(Temporary):
            client.cluster()
    assert requests == ["POST", "GET"]


def test_nobody_there_is_temporary_and_says_where():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Temporary, match=url):
        ServiceClient(url, TOKEN).health()
    with pytest.raises(Temporary, match=url):
        ServiceClient(url, TOKEN).pause("j")


def test_one_who_never_answers_is_temporary():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = ServiceClient(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, timeout_s=0.05)
        with pytest.raises(Temporary, match="does not answer"):
            client.cluster()
        client.close()


def test_a_poll_may_take_longer_than_the_timeout():
    def slow(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        reply(200, b'{"events": [], "next": 7}')(handler)

    with answering(slow) as url, ServiceClient(url, TOKEN, timeout_s=0.1) as client:
        assert client.events(wait_s=PATIENCE_S).next == 7


@pytest.mark.parametrize(
    "behave",
    [
        reply(200, b"<html>"),
        reply(200, b"[]"),
        reply(200, b"{}"),
        reply(200, b'{"status": 1, "version": "1"}'),
        reply(404, b"<html>", "text/html"),
        reply(302, b"", "text/html"),
        reply(500, b"{}", "application/problem+json"),
    ],
    ids=["no json", "list", "empty", "wrong type", "not found", "elsewhere", "no problem"],
)
def test_somebody_else_at_that_address_is_known(behave):
    with (
        answering(behave) as url,
        ServiceClient(url, TOKEN, timeout_s=PATIENCE_S) as client,
        pytest.raises(Permanent, match="no Pollux service"),
    ):
        client.health()


def test_an_answer_is_not_read_without_end(monkeypatch):
    monkeypatch.setattr(service_client, "MAX_ANSWER_BYTES", 100)
    with answering(reply(200, b" " * 200)) as url, ServiceClient(url) as client, pytest.raises(Permanent, match="100"):
        client.health()


def test_an_answer_of_a_newer_service_is_read():
    body = json.dumps({"status": "ok", "version": "9", "mood": {"good": True}}).encode()
    with answering(reply(200, body)) as url, ServiceClient(url, timeout_s=PATIENCE_S) as client:
        assert client.health().version == "9"


def test_proxies_of_the_environment_are_not_used(client, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert client.health().status == "ok"


def test_a_prefix_of_the_address_is_kept(shared):
    with ServiceClient(f"{shared.url}/pollux/", TOKEN) as behind, pytest.raises(Refusal) as caught:
        behind.health()
    assert caught.value.status == 404


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:7333", "ftp://h", "http://", "http://h:99999", "http://h/?q", "http://h x"]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(InvalidSpec, match="url"):
        ServiceClient(url, TOKEN)


def test_secrets_are_not_repeated():
    with pytest.raises(InvalidSpec) as caught:
        ServiceClient("http://user:hush@h", TOKEN)
    assert "hush" not in str(caught.value)
    with pytest.raises(InvalidSpec) as caught:
        ServiceClient("http://h", "hush\n")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_would_be_another_path_is_refused(client, name):
    with pytest.raises(InvalidSpec):
        client.job(name)


@pytest.mark.parametrize("name", ["a/b", "a?b", "a b", "ä", "../health", "%2e"])
def test_strange_names_stay_names(client, name):
    with pytest.raises(Refusal) as caught:
        client.job(name)
    assert caught.value.status == 404


def test_a_document_that_is_no_json_is_refused_before_it_is_sent(client):
    with pytest.raises(InvalidDocument):
        client.submit({"command": object()})
    with pytest.raises(InvalidDocument):
        client.submit({"deadline": float("nan")})


def test_the_service_is_asked_to_end():
    with running() as server, ServiceClient(server.url, TOKEN) as client:
        assert client.shutdown("stop").status == "ending"
        assert client.health().status == "ending"
        assert server.service.ended_with == [True]


def test_there_is_a_method_for_every_route():
    methods = {name for name in vars(ServiceClient) if not name.startswith("_")}
    renamed = {"submit_job": "submit", "list_jobs": "jobs", "list_logs": "logs", "list_kinds": "kinds"}
    wanted = {renamed.get(route.name, route.name.removesuffix("_job").removesuffix("_node")) for route in ROUTES}
    assert methods - wanted == {"close"}
    assert wanted <= methods
    assert service_client.NEXT_OFFSET == NEXT_OFFSET
