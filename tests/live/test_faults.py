"""What befalls the service and the machine while jobs train: they lose no step that was saved, and nobody counts it."""

from __future__ import annotations

import pytest
from tests.live.cluster import LiveCluster, until
from tests.live.course import TARGET, Course

from pollux.core import Phase
from pollux.scheduler import MemoryLog, Scheduler, SchedulerOptions
from pollux.service.options import ServiceOptions
from pollux.service.store import SqliteLog

pytestmark = pytest.mark.timeout(400)
TWO = ("--min-gpus", 2, "--max-gpus", 2)


def assert_trained_well(cluster: LiveCluster, course: Course) -> None:
    view = cluster.succeed(course)
    assert view.failures == 0
    course.assert_used_once_a_pass()
    assert course.accuracy(cluster.folder) >= TARGET


def assert_never_noticed(cluster: LiveCluster, course: Course) -> None:
    # The end of a short job may be told first.
    until(lambda: "TrainingStarted" in cluster.kinds(course.job), lambda: cluster.story(course.job))
    kinds = cluster.kinds(course.job)
    assert kinds.count("TrainingStarted") == 1
    assert not {"TrainingResumed", "JobStopped", "ReplicaLost"} & set(kinds)
    course.assert_each_step_once()


def assert_log_replays(cluster: LiveCluster) -> None:
    """All that was ever recorded leads to the same as what was saved last with the records since then."""
    defaults = ServiceOptions(cluster.folder.path)
    options = SchedulerOptions(seed=defaults.seed, retry_pause_s=defaults.retry_pause_s, abandoned_starts_fail=True)
    copy = cluster.home / "copy.db"
    with SqliteLog(cluster.folder.database, read_only=True) as living:
        living.backup(copy)  # of one moment: the service goes on writing
    with SqliteLog(copy, read_only=True) as log:
        latest = log.latest()
        assert latest is not None, "nothing was ever saved"
        number, saved = latest
        records, tail = list(log.records()), list(log.records(number))
    copy.unlink()
    assert len(tail) < len(records)
    whole = Scheduler(MemoryLog(records), options).state
    assert whole.saved() == Scheduler(MemoryLog(tail, latest=(0, saved)), options).state.saved()
    for view in cluster.client.jobs(all=True).jobs:
        job = whole.job(view.id)
        assert job is not None
        assert (job.phase, job.generation, job.num_failures) == (view.phase, view.generation, view.failures)


def test_jobs_train_on_while_the_service_is_killed_and_started_again(cluster: LiveCluster) -> None:
    course = cluster.train("killed", options=TWO)
    cluster.wait_gpus(course.job, lambda gpus: gpus == 2)
    cluster.wait_step(course, 10)
    before = course.pids
    late = cluster.train("late", options=("--max-gpus", 1))
    cluster.kill_service()  # just when it begins to start the other one
    cluster.wait_step(course, course.last_step + 10)  # nobody is there, and it trains
    message = cluster.run("ps")
    assert message.returncode == 1
    assert "was killed; its jobs may train on. Start it again with pollux up" in message.stderr
    cluster.up()
    assert cluster.phase(course.job) is Phase.RUNNING
    cluster.wait_step(course, course.last_step + 5)
    assert course.pids == before
    assert_trained_well(cluster, late)
    assert_never_noticed(cluster, late)

    # Again, and this time between the order to grow and its being done.
    cluster.pollux("scale", course.job, "--min", 4, "--max", 4)
    until(lambda: cluster.phase(course.job) is Phase.RESIZING, lambda: cluster.story(course.job))
    cluster.kill_service()
    cluster.wait_step(course, course.last_step + 10)
    cluster.up()
    cluster.wait_gpus(course.job, lambda gpus: gpus == 4)
    until(lambda: course.sizes[-1] == 4, course.sizes)

    cluster.down("--leave-jobs")
    cluster.wait_step(course, course.last_step + 10)
    cluster.up()
    cluster.wait_step(course, course.last_step + 5)
    assert_log_replays(cluster)
    assert_trained_well(cluster, course)
    assert_never_noticed(cluster, course)
    assert course.sizes == [2, 4]
    assert_log_replays(cluster)


def test_jobs_save_and_go_on_when_the_cluster_is_ended_and_started_again(cluster: LiveCluster) -> None:
    course = cluster.train("ended", options=TWO)
    cluster.wait_gpus(course.job, lambda gpus: gpus == 2)
    cluster.wait_step(course, 10)
    cluster.down()
    assert not cluster.processes()
    at_end = course.last_step
    assert "No cluster runs in" in cluster.run("ps").stderr
    cluster.up()
    assert_trained_well(cluster, course)
    kinds = cluster.kinds(course.job)
    assert kinds.count("TrainingStarted") == 1
    assert kinds.count("TrainingResumed") == 1
    course.assert_each_step_once()  # they saved before they left: nothing was done twice
    assert course.last_step > at_end


def test_jobs_survive_a_reboot_as_far_as_their_checkpoints_go(cluster: LiveCluster) -> None:
    course = cluster.train("rebooted", "--checkpoint-every-s", 0.5, options=TWO)
    checkpoints = cluster.folder.checkpoint_dir(course.job)
    cluster.wait_gpus(course.job, lambda gpus: gpus == 2)
    cluster.wait_step(course, 20)
    until(lambda: any(checkpoints.glob("checkpoint-*")), "a checkpoint")
    cluster.wait_step(course, course.last_step + 5)
    cluster.kill_all()
    for node in cluster.folder.node_folders():
        (node / "boot_id").write_text("of the machine before")
    cluster.up()
    assert_trained_well(cluster, course)
    kinds = cluster.kinds(course.job)
    assert kinds.count("TrainingResumed") == 1
    assert "JobFailed" not in kinds
