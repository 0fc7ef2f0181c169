import logging
import queue
import socket
import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wire.receiver import PATIENCE_S, Hang, Receiver, answer, raw, receiving
from tests.wire.strategies import entry_at, report_at

from pollux.agent.reporter import Reporter
from pollux.errors import InvalidDocument, Permanent, Temporary
from pollux.wire.client import ReportClient
from pollux.wire.messages import AgentReport, unpack


def reporter_to(receiver, **options) -> Reporter:
    return Reporter(ReportClient(receiver.url, "t", timeout_s=PATIENCE_S).post, **options)


def step_of(request) -> int:
    return unpack(request.body, AgentReport).state.step


class Script:
    """A `post` that does one scripted thing after the other and then takes everything; and a `pause` that is over."""

    def __init__(self, *outcomes):
        self._outcomes = deque(outcomes)
        self.taken: queue.Queue[AgentReport] = queue.Queue()
        self.pauses: list[float] = []

    def post(self, report):
        if self._outcomes:
            outcome = self._outcomes.popleft()
            if isinstance(outcome, Exception):
                raise outcome
            outcome()
        self.taken.put(report)

    def pause(self, seconds):
        self.pauses.append(seconds)

    def next(self) -> AgentReport:
        return self.taken.get(timeout=PATIENCE_S)


def test_a_report_arrives_with_the_notices_before_it():
    with receiving(answer(204)) as receiver:
        reporter = reporter_to(receiver)
        reporter.note(entry_at(1))
        reporter.send(report_at(2, notices=(entry_at(2),)))
        first = unpack(receiver.next().body, AgentReport)
        reporter.close(PATIENCE_S)
    assert first == report_at(2, notices=(entry_at(1), entry_at(2)))


def test_without_a_receiver_there_is_no_thread_and_nothing_is_kept():
    before = threading.active_count()
    reporter = Reporter(None)
    assert threading.active_count() == before
    assert reporter.is_silent
    reporter.note(entry_at(1))
    reporter.send(report_at(1))
    reporter.close(PATIENCE_S)
    assert reporter.notices_dropped == 0


def test_sending_goes_on_while_the_receiver_hangs_and_the_newest_report_wins():
    release = threading.Event()
    with receiving(Hang(release)) as receiver:
        reporter = reporter_to(receiver)
        reporter.send(report_at(0))
        assert step_of(receiver.next()) == 0
        for step in range(1, 1001):
            reporter.send(report_at(step))
            reporter.note(entry_at(step))
        # All of these calls have come back, and the receiver has still not answered the first.
        assert not release.is_set()
        assert receiver.requests.empty()
        release.set()
        last = unpack(receiver.next().body, AgentReport)
        reporter.close(PATIENCE_S)
        assert receiver.requests.empty()
    assert last.state.step == 1000
    assert [notice.state.step for notice in last.notices] == list(range(1000 - 255, 1001))
    assert last.notices_dropped == reporter.notices_dropped == 1000 - 256


def test_closing_does_not_wait_for_a_receiver_that_hangs():
    release = threading.Event()
    with receiving(Hang(release)) as receiver:
        reporter = reporter_to(receiver)
        reporter.send(report_at(0))
        receiver.next()
        reporter.close(0.0)
        assert not release.is_set()
        assert reporter.is_silent
        reporter.send(report_at(1))
        release.set()
        reporter.close(PATIENCE_S)
        assert receiver.requests.empty()


def test_what_waits_is_sent_at_the_close():
    script = Script()
    release = threading.Event()
    script._outcomes.append(lambda: release.wait(PATIENCE_S))
    reporter = Reporter(script.post)
    reporter.send(report_at(1))
    reporter.note(entry_at(2))
    closer = threading.Thread(target=reporter.close, args=(PATIENCE_S,))
    closer.start()
    release.set()
    closer.join()
    found = list(script.taken.queue)
    assert found[-1].state.step == 1
    assert [notice for report in found for notice in report.notices] == [entry_at(2)]


def test_a_close_ends_a_long_pause_and_tries_again():
    paused = threading.Event()
    script = Script(Temporary("The receiver is away.", 1e9), Temporary("It still is.", 1e9))
    reporter = None

    def pause(seconds):
        assert seconds == 60.0
        paused.set()
        reporter._closing.wait(PATIENCE_S)

    reporter = Reporter(script.post, pause=pause)
    reporter.send(report_at(1))
    assert paused.wait(PATIENCE_S)
    reporter.close(PATIENCE_S)
    assert not script._outcomes
    assert not reporter._thread.is_alive()
    assert script.next() == report_at(1)


def test_a_close_tries_as_long_as_it_may(caplog):
    script = Script(*[Temporary("There is no connection yet.", 60.0)] * 3)
    reporter = Reporter(script.post, pause=script.pause)
    reporter.note(entry_at(1))
    reporter.send(report_at(1))
    reporter.close(PATIENCE_S)
    assert script.next() == report_at(1, notices=(entry_at(1),))
    assert not reporter._thread.is_alive()
    assert "did not arrive" not in caplog.text


def test_what_a_close_cannot_deliver_is_said(caplog):
    def post(report):
        raise Temporary("There is no connection.", 60.0)

    reporter = Reporter(post)
    reporter.send(report_at(1))
    reporter.close(0.2)
    reporter._thread.join(PATIENCE_S)
    assert "The last report of job j did not arrive. There is no connection." in caplog.text


