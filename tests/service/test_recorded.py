"""Event logs, backups and files of clusters that earlier versions wrote: they are read, and the service goes on."""

import shutil

import pytest
from tests.fixtures.recorded import VERSIONS, unpack
from tests.service.living import Living, live

from pollux.core import JobId, Phase, loads
from pollux.scheduler import Scheduler, SchedulerOptions
from pollux.scheduler.invariants import violations
from pollux.service.place import ClusterFolder
from pollux.service.store import SqliteLog
from pollux.service.views import job_detail
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import RunPhase


@pytest.fixture(params=VERSIONS)
def recorded(request, tmp_path):
    return unpack(request.param, tmp_path)


def summary(scheduler):
    state = scheduler.state
    assert violations(state) == []
    return {
        job.id: {
            "name": job.spec.name,
            "phase": str(job.phase),
            "exit_code": job.exit_code,
            "failures": job.num_failures,
            "generation": job.generation,
            "gpus": dict(job.allocation.gpus),
        }
        for job in (*state.jobs.values(), *state.ended.values())
    }


def replayed(log):
    """From the first record on, whatever was saved."""
    scheduler = Scheduler()
    for record in log.records():
        scheduler.state.apply(record.event, record.time_s)
    return scheduler


def test_the_log_of_a_killed_service_leads_to_what_it_knew(recorded):
    assert (recorded.folder / "pollux.db-wal").stat().st_size > 0  # it is really one that was not closed
    with SqliteLog(recorded.database) as log:
        assert log.last_number == recorded.expected["records"]
        assert log.latest() is not None
        assert summary(Scheduler(log)) == recorded.expected["jobs"]
        assert summary(replayed(log)) == recorded.expected["jobs"]


def test_every_event_and_every_notice_is_read(recorded):
    with SqliteLog(recorded.database, read_only=True) as log:
        found = log.events(limit=recorded.expected["records"] + 1)
    assert len(found) == recorded.expected["records"]
    assert all(type(each.document).__name__ == each.kind for each in found)
    assert {"JobSubmitted", "PlanMade", "JobReported", "TrainingStarted", "CheckpointSaved"} <= {f.kind for f in found}


def test_the_last_reports_of_agents_are_read_and_shown(recorded):
    with SqliteLog(recorded.database, read_only=True) as log:
        scheduler = Scheduler(log)
        stored = {job: log.get(f"report/{job}") for job in recorded.expected["jobs"]}
    reports = {job: loads(text, AgentReport) for job, text in stored.items() if text is not None}
    assert reports
    for job in recorded.expected["jobs"]:
        detail = job_detail(scheduler.state.job(JobId(job)), reports.get(job), 0.0)
        assert (detail.job.step is not None) == (job in reports)


def test_a_backup_can_be_put_in_place_of_the_log(recorded, tmp_path):
    """As docs/operations.md has it."""
    restored = tmp_path / "restored.db"
    shutil.copy(recorded.backup, restored)
    with SqliteLog(restored) as log:
        assert log.last_number == recorded.expected["records_in_backup"]
        assert summary(Scheduler(log)) == summary(replayed(log)) == recorded.expected["backup"]


def test_the_files_of_the_cluster_are_read(recorded):
    place = ClusterFolder(recorded.folder)
    config = place.config()
    assert (config.nodes, config.slots, config.interval_s, config.policy) == (2, 2, 2.0, "castor")
    assert place.service_file().version == recorded.expected["version"]
    assert place.running() is None
    assert [path.name for path in place.node_folders()] == ["n0", "n1"]


@pytest.mark.parametrize("which", ["database", "backup"])
def test_a_service_goes_on_from_it(recorded, which):
    """Its daemons know nothing of the jobs, as after a restart of both machines with their disks wiped."""
    expected = recorded.expected["jobs" if which == "database" else "backup"]

    async def goes_on(living: Living) -> None:
        await living.kill()
        for path in living.folder.glob("pollux.db*"):
            path.unlink()
        for path in recorded.folder.glob(f"{getattr(recorded, which).name}*"):
            shutil.copy(path, living.folder / path.name.replace("backup.db", "pollux.db"))
        await living.start()
        for job, was in expected.items():
            phase = Phase(was["phase"])
            if phase.is_terminal or phase is Phase.PAUSED:
                assert living.job(JobId(job)).phase is phase
        was_training = JobId(recorded.expected["was_training"])

        def has_its_turn() -> bool:
            """Who goes first depends on how long ago all this was: the others end as soon as they run."""
            for daemon in living.daemons:
                for job in [job for job, run in daemon.runs.items() if run.phase is RunPhase.TRAINING]:
                    if job != was_training and phase_of(job) is Phase.RUNNING:
                        daemon.finish(job)
            return phase_of(was_training) is Phase.RUNNING

        def phase_of(job: JobId) -> Phase:
            return living.job(job).phase

        await living.until(has_its_turn)
        living.daemon_of(was_training).finish(was_training)
        await living.reach(was_training, Phase.SUCCEEDED)

    live(goes_on, policy="castor")


def test_options_of_the_service_do_not_change_what_was(recorded):
    """The service replays with options of its own."""
    with SqliteLog(recorded.database) as log:
        options = SchedulerOptions(seed=3, retry_pause_s=0.5, abandoned_starts_fail=True)
        assert summary(Scheduler(log, options)) == recorded.expected["jobs"]
