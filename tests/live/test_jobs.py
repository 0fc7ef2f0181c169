"""Jobs on a cluster, from their submission to their end, through the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.live.cluster import TRAIN, LiveCluster, assert_told, until
from tests.live.course import BATCH, TARGET, Course

from pollux.core import Phase

pytestmark = pytest.mark.timeout(400)
SECRET = "open-sesame-0815"


def assert_never_began_again(cluster: LiveCluster, course: Course) -> None:
    kinds = cluster.kinds(course.job)
    assert kinds.count("TrainingStarted") == 1
    assert not {"TrainingResumed", "JobFailed", "JobStopped", "GenerationAbandoned"} & set(kinds)


def lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return False


# Elastic jobs


def test_gpus_move_between_jobs_that_train_and_batch_sizes_follow(cluster: LiveCluster) -> None:
    first = cluster.train("first")
    cluster.wait_gpus(first.job, lambda gpus: gpus >= 3)
    second = cluster.train("second", options=("--min-gpus", 2, "--max-gpus", 2))
    third = cluster.train("third", options=("--max-gpus", 1))
    cluster.wait_gpus(second.job, lambda gpus: gpus == 2)
    cluster.wait_gpus(third.job, lambda gpus: gpus == 1)
    shrunk = cluster.wait_gpus(first.job, lambda gpus: gpus == 1)
    cluster.wait_step(first, first.last_step + 5)
    for course in (second, third):
        cluster.succeed(course)
    grown = cluster.wait_gpus(first.job, lambda gpus: gpus >= 3)
    cluster.wait_step(first, first.last_step + 5)
    until(lambda: first.largest_batch >= 2 * BATCH, lambda: cluster.story(first.job))
    cluster.succeed(first)

    assert grown.generation > shrunk.generation
    assert second.sizes == [2]
    assert third.sizes == [1]
    sizes = first.sizes
    assert sizes[0] == 1  # nobody knew yet what more would bring
    first_large, last_small = sizes.index(max(sizes)), len(sizes) - 1 - sizes[::-1].index(1)
    assert 0 < first_large < last_small < len(sizes) - 1
    for course in (first, second, third):
        assert_never_began_again(cluster, course)
        course.assert_each_step_once()
        course.assert_learning_rate_follows()
        course.assert_used_once_a_pass()
        assert course.accuracy(cluster.folder) >= TARGET
    kinds = cluster.kinds(first.job)
    assert kinds.count("ReplicasChanged") >= 3
    assert {"BatchChanged", "LearningRateChanged"} <= set(kinds)


def test_a_job_can_be_paused_resumed_scaled_and_moved_while_its_output_is_followed(cluster: LiveCluster) -> None:
    followed, told = cluster.home / "followed", cluster.home / "told"
    course = cluster.train("steered", options=("--max-gpus", 1))
    cluster.wait_step(course, 5)
    with (
        cluster.following(followed, "logs", "-f", course.job) as logs,
        cluster.following(told, "events", "-f", "--all", "--json", "--limit", 0, course.job) as events,
    ):
        assert "1 to 2 GPUs" in cluster.pollux("scale", course.job, "--max", 2, "--min", 1)
        cluster.pollux("scale", course.job, "--min", 2)
        cluster.wait_gpus(course.job, lambda gpus: gpus == 2)
        cluster.wait_step(course, course.last_step + 5)
        [here] = cluster.job(course.job).allocation
        there = "n1" if here == "n0" else "n0"
        cluster.pollux("drain", here)  # every replica is replaced by another: the next main one takes over
        until(lambda: set(cluster.job(course.job).allocation) == {there}, lambda: cluster.story(course.job))
        cluster.wait_step(course, course.last_step + 5)

        assert "paus" in cluster.pollux("pause", course.job)
        view = cluster.wait(course.job, "paused")
        assert view.gpus == 0
        at_pause = course.last_step
        cluster.pollux("resume", course.job)  # on the other node, whose daemon is its home from now on
        cluster.wait_step(course, at_pause + 5)
        cluster.pollux("undrain", here)
        assert cluster.client.cluster().free_gpus == 2
        cluster.pollux("scale", course.job, "--min", 4, "--max", 4)  # also where it was at home before
        cluster.wait_gpus(course.job, lambda gpus: gpus == 4)
        cluster.wait_step(course, course.last_step + 5)
        assert course.job in cluster.pollux("top", "--once")
        [row] = cluster.json("ps")
        assert (row["id"], row["phase"], row["gpus"]) == (course.job, "running", 4)
        cluster.succeed(course)
        assert logs.wait(60) == 0  # it ends with the job
        until(lambda: '"JobFinished"' in told.read_text(), told.read_text)
        events.send_signal(signal.SIGINT)
        assert events.wait(60) == 130
    course.assert_each_step_once()
    course.assert_used_once_a_pass()
    kinds = cluster.kinds(course.job)
    assert (kinds.count("TrainingStarted"), kinds.count("TrainingResumed")) == (1, 1)
    assert not {"ReplicaLost", "GenerationAbandoned", "JobFailed"} & set(kinds)
    *steps, last = followed.read_text().splitlines()
    assert steps == [f"step {number}" for number in range(1, course.last_step + 1)]
    assert json.loads(last)["value"] >= TARGET
    shown = [json.loads(line) for line in told.read_text().splitlines()]
    assert [one["sequence"] for one in shown] == [event.sequence for event in cluster.events(course.job)]


def test_a_job_that_is_cancelled_leaves_its_gpus_and_says_so(cluster: LiveCluster) -> None:
    course = cluster.train("unwanted")
    cluster.wait_step(course, 3)
    cluster.pollux("cancel", "unwanted")
    cluster.pollux("wait", course.job, exit_code=3)
    assert cluster.client.cluster().free_gpus == 4
    refused = cluster.run("resume", course.job)
    assert refused.returncode == 1
    assert "has been cancelled: nothing can be changed any more" in refused.stderr


def test_a_job_that_crashes_is_tried_again_after_a_pause_and_fails_with_its_last_words(cluster: LiveCluster) -> None:
    script = cluster.home / "crash.py"
    script.write_text("from pollux.torch import Job\nprint('reading')\nraise RuntimeError('the data is gone')\n")
    job = cluster.pollux("submit", "--retries", 1, "--", "python", script).strip()
    until(lambda: cluster.job(job).failures == 1, lambda: cluster.story(job))
    waiting = cluster.job(job)
    assert waiting.phase is Phase.PENDING
    assert waiting.waits_for == "its next try, after 1 failure"
    ended = cluster.run("wait", job)
    assert ended.returncode == 1
    assert "the data is gone" in ended.stderr
    described = cluster.pollux("describe", job)
    assert "failed" in described
    assert "RuntimeError: the data is gone" in described
    assert "2; 1 are answered by another try" in described
    assert cluster.kinds(job).count("JobFailed") == 2
    again = cluster.run("run", "--retries", 0, "--", "python", script)
    assert again.returncode == 1
    assert "reading" in again.stdout
    assert "the data is gone" in again.stdout


# Plain commands


def test_a_plain_command_is_run_as_it_is_and_ends_as_it_does(cluster: LiveCluster) -> None:
    failed = cluster.run("run", "--gpus", 2, "--retries", 0, "--", "/bin/sh", "-c", "echo hi; echo oh >&2; exit 7")
    assert failed.returncode == 7
    assert failed.stdout.splitlines() == ["hi", "oh"]
    assert "failed" in failed.stderr
    odd = ["$HOME;ls", "*", "a  b", "`id`", ""]
    show = "import sys; print(sys.argv[1:])"
    done = cluster.run("run", "--gpus", 1, "--", sys.executable, "-c", show, *odd)
    assert (done.returncode, done.stdout) == (0, f"{odd}\n")
    [job] = [view for view in cluster.client.jobs(all=True).jobs if view.phase is Phase.SUCCEEDED][-1:]
    assert job.is_rigid
    assert cluster.pollux("logs", job.id) == f"{odd}\n"
    cluster.pollux("wait", job.id)


def test_a_plain_command_is_ended_with_its_children(cluster: LiveCluster) -> None:
    stubborn = "trap '' TERM; sleep 9876 & echo $!; setsid sleep 9876 & echo $!; wait"
    job = cluster.pollux("submit", "--gpus", 1, "--", "/bin/sh", "-c", stubborn).strip()
    until(lambda: cluster.pollux("logs", job).count("\n") == 2, lambda: cluster.story(job))
    children = [int(line) for line in cluster.pollux("logs", job).splitlines()]
    assert all(map(lives, children))
    cluster.pollux("cancel", job)
    assert cluster.wait(job, "cancelled", "failed", "succeeded").phase is Phase.CANCELLED
    until(lambda: not any(map(lives, children)), "the children are gone", 10.0)


def test_a_plain_command_that_is_paused_may_save_and_runs_again(cluster: LiveCluster) -> None:
    patient = "trap 'echo saved; exit 0' TERM; echo begun; while :; do sleep 0.1; done"
    job = cluster.pollux("submit", "--gpus", 2, "--", "/bin/sh", "-c", patient).strip()
    until(lambda: "begun" in cluster.pollux("logs", job), lambda: cluster.story(job))
    cluster.client.pause(job)
    cluster.wait(job, "paused")
    assert cluster.pollux("logs", job).splitlines()[-1] == "saved"
    cluster.client.resume(job)
    cluster.wait(job, "running")
    cluster.client.cancel(job)
    assert cluster.wait(job, "cancelled", "failed", "succeeded").phase is Phase.CANCELLED


def test_a_job_that_can_never_run_is_told_so_at_once(cluster: LiveCluster) -> None:
    refused = cluster.run("submit", "--gpus", 3, "--", "/bin/true")
    assert refused.returncode == 2
    assert "gpus" in refused.stderr
    assert "Traceback" not in refused.stderr


# Who else would start one, or ask


def test_a_second_one_in_the_same_folder_and_a_wrong_token_are_refused(cluster: LiveCluster) -> None:
    file = cluster.folder.running()
    assert file is not None
    assert_told(cluster.run("up"), 1, "A cluster runs already in", str(file.pid), "pollux down")
    wrong = cluster.home / "token"
    wrong.write_text("0" * 64)
    elsewhere = {"POLLUX_URL": file.url, "POLLUX_TOKEN_FILE": str(wrong)}
    assert_told(cluster.run("ps", env=elsewhere), 1, "POLLUX_TOKEN_FILE")
    right = elsewhere | {"POLLUX_TOKEN_FILE": str(cluster.folder.token_file)}
    assert cluster.run("ps", env=right).returncode == 0
    assert cluster.folder.running() == file


# What nobody else may see


def test_secrets_stay_secret_and_nothing_listens_to_the_outside(cluster: LiveCluster) -> None:
    out = cluster.home / "out" / "secretive"
    command = ("--env", "KEY", "--min-gpus", 3, "--max-gpus", 3, "--", "python", TRAIN, "--out", out)
    job = cluster.pollux("submit", *command, env={"KEY": SECRET}).strip()
    course = Course(job, out)
    cluster.wait_step(course, 5)
    command = ("--env", "KEY", "--gpus", 1, "--", "/bin/sh", "-c", "echo ${#KEY}; exec sleep 600")
    plain = cluster.pollux("submit", *command, env={"KEY": SECRET}).strip()
    until(lambda: cluster.pollux("logs", plain) == f"{len(SECRET)}\n", lambda: cluster.story(plain))
    processes = cluster.processes()
    assert len(processes) >= 1 + 2 + 2 + 3 + 1  # service, daemons, keepers, replicas, the command
    secrets = {SECRET, cluster.folder.token()}
    shown = {
        "processes": "\n".join(processes.values()),
        **{name: cluster.pollux(*words) for name, words in _all_that_is_shown(job, plain).items()},
        **{str(path): path.read_text(errors="replace") for path in _logs(cluster)},
    }
    for name, text in shown.items():
        assert text, name
        assert not [secret for secret in secrets if secret in text], name
    assert "KEY" in shown[f"describe {job}"]

    assert stat.S_IMODE(cluster.folder.path.stat().st_mode) == 0o700
    for name in ("token", "pollux.db", "service.log", "service.out"):
        assert stat.S_IMODE((cluster.folder.path / name).stat().st_mode) == 0o600, name

    listening = {address for pid in processes for address in _listening(pid)}
    assert listening
    assert listening <= {"127.0.0.1", "::1"}
    cluster.client.cancel(plain)
    cluster.succeed(course)


def _all_that_is_shown(*jobs: str) -> dict[str, tuple[object, ...]]:
    return {
        **{f"describe {job}": ("describe", job) for job in jobs},
        "describe --json": ("describe", jobs[0], "--json"),
        "events --json": ("events", "--json", "--limit", 0),
        "events": ("events",),
        "ps --json": ("ps", "-a", "--json"),
        "nodes --json": ("nodes", "--json"),
        "top --json": ("top", "--json"),
    }


def _logs(cluster: LiveCluster) -> list[Path]:
    found = [cluster.folder.log, *cluster.folder.path.rglob("*.log"), *cluster.folder.path.rglob("*.out")]
    return [path for path in found if path.stat().st_size]


def _listening(pid: int) -> set[str]:
    """Addresses of the TCP sockets that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed))
    return found
