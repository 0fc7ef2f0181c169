"""State folders of daemons that earlier versions wrote: the next daemon finds what there was, and what became of it."""

from collections.abc import Iterator

import pytest
from tests.fixtures.recorded import VERSIONS, Recorded, unpack

from pollux.core import JobFailed, JobFinished, JobStopped
from pollux.node.folder import StateFolder, boot_id
from pollux.wire.nodes import ListRuns, RunPhase

from .daemons import Node, short_folder


@pytest.fixture(params=VERSIONS)
def recorded(request) -> Iterator[Recorded]:
    with short_folder() as folder:
        yield unpack(request.param, folder)


@pytest.fixture
def start(recorded):
    """A daemon on a recorded folder; the machine was restarted since, or was not."""
    made = []

    def make(name, *, is_after_reboot):
        folder = recorded.node(name)
        (folder / "boot_id").write_text("another one" if is_after_reboot else boot_id())
        made.append(Node(folder, name).start())
        return made[-1]

    yield make
    for node in made:
        node.end()


def phases(node):
    return {run.job: run.phase for run in node.ask(ListRuns()).runs}


def heard_of(node, job):
    with node.watching(job) as watching:
        return watching.event((JobFinished, JobFailed, JobStopped))


def test_where_the_daemon_was_is_read(recorded):
    for name in ("n0", "n1"):
        file = StateFolder(recorded.node(name)).node_file()
        assert (file.node, file.host) == (name, "127.0.0.1")
        assert file.port > 0


@pytest.mark.parametrize("is_after_reboot", [False, True])
def test_what_became_of_jobs_that_ended_is_known(recorded, start, is_after_reboot):
    jobs = {was["name"]: job for job, was in recorded.expected["jobs"].items()}
    node = start("n0", is_after_reboot=is_after_reboot)
    assert heard_of(node, jobs["learned"]) == JobFinished(jobs["learned"], 2)
    assert heard_of(node, jobs["fine"]) == JobFinished(jobs["fine"], 1)
    assert heard_of(node, jobs["broken"]).exit_code == 3
    assert heard_of(node, jobs["unwanted"]) == JobStopped(jobs["unwanted"], 1)
    assert heard_of(node, jobs["paused"]) == JobStopped(jobs["paused"], 1)
    ended = {jobs[name] for name in ("learned", "fine", "broken", "unwanted", "paused")}
    assert {job for job, phase in phases(node).items() if phase is RunPhase.ENDED} >= ended


@pytest.mark.parametrize("is_after_reboot", [False, True])
def test_an_end_that_the_service_never_heard_of_is_told(recorded, start, is_after_reboot):
    late = recorded.expected["ended_alone"]
    node = start("n1", is_after_reboot=is_after_reboot)
    assert heard_of(node, late["job"]).exit_code == late["exit_code"]


def test_a_job_that_trained_has_stopped_when_the_machine_is_restarted(recorded, start):
    """It trained on both nodes, and both were."""
    job = recorded.expected["was_training"]
    node, other = (start(name, is_after_reboot=True) for name in ("n0", "n1"))
    assert heard_of(node, job) == JobStopped(job, 1)
    assert node.replicas(job) == other.replicas(job) == {}


def test_replicas_that_were_killed_are_found_to_be_gone(recorded, start):
    """There were two on the node of its home, and one on the other."""
    job = recorded.expected["was_training"]
    other = start("n1", is_after_reboot=False)
    (there,) = other.replicas(job).values()
    assert there.has_unknown_end
    home = start("n0", is_after_reboot=False)
    failed = heard_of(home, job)
    assert (failed.exit_code, failed.may_retry) == (None, True)
