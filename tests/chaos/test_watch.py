"""What counts as a hang, on a made-up service whose clock the test has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.chaos.views import SUCCEEDED

from pollux.core import Phase
from pollux.errors import Temporary
from pollux.testing.chaos import watch as watching
from pollux.testing.chaos.watch import Watch
from pollux.wire.api import JobView

RUNNING = replace(SUCCEEDED, phase=Phase.RUNNING)
PENDING = replace(SUCCEEDED, phase=Phase.PENDING)


class Service:
    """Answers with one job, or not at all. Also the bed, and its client."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.job: JobView | None = RUNNING
        self.free_gpus = 0
        self.is_there = True
        self.folder = folder
        folder.mkdir()
        monkeypatch.setattr(watching.time, "monotonic", lambda: self.now_s)
        self.watch = Watch(self)  # type: ignore[arg-type]
        self.watch.expect("000-works", folder)

    def client(self, timeout_s: float) -> Any:
        if not self.is_there:
            raise Temporary("Nobody is there.", 1.0)
        return self

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def jobs(self, *, all: bool) -> Any:
        return SimpleNamespace(jobs=() if self.job is None else (self.job,))

    def cluster(self) -> Any:
        return SimpleNamespace(free_gpus=self.free_gpus)

    def pass_by(self, seconds: int, *, writes: bool = False) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            if writes:
                with (self.folder / "1.jsonl").open("a") as file:
                    file.write("{}\n")
            self.watch.look()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(tmp_path / "w", monkeypatch)


def test_a_job_that_writes_does_not_hang(service: Service) -> None:
    service.pass_by(30, writes=True)
    assert service.watch.longest_hang_s == 0.0


def test_a_job_that_holds_gpus_and_writes_nothing_hangs(service: Service) -> None:
    service.pass_by(30)
    assert service.watch.longest_hang_s == 30.0
    assert service.watch.longest_hang == "works-1, which is running"


def test_a_job_hangs_that_is_started_again_and_again_and_never_runs(service: Service) -> None:
    service.free_gpus = 1
    for generation in range(30):
        service.job = replace(PENDING if generation % 2 else RUNNING, generation=generation)
        service.pass_by(1)
    assert service.watch.longest_hang_s == 30.0
    assert service.watch.still_s == 0.0


def test_a_job_that_waits_for_gpus_or_for_its_next_try_does_not_hang_by_itself(service: Service) -> None:
    service.job = PENDING
    service.pass_by(5)
    service.free_gpus, service.job = 4, replace(PENDING, waits_for="its next try, after 3 failures")
    service.pass_by(30)
    assert service.watch.longest_hang == "all jobs"
    assert service.watch.longest_hang_s < 6.0


def test_a_service_that_does_not_answer_hangs(service: Service) -> None:
    service.pass_by(5, writes=True)
    service.is_there = False
    service.pass_by(20)
    assert service.watch.longest_hang == "the service, which does not answer"
    assert service.watch.longest_hang_s == 20.0


def test_a_job_that_the_service_does_not_know_any_more_is_lost_after_a_while(service: Service) -> None:
    service.pass_by(2, writes=True)
    service.job = None
    service.pass_by(5)
    assert not service.watch.is_over("000-works")
    service.pass_by(30)
    assert service.watch.is_lost("000-works")


def test_an_end_that_was_not_the_last_word_is_told(service: Service) -> None:
    service.job = SUCCEEDED
    service.pass_by(1)
    service.job = RUNNING
    service.pass_by(1)
    assert service.watch.changed == ["works-1 (000-works) was succeeded, and then running"]
