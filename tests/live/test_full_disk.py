"""The disk of the cluster's folder is full while jobs run, for real: a small file system of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.live.cluster import LiveCluster, assert_told, until

from pollux.core import Phase
from pollux.service.store import SqliteLog

pytestmark = pytest.mark.timeout(400)
SIZE_MIB = 32


@pytest.fixture
def small() -> Iterator[LiveCluster]:
    """A cluster on a disk of its own."""
    made = LiveCluster()
    place = made.folder.path
    place.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=0700", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        place.rmdir()
        made.home.rmdir()
        pytest.skip(f"only root may mount a small disk: {done.stderr.strip()} (test_trouble.py does without)")
    try:
        yield made.start(nodes=1)
    finally:
        (place / "filler").unlink(missing_ok=True)
        made.run("down")
        made.kill_all()
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        made.end()


@contextmanager
def full(cluster: LiveCluster) -> Iterator[None]:
    """Not a byte is left. Whoever ends or removes something frees some, and then somebody may write."""
    filler = cluster.folder.path / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass
    yield
    filler.unlink()


def waiting(cluster: LiveCluster, name: str, exit_code: int) -> tuple[str, Path]:
    """A command that ends when that file is there. It prints nothing: its output is on the same disk."""
    sign = cluster.home / name
    script = f"until [ -e {sign} ]; do sleep 0.05; done; exit {exit_code}"
    command = ("--name", name, "--gpus", 1, "--retries", 0, "--", "sh", "-c", script)
    job = cluster.pollux("submit", *command).strip()
    cluster.wait(job, "running")
    return job, sign


def test_jobs_go_on_and_what_became_of_them_is_true_in_the_end(small: LiveCluster) -> None:
    file = small.folder.running()
    assert file is not None
    good, good_sign = waiting(small, "good", 0)
    bad, bad_sign = waiting(small, "bad", 3)
    on, on_sign = waiting(small, "on", 0)
    with full(small):
        assert_told(small.run("submit", "--gpus", 1, "--", "true"), 1, "pollux.db", "Make room on the disk")
        assert_told(small.run("cancel", on), 1, "Make room on the disk")
        told = small.run("ps")
        assert "Make room on the disk" in told.stderr
        assert told.stdout.count("running") == 3
        good_sign.touch()
        bad_sign.touch()
        until(lambda: len([line for line in small.processes().values() if "until [" in line]) == 1, "two have ended")
        # The files by which it is found cannot be written, but it is there.
        (small.folder.path / "service.json").write_bytes(b"")
    until(lambda: small.folder.running() == file, "the same service is found")
    assert small.wait(good, "succeeded", "failed").phase is Phase.SUCCEEDED
    view = small.wait(bad, "succeeded", "failed")
    assert (view.phase, view.exit_code) == (Phase.FAILED, 3)
    assert small.phase(on) is Phase.RUNNING
    until(lambda: not small.client.cluster().warnings, "all is well")
    assert "Make room on the disk" not in small.run("ps").stderr
    late = small.pollux("submit", "--gpus", 1, "--", "true").strip()
    small.wait(late, "succeeded")

    # All of it was written down: a service that comes after a crash knows the same.
    small.kill_service()
    small.up()
    assert [small.phase(job) for job in (good, bad, on, late)] == ["succeeded", "failed", "running", "succeeded"]
    on_sign.touch()
    small.wait(on, "succeeded")
    with SqliteLog(small.folder.database, read_only=True) as log:
        ends = [event.kind for event in log.events(job=bad)]
    assert ends.count("JobFailed") == 1


def test_a_cluster_that_is_told_something_new_on_a_full_disk_says_so(small: LiveCluster) -> None:
    small.down()
    with full(small):
        told = ("cannot be written to (No space left on device). Make room on its disk", str(small.folder.path))
        assert_told(small.run("up", "--interval", 7), 1, *told)
    assert not list(small.folder.path.glob("*.new"))
    config = small.folder.config()
    assert config is not None
    assert config.interval_s == 1.0, "as before"


def test_a_service_that_is_killed_and_started_on_a_full_disk_says_so_or_goes_on(small: LiveCluster) -> None:
    on, sign = waiting(small, "on", 0)
    small.kill_service()
    with full(small):
        done = small.run("up")
        if done.returncode:
            assert_told(done, 1, "The disk of", "is full: make room")
    small.run("up")
    assert small.phase(on) is Phase.RUNNING
    sign.touch()
    small.wait(on, "succeeded")
