"""A log that cannot be written for a while: nothing is half done, nothing is lost, and people are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.service.living import Living, live
from tests.service.test_service import report_of

from pollux.core import Phase
from pollux.errors import DiskFull
from pollux.service import trouble, views
from pollux.service.problems import answer_to
from pollux.wire import visiting
from pollux.wire.entries import TrainingStarted

SENTENCE = "pollux.db cannot be used: database or disk is full. Make room on the disk."
WRITES = ("append", "note", "put", "save")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "RETRY_S", 0.01)
    monkeypatch.setattr(visiting, "HEAR_AGAIN_S", 0.01)
    for module in ("world", "service"):
        monkeypatch.setattr(f"pollux.service.{module}.RETRY_S", 0.01)


@contextmanager
def full(living: Living, *writes: str) -> Iterator[None]:
    """The disk of the log has no room, for all that is written or for some of it."""
    store: Any = living.store
    whole: dict[str, Callable[..., None]] = {name: getattr(store, name) for name in writes or WRITES}

    def fail(*_: object) -> None:
        raise DiskFull(SENTENCE)

    for name in whole:
        setattr(store, name, fail)
    try:
        yield
    finally:
        for name, write in whole.items():
            setattr(store, name, write)


async def rest(living: Living) -> None:
    """Long enough for whatever would go wrong, if it did: everything is tried again every hundredth of a second."""
    await asyncio.sleep(0.1)
    assert not living.running.done()


def test_what_is_asked_for_is_refused_and_has_not_happened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=trouble.__name__)

    async def main(living: Living) -> None:
        job = await living.submit()
        with full(living):
            for order in (living.service.pause, living.service.cancel):
                with pytest.raises(DiskFull) as caught:
                    order(job.id)
            with pytest.raises(DiskFull):
                await living.submit(until=None)
            answer = answer_to(caught.value)
            assert answer.status_code == 507
            assert b"Make room on the disk" in answer.body
            assert living.job(job.id).phase is Phase.RUNNING
            (warning,) = views.cluster_view(living.service, 1.0).warnings
            assert SENTENCE in warning
            await rest(living)
        await living.until(lambda: not living.service.warnings)
        assert "The log can be written again" in caplog.text
        assert living.replayed().state == living.service.scheduler.state
        assert (await living.submit()).phase is Phase.RUNNING

    live(main)


def test_what_happens_meanwhile_is_heard_when_there_is_room() -> None:
    async def main(living: Living) -> None:
        ends, fails, trains = [await living.submit(retries=0) for _ in range(3)]
        with full(living):
            living.daemon_of(ends.id).finish(ends.id)
            living.daemon_of(fails.id).fail(fails.id)
            notice = TrainingStarted(1.0, report_of(trains.id).state)
            living.daemon_of(trains.id).report(report_of(trains.id, notices=(notice,)))
            await rest(living)
            assert living.job(ends.id).phase is Phase.RUNNING
            assert [living.service.node_state(node.node.id) for node in living.daemons] == ["ready", "ready"]
        await living.reach(ends.id, Phase.SUCCEEDED)
        await living.reach(fails.id, Phase.FAILED)
        told = lambda: [one.kind for one in living.store.events(job=trains.id)]  # noqa: E731
        await living.until(lambda: told().count("TrainingStarted") == 1)
        assert living.job(trains.id).phase is Phase.RUNNING
        assert living.replayed().state == living.service.scheduler.state

    live(main)


def test_a_job_whose_home_cannot_be_written_down_starts_later() -> None:
    async def main(living: Living) -> None:
        with full(living, "put"):
            job = await living.submit(until=Phase.STARTING)
            await rest(living)
            assert not any(daemon.asked for daemon in living.daemons), "nobody would find it after a crash"
        await living.reach(job.id, Phase.RUNNING)
        assert living.job(job.id).generation == 1

    live(main)


def test_one_that_was_called_off_meanwhile_does_not() -> None:
    async def main(living: Living) -> None:
        with full(living, "put"):
            job = await living.submit(until=Phase.STARTING)
            living.service.cancel(job.id)
        await living.reach(job.id, Phase.CANCELLED)
        await rest(living)
        assert not [run for daemon in living.daemons for run in daemon.runs]

    live(main)


def test_the_end_of_a_job_counts_although_its_report_cannot_be_kept_yet() -> None:
    async def main(living: Living) -> None:
        job = await living.submit()
        living.daemon_of(job.id).report(report_of(job.id, step=7))
        await living.until(lambda: living.service.report_of(job.id))
        with full(living, "put", "save"):
            living.daemon_of(job.id).finish(job.id)
            await living.reach(job.id, Phase.SUCCEEDED)
            await rest(living)
            assert living.store.get(f"report/{job.id}") is None
        await living.until(lambda: living.store.get(f"report/{job.id}"))

    live(main, save_every=1)


def test_a_lost_node_is_taken_in_later() -> None:
    async def main(living: Living) -> None:
        job = await living.submit(min_gpus=2, max_gpus=2)
        home = living.daemon_of(job.id)
        with full(living):
            await living.provider.release(home.node.id)
            await rest(living)
        await living.until(lambda: home.node.id not in living.service.scheduler.state.cluster)
        await living.until(lambda: living.job(job.id).generation == 2)

    live(main, node_grace_s=0.05)


def test_a_service_that_starts_meanwhile_recovers_and_goes_on() -> None:
    async def main(living: Living) -> None:
        job = await living.submit(min_gpus=2, max_gpus=2)
        home = living.daemon_of(job.id)
        await living.kill()
        living.daemons.remove(home)
        (other,) = living.daemons
        try:
            await living.start(wait=False)
            with full(living):
                await living.until(lambda: not living.service.is_recovering)
                await rest(living)
            # Not in generation 2 if a round was faster than the loss of the node: that may be a start there.
            await living.until(lambda: job.id in other.runs)
            assert (await living.reach(job.id, Phase.RUNNING)).generation > 1
        finally:
            living.daemons.append(home)  # which are ended

    live(main, node_grace_s=0.05)


def test_jobs_that_the_log_has_lost_are_taken_up_when_there_is_room() -> None:
    async def main(living: Living) -> None:
        job = await living.submit()
        await living.kill()
        for path in living.folder.glob("pollux.db*"):
            path.unlink()
        await living.start(wait=False)
        with full(living):
            await living.until(lambda: living.service.warnings)
            assert living.service.is_recovering
        await living.until(lambda: not living.service.is_recovering)
        assert (await living.reach(job.id, Phase.RUNNING)).generation == 1

    live(main)


def test_a_service_that_ends_meanwhile_ends_well() -> None:
    async def main(living: Living) -> None:
        job = await living.submit()
        with full(living):
            living.service.end(stop_jobs=False)
            await living.running
        living.store.close()
        await living.start()
        assert living.job(job.id).phase is Phase.RUNNING

    live(main)
