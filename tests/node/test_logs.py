"""Logs of replicas, read part by part and removed when they are old."""

import os
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import Allocation, JobId
from pollux.errors import InvalidSpec, Permanent
from pollux.node.folder import StateFolder
from pollux.node.logs import MAX_PART_BYTES, list_logs, read_log, remove_old
from pollux.wire.messages import pack
from pollux.wire.nodes import ListLogs, ListRuns, LogPart, ReadLog, RunJob, RunPhase

from .daemons import Node, launch, short_folder, until

DAY_S = 86400.0


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path


@pytest.fixture
def state(folder):
    return StateFolder(folder / "a")


@pytest.fixture
def node(folder):
    node = Node(folder / "a").start()
    yield node
    node.end()


def write(state, content, replica="1-1", job="j"):
    path = state.replica_log(JobId(job), replica)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(state, replica="1-1", offset=0, limit=1 << 16, is_running=False):
    return read_log(state, "a", ReadLog("j", replica, offset, limit), is_running=is_running)


class TestParts:
    def test_offsets_are_bytes_and_lead_from_part_to_part(self, state):
        write(state, "aé\nb")
        assert read(state, limit=4) == LogPart("aé\n", 4)
        assert read(state, offset=4) == LogPart("b", 5)
        assert read(state, offset=5) == LogPart("", 5)
        assert read(state, offset=99) == LogPart("", 5)

    def test_a_negative_offset_counts_from_the_end(self, state):
        write(state, "first\nlast\n")
        assert read(state, offset=-5) == LogPart("last\n", 11)
        assert read(state, offset=-99) == LogPart("first\nlast\n", 11)

    def test_what_begins_within_a_letter_begins_with_the_next(self, state):
        write(state, "a\N{GRINNING FACE}b")
        for offset in (2, 3, 4, -2, -3, -4):
            assert read(state, offset=offset) == LogPart("b", 6)
        assert read(state, offset=1) == LogPart("\N{GRINNING FACE}b", 6)

    def test_a_letter_that_is_being_written_is_waited_for(self, state):
        path = write(state, b"a\xf0\x9f")
        assert read(state, is_running=True) == LogPart("a", 1)
        path.write_bytes(b"a\xf0\x9f\x98\x80")
        assert read(state, offset=1, is_running=True) == LogPart("\N{GRINNING FACE}", 5)

    def test_nobody_waits_for_a_replica_that_has_ended(self, state):
        write(state, b"a\xf0\x9f")
        assert read(state) == LogPart("a\ufffd", 3)

    def test_a_part_has_a_mebibyte_at_most_and_a_letter_at_least(self, state):
        write(state, "x" * (MAX_PART_BYTES + 5))
        assert read(state, limit=10**9).next_offset == MAX_PART_BYTES
        write(state, "\N{GRINNING FACE}" * 2)
        assert read(state, limit=-1) == LogPart("\N{GRINNING FACE}", 4)

    @pytest.mark.parametrize("byte", [b"\0", b"\xff", b"\x80"])
    def test_what_is_no_text_still_fits_into_a_message(self, state, byte):
        write(state, byte * MAX_PART_BYTES)
        part = read(state, limit=MAX_PART_BYTES)
        assert part.next_offset >= MAX_PART_BYTES // 4
        assert len(pack(part)) < 4 * MAX_PART_BYTES

    @given(st.text(max_size=30), st.integers(1, 9))
    def test_all_parts_together_are_the_log(self, text, limit):
        with short_folder() as path:
            state = StateFolder(path)
            size = len(write(state, text.encode("utf-8", "replace")).read_bytes())
            parts, offset = [], 0
            while offset < size:
                part = read(state, offset=offset, limit=limit, is_running=True)
                assert part.next_offset > offset
                parts.append(part.text)
                offset = part.next_offset
            assert "".join(parts).encode() == state.replica_log(JobId("j"), "1-1").read_bytes()

    def test_one_that_is_just_being_started_has_said_nothing_yet(self, state):
        assert read(state, is_running=True) == LogPart("", 0)
        with pytest.raises(Permanent, match="Replica 1-1 of job j has no log on node a"):
            read(state)

    @pytest.mark.parametrize(("job", "replica"), [("..", "1-1"), ("j", "../run"), ("j", ""), ("a/b", "1-1")])
    def test_odd_names_are_refused(self, state, job, replica):
        with pytest.raises(InvalidSpec, match="cannot be the name of a file"):
            read_log(state, "a", ReadLog(job, replica), is_running=False)


class TestDaemon:
    def test_logs_are_listed_and_read_also_after_the_end_of_the_job(self, node, folder):
        node.ask(RunJob("j", 1, launch(folder), Allocation.of({"a": 1})))
        node.living(1)
        until(lambda: node.ask(ListLogs("j")).logs)
        (log,) = node.ask(ListLogs("j")).logs
        assert (log.replica, log.is_running) == ("1-1", True)
        node.keeper.end("j/1-1")
        until(lambda: node.ask(ListRuns()).runs[0].phase is RunPhase.ENDED)
        (log,) = node.ask(ListLogs("j")).logs
        assert (log.replica, log.is_running) == ("1-1", False)
        part = node.ask(ReadLog("j", "1-1"))
        assert part.text.startswith("first\nsecond\n")
        assert part.next_offset == log.size
        assert time.time() - 600 < log.modified_at_s < time.time() + 600

    def test_what_is_not_there_is_refused(self, node):
        assert node.ask(ListLogs("unknown")).logs == ()
        with pytest.raises(Permanent, match="has no log on node a"):
            node.ask(ReadLog("unknown", "1-1"))
        for request in (ListLogs(".."), ReadLog("j", "../../token"), ReadLog("../..", "x")):
            with pytest.raises(Permanent, match="cannot be the name of a file"):
                node.ask(request)

    def test_they_come_in_the_order_of_their_replicas(self, state):
        for replica in ("10-12", "2-3", "10-4", "odd"):
            write(state, "x", replica)
        assert [log.replica for log in list_logs(state, JobId("j"), {"2-3"}).logs] == ["odd", "2-3", "10-4", "10-12"]


class TestOldOnes:
    def test_jobs_that_ended_long_ago_are_removed(self, state):
        long_ago = {job: write(state, "x", job=job) for job in ("old", "wanted", "renewed")}
        for job in long_ago:
            age(state.job(JobId(job)), 31)
        write(state, "y", "2-2", "renewed")
        write(state, "y", job="new")
        removed = list(remove_old(state, time.time() - 30 * DAY_S, lambda job: job == "wanted"))
        assert removed == ["old"]
        assert list(state.jobs()) == ["new", "renewed", "wanted"]
        assert long_ago["renewed"].exists()

    @pytest.mark.parametrize("days", [0.5, 31])
    def test_a_daemon_removes_them_as_it_starts(self, node, folder, days):
        node.options = replace(node.options, keep_logs_s=0.25 * DAY_S)
        for job in ("j", "k"):
            node.ask(RunJob(job, 1, launch(folder, job), Allocation.of({"a": 1})))
            node.living(1, job)
        node.keeper.end("k/1-1")
        until(lambda: {run.job for run in node.ask(ListRuns()).runs if run.phase is RunPhase.ENDED} == {"k"})
        node.stop()
        for job in ("j", "k"):
            age(node.folder / "jobs" / job, days)
        node.start()
        until(lambda: not (node.folder / "jobs" / "k").exists())
        until(lambda: [run.job for run in node.ask(ListRuns()).runs] == ["j"])
        assert node.ask(ReadLog("j", "1-1")).text


def age(folder, days):
    then_s = time.time() - days * DAY_S
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then_s, then_s))
