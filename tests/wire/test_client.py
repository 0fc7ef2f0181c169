import socket
import threading

import pytest

from pollux.errors import InvalidDocument, InvalidSpec, Permanent, Temporary
from pollux.wire.client import DEFAULT_PATH, ReportClient
from pollux.wire.entries import GuardFired
from pollux.wire.messages import MAX_MESSAGE_BYTES, AgentReport, unpack

from .receiver import Hang, answer, drip, raw, receiving
from .strategies import report_at, state_at

REPORT = report_at(5)
PATIENT_S = 60.0
HASTY_S = 0.1


def test_a_report_arrives_with_its_token():
    with receiving(answer(204)) as receiver:
        ReportClient(f"{receiver.url}/jobs/j?x=1", "s3cret", timeout_s=PATIENT_S).post(REPORT)
        request = receiver.next()
    assert request.path == "/jobs/j?x=1"
    assert request.headers["Authorization"] == "Bearer s3cret"
    assert request.headers["Content-Type"] == "application/json"
    assert unpack(request.body, AgentReport) == REPORT


def test_a_local_socket_will_do_and_the_path_has_a_default(tmp_path):
    with receiving(answer(200, b"{}"), path=tmp_path / "s") as receiver:
        client = ReportClient(receiver.url, timeout_s=PATIENT_S)
        client.post(REPORT)
        client.post(REPORT)
        requests = [receiver.next(), receiver.next()]
    assert {request.path for request in requests} == {DEFAULT_PATH}
    assert "Authorization" not in requests[0].headers
    assert unpack(requests[1].body, AgentReport) == REPORT


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_receiver_in_trouble_may_take_the_same_message_later(status):
    with receiving(answer(status)) as receiver, pytest.raises(Temporary, match=str(status)) as caught:
        ReportClient(receiver.url, timeout_s=PATIENT_S).post(REPORT)
    assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize(("said", "heard_s"), [("17", 17.0), ("0", 0.0), ("tomorrow", 1.0), ("9" * 400, 1.0)])
def test_advice_on_when_to_come_back_is_handed_on(said, heard_s):
    with receiving(answer(503, Retry_After=said)) as receiver, pytest.raises(Temporary) as caught:
        ReportClient(receiver.url, timeout_s=PATIENT_S).post(REPORT)
    assert caught.value.retry_after_s == heard_s


@pytest.mark.parametrize("status", [301, 307, 401, 403, 404, 405, 409, 410])
def test_a_receiver_that_knows_no_such_job_is_not_asked_again(status):
    behaviour = answer(status, b"no  such\njob", Location="http://127.0.0.1:1/")
    with receiving(behaviour) as receiver, pytest.raises(Permanent, match=f"{status} .*no such job"):
        ReportClient(receiver.url, "s3cret", timeout_s=PATIENT_S).post(REPORT)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_message_that_will_not_do_says_nothing_about_the_next(status):
    with receiving(answer(status)) as receiver, pytest.raises(InvalidDocument, match=str(status)) as caught:
        ReportClient(receiver.url, timeout_s=PATIENT_S).post(REPORT)
    assert caught.value.value == "AgentReport"


@pytest.mark.parametrize(
    "text",
    [b"", b"\0\xff\xfe", b"nonsense\r\n\r\n", b"HTTP/1.1 abc no\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200],
)
def test_an_answer_that_is_not_http_is_a_failure_that_may_pass(text):
    with receiving(raw(text)) as receiver, pytest.raises(Temporary):
        ReportClient(receiver.url, timeout_s=PATIENT_S).post(REPORT)


def test_a_refusal_counts_although_its_text_is_cut_off():
    with receiving(raw(b"HTTP/1.1 401 No\r\nContent-Length: 900\r\n\r\nbad to")) as receiver, pytest.raises(Permanent):
        ReportClient(receiver.url, timeout_s=PATIENT_S).post(REPORT)


def test_a_refusal_is_quoted_on_one_short_line():
    text = b"HTTP/1.1 404 \x1b[31m" + b"x" * 9000 + b"\r\nContent-Length: 3\r\n\r\n\n\0y"
    with receiving(raw(text)) as receiver, pytest.raises(Permanent) as caught:
        ReportClient(receiver.url, timeout_s=PATIENT_S).post(REPORT)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_long_answer_is_not_read_to_its_end():
    endless = threading.Event()

    def behave(handler):
        handler.wfile.write(b"HTTP/1.1 404 No\r\n\r\n")
        try:
            while True:
                handler.wfile.write(b"x" * 65536)
        except OSError:
            endless.set()

    with receiving(behave) as receiver:
        with pytest.raises(Permanent) as caught:
            ReportClient(receiver.url, timeout_s=PATIENT_S).post(REPORT)
        assert endless.wait(PATIENT_S)
    assert len(str(caught.value)) < 400


def test_a_receiver_that_hangs_is_left():
    release = threading.Event()
    with receiving(Hang(release)) as receiver:
        with pytest.raises(Temporary, match="timed out"):
            ReportClient(receiver.url, timeout_s=HASTY_S).post(REPORT)
        release.set()


def test_a_receiver_that_never_accepts_is_left():
    with socket.create_server(("127.0.0.1", 0)) as nobody, pytest.raises(Temporary, match="timed out"):
        ReportClient(f"http://127.0.0.1:{nobody.getsockname()[1]}", timeout_s=HASTY_S).post(REPORT)


def test_an_answer_that_drips_in_for_ever_is_left():
    with receiving(drip) as receiver, pytest.raises(Temporary, match="timed out"):
        ReportClient(receiver.url, timeout_s=HASTY_S).post(REPORT)


def test_nobody_there_is_a_failure_that_may_pass(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", f"unix:{tmp_path}/s"):
        with pytest.raises(Temporary):
            ReportClient(url, timeout_s=PATIENT_S).post(REPORT)


def test_what_is_too_large_is_not_sent():
    many = tuple(GuardFired(0.0, state_at(0), "x" * 5000) for _ in range(MAX_MESSAGE_BYTES // 5000))
    with receiving(answer(204)) as receiver:
        with pytest.raises(InvalidDocument, match="larger than"):
            ReportClient(receiver.url, timeout_s=PATIENT_S).post(report_at(1, notices=many))
        assert receiver.requests.empty()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:80",
        "https://host/",
        "ftp://host/",
        "http://",
        "http://host:port/",
        "http://host:99999/",
        "http://[::1/",
        "http://ho st/",
        "http://host/a b",
        "http://host/\r\nX-A: b",
        f"http://{'a' * 64}.example/",
        "http://user:w0rd@host/",
        "http://user:w0rd@host:99999/",
        "http://host/#part",
        "unix:",
        "unix:relative",
        "unix:/a\0b",
        f"unix:/{'a' * 200}",
    ],
)
def test_an_address_that_cannot_work_is_refused_at_once(url):
    with pytest.raises(InvalidSpec) as caught:
        ReportClient(url)
    assert caught.value.field == "url"
    assert "w0rd" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "s3cret\r\nX-A: b", "s3cret s3cret", "s3crét"])
def test_a_bad_token_is_refused_and_not_quoted(token):
    with pytest.raises(InvalidSpec) as caught:
        ReportClient("http://host/", token)
    assert caught.value.field == "token"
    assert "s3c" not in str(caught.value)
