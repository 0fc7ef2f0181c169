"""Logs that were emptied, put back or damaged: no job is lost, none runs twice, no id comes again, and it is told."""

from __future__ import annotations

import os
import shutil

import pytest
from tests.service.living import Living, live

from pollux.core import JobId, Phase, StopReason
from pollux.service.ledger import Ledger
from pollux.wire.nodes import RunJob, RunPhase, StopRun


def empty(living: Living) -> None:
    for path in living.folder.glob("pollux.db*"):
        path.unlink()


def backup(living: Living) -> None:
    living.store.backup(living.folder / "copy")


def put_back(living: Living) -> None:
    empty(living)
    shutil.copy(living.folder / "copy", living.place.database)


async def lose(living: Living) -> None:
    """The log is empty when the service comes back."""
    await living.kill()
    empty(living)
    await living.start()


async def lose_all(living: Living) -> None:
    """The files of the jobs are gone, too."""
    await living.kill()
    empty(living)
    shutil.rmtree(living.place.jobs)
    await living.start()


def starts(living: Living) -> list[RunJob]:
    """What daemons were asked to run."""
    return [request for daemon in living.daemons for request in daemon.asked if isinstance(request, RunJob)]


class TestAnEmptiedLog:
    def test_a_job_that_trained_trains_on(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(name="cnt")
            await lose(living)
            again = await living.reach(job.id, Phase.RUNNING)
            assert (again.generation, again.spec, again.submitted_at_s) == (1, job.spec, job.submitted_at_s)
            assert not [request for request in living.daemon_of(job.id).asked if isinstance(request, StopRun)]
            assert living.replayed().state == living.service.scheduler.state

        live(main)

    def test_a_job_that_was_being_started_saves_and_goes_on(self) -> None:
        async def main(living: Living) -> None:
            for daemon in living.daemons:
                daemon.is_slow = True
            job = await living.submit(name="cnt", until=Phase.STARTING)
            await living.until(lambda: any(job.id in daemon.runs for daemon in living.daemons))
            living.daemon_of(job.id).runs[job.id].phase = RunPhase.STARTING
            for daemon in living.daemons:
                daemon.is_slow = False
            await lose(living)
            again = await living.reach(job.id, Phase.RUNNING)
            assert (again.generation, again.spec, again.submitted_at_s) == (2, job.spec, job.submitted_at_s)
            stops = [request for request in living.daemon_of(job.id).asked if isinstance(request, StopRun)]
            assert {(stop.generation, stop.reason) for stop in stops} == {(1, StopReason.PREEMPTED)}
            assert living.replayed().state == living.service.scheduler.state

        live(main)

    def test_a_job_that_waited_waits_again_and_one_that_was_paused_is_paused(self) -> None:
        async def main(living: Living) -> None:
            await living.submit()
            waiting = await living.submit(until=Phase.PENDING)
            paused = await living.submit(until=Phase.PENDING)
            living.service.pause(paused.id)
            await lose(living)
            assert living.job(waiting.id).phase in (Phase.PENDING, Phase.STARTING, Phase.RUNNING)
            assert living.job(paused.id).phase is Phase.PAUSED

        live(main, 1)

    @pytest.mark.parametrize("how", ["finish", "fail"])
    def test_a_job_that_had_ended_is_not_run_again(self, how: str) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(name="cnt", retries=0)
            getattr(living.daemon_of(job.id), how)(job.id)
            await living.reach(job.id, Phase.SUCCEEDED if how == "finish" else Phase.FAILED)
            ended = living.job(job.id)
            await lose(living)
            again = living.job(job.id)
            for what in ("phase", "exit_code", "exit_reason", "finished_at_s", "num_failures"):
                assert getattr(again, what) == getattr(ended, what)
            other = await living.submit(name="cnt")
            assert other.id != job.id
            assert living.daemon_of(other.id).runs[other.id].phase is RunPhase.TRAINING

        live(main)

    @pytest.mark.parametrize(("how", "phase"), [("finish", Phase.SUCCEEDED), ("fail", Phase.FAILED)])
    def test_a_job_that_ended_while_nobody_looked_has_ended(self, how: str, phase: Phase) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(retries=0)
            await living.kill()
            getattr(living.daemon_of(job.id), how)(job.id)
            empty(living)
            await living.start()
            ended = await living.reach(job.id, phase)
            assert ended.exit_code == (1 if how == "fail" else None)
            assert not [request for request in living.daemon_of(job.id).asked if isinstance(request, StopRun)]

        live(main)

    def test_jobs_of_a_version_that_kept_no_files_of_them_get_some(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            await living.kill()
            shutil.rmtree(living.place.jobs)
            await living.start()
            await lose(living)
            assert (await living.reach(job.id, Phase.RUNNING)).spec == job.spec

        live(main)

    def test_it_is_told(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            last = living.store.last_number
            await lose(living)
            (warning,) = living.service.warnings
            assert f"has lost the last {last} records" in warning
            assert job.id in warning
            await living.restart()
            assert not living.service.warnings

        live(main)


class TestALogThatWasPutBack:
    def test_a_job_submitted_since_is_found_and_one_that_ended_since_has_ended(self) -> None:
        async def main(living: Living) -> None:
            before = await living.submit()
            backup(living)
            since = await living.submit()
            living.daemon_of(before.id).finish(before.id)
            await living.reach(before.id, Phase.SUCCEEDED)
            await living.kill()
            living.daemon_of(before.id).runs.pop(before.id)  # also if its daemon does not know it any more
            put_back(living)
            await living.start()
            assert living.job(before.id).phase is Phase.SUCCEEDED
            assert (await living.reach(since.id, Phase.RUNNING)).generation == 1
            assert (await living.submit()).id not in (before.id, since.id)

        live(main)

    def test_what_its_owner_asked_for_since_still_holds(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            backup(living)
            living.service.cancel(job.id)
            await living.reach(job.id, Phase.CANCELLED)
            await living.kill()
            put_back(living)
            await living.start()
            assert living.job(job.id).phase is Phase.CANCELLED

        live(main)

    def test_a_job_whose_home_the_log_forgot_trains_on(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            await living.kill()
            with living.opened() as log:
                log._db.execute("DELETE FROM facts WHERE key LIKE 'home/%'")
            await living.start()
            assert living.job(job.id).phase is Phase.RUNNING
            assert living.job(job.id).generation == 1

        live(main)


class TestADamagedEnd:
    @pytest.mark.parametrize("how", ["cut", "flip"])
    def test_it_is_noticed_told_and_the_job_goes_on(self, how: str) -> None:
        async def main(living: Living) -> None:
            await living.submit()
            job = await living.submit()
            last = living.store.last_number
            wal = living.place.database.with_name("pollux.db-wal")
            content = wal.read_bytes()  # as kill -9 leaves it: a closed database has none
            await living.kill()
            end = len(content) // 2
            wal.write_bytes(content[:end] if how == "cut" else content[:end] + bytes(len(content) - end))
            await living.start()
            assert living.job(job.id).phase in (Phase.STOPPING, Phase.PENDING, Phase.STARTING, Phase.RUNNING)
            assert living.store.last_number > 0
            assert last
            (warning,) = living.service.warnings
            assert "has lost the last" in warning
            await living.reach(job.id, Phase.RUNNING)

        live(main)


class TestIds:
    def test_they_go_on_where_all_that_counts_was_lost_but_the_folders(self, tmp_path) -> None:
        (tmp_path / "bert-41").mkdir()
        (tmp_path / "odd").mkdir()
        assert Ledger(tmp_path).new_id("cnt", 0) == "cnt-42"
        shutil.rmtree(tmp_path / "bert-41")
        assert Ledger(tmp_path).new_id("cnt", 3) == "cnt-43"

    def test_those_that_daemons_know_are_taken(self, tmp_path) -> None:
        ledger = Ledger(tmp_path)
        ledger.note(JobId("cnt-7"))
        ledger.note(JobId("unnumbered"))
        assert ledger.new_id("cnt", 2) == "cnt-8"

    def test_those_of_runs_that_daemons_alone_remember_are_taken(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(name="cnt")
            living.daemon_of(job.id).finish(job.id)
            await living.reach(job.id, Phase.SUCCEEDED)
            await lose_all(living)
            assert (await living.submit(name="cnt", until=None)).id != job.id

        live(main)

    def test_daemons_are_told_which_of_two_jobs_of_one_id_they_run(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(name="cnt")
            living.service.pause(job.id)
            await living.reach(job.id, Phase.PAUSED)
            living.service.resume(job.id)
            await living.reach(job.id, Phase.RUNNING)
            first, again = (request.launch.submission for request in starts(living))
            assert first
            assert again == first, "it is the same one"
            for daemon in living.daemons:
                daemon.runs.clear()
                daemon.asked.clear()
            await lose_all(living)
            assert (await living.submit(name="cnt")).id == job.id, "nobody knows the first one any more"
            (other,) = (request.launch.submission for request in starts(living))
            assert other not in ("", first)

        live(main)

    def test_a_full_disk_does_not_make_them_repeat(self, tmp_path) -> None:
        ledger = Ledger(tmp_path / "jobs")
        (tmp_path / "jobs").write_text("no folder")
        assert [ledger.new_id("a", 0), ledger.new_id("a", 0)] == ["a-1", "a-2"]

    def test_the_files_are_for_their_owner_alone(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(env={"SECRET": "x"})
            path = living.place.jobs / job.id / "job.json"
            assert os.stat(path).st_mode & 0o777 == 0o600

        live(main)
