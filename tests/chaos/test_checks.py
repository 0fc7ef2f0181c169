"""The checks of a campaign, on made-up jobs: each of them finds what it is there for, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.views import SUCCEEDED

from pollux.core import Phase
from pollux.testing.chaos.bed import Record, Sent
from pollux.testing.chaos.checks import Truth, check_ids, check_job
from pollux.testing.chaos.jobs import FOR_EVER, Ticket
from pollux.testing.chaos.processes import Process, Role
from pollux.testing.chaos.violations import Kind
from pollux.wire.api import JobView

FAILED = replace(SUCCEEDED, phase=Phase.FAILED, failures=1)


@pytest.fixture
def record() -> Record:
    return Record()


class Job:
    """A ticket, and lines that its processes might have written."""

    def __init__(self, folder: Path, record: Record, kind: str = "works", retries: int = 0) -> None:
        self.ticket = Ticket("000-works", kind, {}, folder, 0, retries, "works-1")
        self._record = record
        self._runs = 0

    def ran(self, at_s: float, *lines: dict[str, Any], is_killed: bool = False) -> Job:
        """A process with these lines after its first, a second apart; its pid counts the runs."""
        self._runs += 1
        first = {"what": "started", "pid": self._runs, "began": 7}
        written = [{**line, "at": at_s + number} for number, line in enumerate((first, *lines))]
        self.ticket.folder.mkdir(exist_ok=True)
        path = self.ticket.folder / f"{self._runs}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in written) + '{"half of a li')
        if is_killed:
            self._record.note(Process(self._runs, 7, Role.REPLICA, ""), 9)
        return self

    def found(self, view: JobView | None, seen: JobView | None = None, *, has_witnesses: bool = True) -> list[Kind]:
        truth = Truth(self._record, has_witnesses=has_witnesses, was_full=False)
        return [one.kind for one in check_job(self.ticket, view, seen, truth)]


@pytest.fixture
def job(tmp_path: Path, record: Record) -> Job:
    return Job(tmp_path / "w", record)


def finished(code: int, **facts: float) -> dict[str, Any]:
    return {"what": "finished", "code": code, **facts}


BEAT = {"what": "beat"}
STEP = {"what": "step", "step": 1}
ENDED = {"what": "ended"}
WRONG = [Kind.WRONG_OUTCOME]


# Plain commands


def test_a_job_that_did_what_the_service_says_is_well(job: Job) -> None:
    assert job.ran(1.0, BEAT, finished(0)).found(SUCCEEDED) == []


def test_a_job_that_nobody_knows_or_that_never_ends_is_lost(job: Job) -> None:
    assert job.found(None) == [Kind.LOST_JOB]
    assert job.found(replace(SUCCEEDED, phase=Phase.RUNNING)) == [Kind.LOST_JOB]


def test_a_job_whose_end_was_told_may_be_forgotten_with_the_log(job: Job) -> None:
    assert job.ran(1.0, finished(0)).found(None, SUCCEEDED) == []


def test_two_jobs_with_one_id_are_found(job: Job) -> None:
    assert list(check_ids([job.ticket])) == []
    (found,) = check_ids([job.ticket, replace(job.ticket, token="017-works")])
    assert found.kind is Kind.WRONG_STATE
    assert "000-works, 017-works" in found.sentence


def test_a_success_of_a_process_that_did_not_finish_is_wrong(job: Job) -> None:
    assert job.ran(1.0, BEAT).found(SUCCEEDED) == WRONG


def test_the_true_exit_code_is_the_one_that_must_be_told(job: Job) -> None:
    job.ran(1.0, finished(7))
    assert job.found(replace(FAILED, exit_code=7)) == []
    assert job.found(replace(FAILED, exit_code=255)) == WRONG
    assert job.found(SUCCEEDED) == WRONG


def test_a_process_that_was_killed_as_it_ended_may_have_ended_either_way(job: Job) -> None:
    job.ran(1.0, finished(0), is_killed=True)
    assert job.found(SUCCEEDED) == []
    assert job.found(replace(FAILED, exit_code=-9)) == []


def test_nobody_may_fail_a_job_whose_process_finished_well(job: Job) -> None:
    assert job.ran(1.0, finished(0)).found(replace(FAILED, exit_code=255, exit_reason="with exit code 255")) == WRONG


def test_an_unknown_exit_code_is_true_only_where_nobody_could_know_it(job: Job, record: Record) -> None:
    unknown = replace(FAILED, exit_code=None, exit_reason="replica 1-1 ended, its exit code is unknown")
    job.ran(100.0, finished(0))
    assert job.found(unknown) == WRONG
    record.sent.append(Sent(Process(50, 1, Role.KEEPER, "", "n0"), 9, 100.5))
    assert job.found(unknown) == WRONG
    record.sent.append(Sent(Process(51, 1, Role.WITNESS, "", "n0"), 9, 100.6))
    assert job.found(unknown) == []


def test_a_run_after_one_that_finished_well_is_wrong(job: Job) -> None:
    assert job.ran(1.0, finished(0)).ran(5.0, finished(0)).found(SUCCEEDED) == WRONG


def test_two_runs_at_a_time_are_wrong(job: Job) -> None:
    assert job.ran(1.0, BEAT, BEAT, is_killed=True).ran(2.5, finished(0)).found(SUCCEEDED) == WRONG


def test_a_job_is_not_given_up_before_its_last_try(tmp_path: Path, record: Record) -> None:
    job = Job(tmp_path / "w", record, retries=1).ran(1.0, finished(7)).ran(5.0, finished(7))
    assert job.found(replace(FAILED, exit_code=7, failures=2)) == []
    assert job.found(replace(FAILED, exit_code=7, failures=1)) == WRONG


# Elastic jobs

RIGHT = finished(0, samples_wrong=0.0, out_of_order=0)


@pytest.fixture
def training(tmp_path: Path, record: Record) -> Job:
    return Job(tmp_path / "w", record, "elastic", FOR_EVER)


def test_a_training_succeeds_with_every_sample_in_its_place(training: Job) -> None:
    assert training.ran(1.0, STEP, is_killed=True).ran(3.0, STEP, RIGHT, ENDED).found(SUCCEEDED) == []


def test_lost_samples_are_counted(training: Job) -> None:
    training.ran(1.0, STEP, finished(0, samples_wrong=4.0, out_of_order=1), ENDED)
    assert training.found(SUCCEEDED) == [Kind.WRONG_SAMPLES]


def test_a_training_must_not_fail_nor_succeed_unfinished(training: Job) -> None:
    training.ran(1.0, STEP)
    assert training.found(FAILED) == WRONG
    assert training.found(SUCCEEDED) == WRONG


def test_a_training_that_is_done_is_not_done_again(training: Job) -> None:
    assert training.ran(1.0, STEP, RIGHT, ENDED).ran(9.0, STEP, RIGHT, ENDED).found(SUCCEEDED) == WRONG


def test_a_newcomer_that_never_trained_is_no_second_training(training: Job) -> None:
    assert training.ran(1.0, STEP, RIGHT, ENDED).ran(9.0, ENDED).found(SUCCEEDED) == []


def test_an_order_that_was_obeyed_is_found(training: Job) -> None:
    training.ran(1.0, STEP, {"what": "obeyed", "order": "Kill(…)"}, RIGHT, ENDED)
    assert training.found(SUCCEEDED) == [Kind.WRONG_STATE]