def test_the_real_pause_ends_with_the_close():
    tried = threading.Event()

    def fail():
        tried.set()
        raise Temporary("The receiver is away.", 1e9)

    script = Script(fail)
    reporter = Reporter(script.post)
    reporter.send(report_at(1))
    assert tried.wait(PATIENCE_S)
    reporter.close(PATIENCE_S)
    assert not reporter._thread.is_alive()


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_success(caplog):
    caplog.set_level(logging.INFO)
    away = [Temporary("The receiver is away.", 0.0) for _ in range(9)]
    script = Script(*away[:8], lambda: None, away[8])
    reporter = Reporter(script.post, pause=script.pause)
    reporter.send(report_at(1))
    assert script.next().state.step == 1
    assert script.pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    reporter.send(report_at(2))
    script.next()
    reporter.close(PATIENCE_S)
    assert script.pauses[8:] == [1]
    levels = [record.levelname for record in caplog.records if record.name == "pollux.agent.reporter"]
    assert levels == ["WARNING", "INFO"] * 2


@pytest.mark.parametrize(("advised_s", "waited_s"), [(0.2, 1.0), (5.0, 5.0), (3600.0, 60.0)])
def test_advice_on_when_to_come_back_is_followed_within_reason(advised_s, waited_s):
    script = Script(Temporary("The receiver is busy.", advised_s))
    reporter = Reporter(script.post, pause=script.pause)
    reporter.send(report_at(1))
    script.next()
    reporter.close(PATIENCE_S)
    assert script.pauses == [waited_s]


def test_a_receiver_that_comes_up_later_gets_everything():
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    receivers = []

    def pause(_seconds):
        if not receivers:
            reporter.note(entry_at(2))
            reporter.send(report_at(3))
            receivers.append(Receiver(answer(200), port=port))

    client = ReportClient(f"http://127.0.0.1:{port}", timeout_s=PATIENCE_S)
    reporter = Reporter(client.post, pause=pause)
    reporter.note(entry_at(1))
    reporter.send(report_at(1))
    try:
        while not receivers:
            threading.Event().wait(0.001)
        report = unpack(receivers[0].next().body, AgentReport)
        reporter.close(PATIENCE_S)
    finally:
        for receiver in receivers:
            receiver.close()
    assert report == report_at(3, notices=(entry_at(1), entry_at(2)))


@pytest.mark.parametrize("behaviour", [answer(500), raw(b""), raw(b"\0\xff\r\n\r\n")], ids=["500", "closes", "garbage"])
def test_a_receiver_in_trouble_is_asked_again(behaviour):
    with receiving(behaviour) as receiver:

        def pause(_seconds):
            receiver.behave = answer(204)

        reporter = reporter_to(receiver, pause=pause)
        reporter.send(report_at(1))
        assert [step_of(receiver.next()), step_of(receiver.next())] == [1, 1]
        reporter.close(PATIENCE_S)
        assert receiver.requests.empty()


@pytest.mark.parametrize("status", [401, 404, 410])
def test_after_a_refusal_for_good_it_falls_silent_with_one_warning(status, caplog):
    with receiving(answer(status)) as receiver:
        reporter = reporter_to(receiver)
        reporter.send(report_at(1))
        receiver.next()
        reporter._thread.join(PATIENCE_S)
        assert reporter.is_silent
        for step in range(10):
            reporter.note(entry_at(step))
            reporter.send(report_at(step))
        reporter.close(PATIENCE_S)
        assert receiver.requests.empty()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(status) in caplog.text
    assert not reporter._notices


@pytest.mark.parametrize(
    "error", [InvalidDocument("message", "AgentReport", "is refused", "Send less"), ZeroDivisionError("a bug")]
)
def test_a_report_that_is_refused_is_given_up_and_the_next_one_goes_out(error, caplog):
    tried = threading.Event()

    def fail():
        tried.set()
        raise error

    script = Script(fail, fail)
    reporter = Reporter(script.post, pause=script.pause)
    reporter.send(report_at(1, notices=(entry_at(1),)))
    assert tried.wait(PATIENCE_S)
    tried.clear()
    reporter.send(report_at(2))
    assert tried.wait(PATIENCE_S)
    reporter.send(report_at(3))
    report = script.next()
    reporter.close(PATIENCE_S)
    assert report == report_at(3, notices_dropped=1)
    assert script.pauses == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (caplog.records[0].exc_info is not None) == isinstance(error, ZeroDivisionError)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["note", "send", "ok", "away", "refused"]), max_size=60),
    st.integers(1, 5),
)
def test_every_notice_is_delivered_once_in_order_or_counted_as_dropped(script, room):
    outcomes = deque(word for word in script if word in ("ok", "away", "refused"))
    delivered, most, is_ending = [], [0], threading.Event()

    def post(report):
        outcome = outcomes.popleft() if outcomes and not is_ending.is_set() else "ok"
        if outcome == "away":
            raise Temporary("The receiver is away.", 0.0)
        if outcome == "refused":
            raise InvalidDocument("message", "AgentReport", "is refused", "Send less")
        delivered.extend(notice.state.step for notice in report.notices)
        most.append(len(report.notices))

    reporter = Reporter(post, max_notices=room, pause=lambda _seconds: None)
    noted = 0
    for word in [*script, "send"]:
        if word == "note":
            reporter.note(entry_at(noted))
            noted += 1
        elif word == "send":
            reporter.send(report_at(noted))
    is_ending.set()
    reporter.close(PATIENCE_S)
    assert not reporter._thread.is_alive()
    assert max(most) <= room
    assert delivered == sorted(set(delivered))
    assert len(delivered) + reporter.notices_dropped == noted


def test_a_refusal_frees_what_was_kept():
    script = Script(Permanent("The job is gone."))
    reporter = Reporter(script.post)
    reporter.send(report_at(1, notices=(entry_at(1),)))
    reporter._thread.join(PATIENCE_S)
    assert (reporter._report, list(reporter._notices)) == (None, [])
