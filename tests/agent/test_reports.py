"""What a whole job tells: to a receiver that listens, hangs or is not there, and to its journal."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.agent.conftest import free_port
from tests.agent.training import Run, loader_of, network, sgd, steady, train_turn
from tests.wire.receiver import Hang, Receiver, answer, receiving

from pollux.agent.batching import BatchConfig
from pollux.agent.journal import read_journal
from pollux.torch import Job
from pollux.wire.entries import (
    BatchChanged,
    CheckpointSaved,
    LearningRateChanged,
    TrainingFinished,
    TrainingResumed,
    TrainingStarted,
)
from pollux.wire.messages import AgentReport, unpack


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Have jobs report to a URL, as Pollux would."""

    def tell(url: str) -> None:
        token = tmp_path / "token"
        token.write_text("t-1")
        monkeypatch.setenv("POLLUX_REPORT_URL", url)
        monkeypatch.setenv("POLLUX_TOKEN_FILE", str(token))
        monkeypatch.setenv("POLLUX_JOB", "small-1")
        monkeypatch.setenv("POLLUX_GENERATION", "3")

    return tell


def trained(passes: int, until: Any = None, **options: Any) -> Job:
    """A job that grows once, at its step 40."""
    job = Job(max_batch_size=64, adapt=False, report_every_s=1e-3, guard=False, **options)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(203, 16))
    steady(job)

    def after() -> None:
        if job.steps == 40 and job._made.stepper.is_last:
            job._made.adapter.apply(BatchConfig(48, 48, 1), "the test says so", None)

    for _ in job.passes(passes):
        train_turn(job, model, optimizer, loader, Run(), after)
        if until is not None and until(job):
            break
    job.close()
    return job


def reports(receiver: Receiver) -> list[AgentReport]:
    return [unpack(receiver.requests.get_nowait().body, AgentReport) for _ in range(receiver.requests.qsize())]


def test_a_receiver_hears_of_profile_model_noise_and_every_change(told):
    with receiving(answer(204)) as receiver:
        told(receiver.url)
        since: list[int] = []

        def is_enough(job: Job) -> bool:
            """Some reports came after all is known that they tell."""
            if job.steps > 60 and job._made.adapter.gradient() is not None:
                since.append(receiver.requests.qsize())
            return bool(since) and since[-1] > since[0] + 3

        job = trained(4000, until=is_enough)
        heard = reports(receiver)
    assert {(str(report.job), report.generation) for report in heard} == {("small-1", 3)}
    last = heard[-1]
    assert last.profile is not None
    assert {key.per_gpu_batch_size for key in last.profile.of_type("cpu")} >= {16, 48}
    assert last.model is not None
    assert last.model.limits == job._made.adapter.limits
    assert last.model.throughput.get("cpu") is not None
    assert last.model.gradient is not None
    assert {report.model.fingerprint for report in heard if report.model} == {last.model.fingerprint}
    assert (last.model.fingerprint or "").startswith("sequential-")
    assert last.noise_scale is not None
    assert last.loss is not None
    assert last.state.batch.batch_size == 48
    notices = [notice for report in heard for notice in report.notices]
    assert isinstance(notices[0], TrainingStarted)
    assert [notice.before.batch_size for notice in notices if isinstance(notice, BatchChanged)] == [16]


@pytest.mark.parametrize("kind", ["hangs", "is not there", "refuses"])
def test_training_ends_well_whatever_the_receiver_does(told, kind):
    release = threading.Event()
    behaviour = answer(403) if kind == "refuses" else Hang(release)
    with receiving(behaviour) as receiver:
        told(f"http://127.0.0.1:{free_port()}" if kind == "is not there" else receiver.url)
        job = trained(8)
        release.set()
    assert job._made.dealer.committed.pass_index == 8


def test_the_journal_has_the_whole_story_also_of_a_second_run(tmp_path):
    job = trained(6, checkpoint_dir=tmp_path, checkpoint_every_s=1e-6)
    entries = read_journal(tmp_path / "journal.jsonl")
    assert isinstance(entries[0], TrainingStarted)
    assert isinstance(entries[-1], TrainingFinished)
    assert entries[-1].state.step == job.steps
    assert entries[-1].state.data_pass == 6
    (change,) = [entry for entry in entries if isinstance(entry, BatchChanged)]
    assert (change.before.batch_size, change.state.batch.batch_size) == (16, 48)
    assert change.reason == "the test says so"
    assert any(isinstance(entry, LearningRateChanged) for entry in entries)
    saved = [Path(entry.checkpoint) for entry in entries if isinstance(entry, CheckpointSaved)]
    assert saved
    assert saved[-1].is_dir()
    trained(8, checkpoint_dir=tmp_path)
    again = read_journal(tmp_path / "journal.jsonl")
    assert again[: len(entries)] == entries
    assert isinstance(again[len(entries)], TrainingResumed)


def replicated(rank: int, replicas: int, folder: str) -> None:
    trained(5, checkpoint_dir=folder, checkpoint_every_s=1e-6)


def test_of_several_replicas_one_writes_the_journal(spawn, tmp_path):
    spawn(replicated, 2, str(tmp_path))
    kinds = [type(entry).__name__ for entry in read_journal(tmp_path / "journal.jsonl")]
    assert kinds.count("TrainingStarted") == kinds.count("TrainingFinished") == kinds.count("BatchChanged") == 1


def test_a_job_without_a_receiver_and_without_a_folder_tells_nobody():
    before = threading.active_count()
    trained(4)
    assert threading.active_count() == before
