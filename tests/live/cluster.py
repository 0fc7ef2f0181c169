"""A whole cluster for tests: `pollux up` in a folder of its own, and everything through the command line and REST."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.live.course import Course

from pollux.agent.lingering import LINGER_S
from pollux.cli.down import EXIT_TIMEOUT_S
from pollux.cli.up import START_TIMEOUT_S
from pollux.core import Phase
from pollux.service.place import ClusterFolder
from pollux.wire.api import EventView, JobView
from pollux.wire.service_client import ServiceClient

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
POLLUX = (sys.executable, "-P", "-m", "pollux.cli.main")
PATIENCE_S = START_TIMEOUT_S
"""Long past what any step of these tests needs, and no less than what `pollux up` itself waits."""
QUICK = ("--interval", "1", "--set", "policy.realloc_delay_s=0.5")
"""Rounds often, and re-allocations worth while for jobs of seconds."""


def until(is_so: Callable[[], bool], what: object, patience_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"did not come about within {patience_s:g} s: {what() if callable(what) else what}")
        time.sleep(0.02)


def assert_told(done: subprocess.CompletedProcess[str], exit_code: int, *parts: str) -> None:
    """The command ended with a sentence that says all this, and not with a traceback."""
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


class LiveCluster:
    """Its service, its daemons and their jobs. `up` starts it, again and again if need be; `end` leaves nothing."""

    def __init__(self) -> None:
        self.shell: dict[str, str] = {}
        """What the shell has, in which commands are run, beside what this process has."""
        self.python = sys.executable
        # Not pytest's folder: the paths of sockets must be short.
        self.home = Path(tempfile.mkdtemp(prefix="pollux-live-", dir="/tmp"))
        self.folder = ClusterFolder(self.home / "cluster")
        self._client: ServiceClient | None = None
        self._known = ("", "")
        """The address and the token that it has."""

    # Commands

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("POLLUX_")}
        return plain | {"POLLUX_HOME": str(self.home), "OMP_NUM_THREADS": "1"} | self.shell | dict(more or {})

    def pollux(self, *arguments: object, exit_code: int | None = 0, env: Mapping[str, str] | None = None) -> str:
        """What the command prints to standard output. `exit_code`: what it must end with; None: whatever."""
        done = self.run(*arguments, env=env)
        assert exit_code in (None, done.returncode), f"pollux {arguments} ended with {done.returncode}:\n{done.stderr}"
        return done.stdout

    def run(self, *arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *POLLUX[1:], *map(str, arguments)],
            env=self.environment(env),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    @contextmanager
    def following(self, output: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
        """A command that goes on by itself and prints into a file; it is killed at the end, if it still runs."""
        with (
            output.open("wb") as file,
            subprocess.Popen(
                [*POLLUX, *map(str, arguments)],
                env=self.environment(),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.DEVNULL,
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    # The cluster

    def up(self, *arguments: object) -> LiveCluster:
        self.pollux("up", *arguments)
        return self

    def start(self, nodes: int = 2) -> LiveCluster:
        """For the first time: four slots in all."""
        return self.up("--nodes", nodes, "--slots", 4 // nodes, "--port", 0, *QUICK)

    def down(self, *arguments: object) -> None:
        self.pollux("down", *arguments)

    def kill_service(self) -> None:
        """It notices nothing, and nor do its daemons. Returns when it is gone."""
        file = self.folder.running()
        assert file is not None
        os.kill(file.pid, signal.SIGKILL)
        until(lambda: not self.folder.is_locked, "the service is gone")

    def kill_all(self) -> None:
        """As when the machine goes down."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def processes(self) -> dict[int, str]:
        """Everything that runs for this cluster, by what it was started with: pid, command line."""
        mark, found = os.fsencode(self.home), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (folder / "cmdline").read_bytes()  # empty: it has ended, and nobody has asked how
                if command and int(folder.name) != os.getpid() and mark in command + (folder / "environ").read_bytes():
                    found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def end(self) -> None:
        """Down, and nothing may be left."""
        self._leave()
        ended = self.run("down")
        left = self._left()
        self.kill_all()
        text = "" if ended.returncode == 0 else f"{ended.stderr}\n{self.logs()}"
        shutil.rmtree(self.home)
        assert not text, text
        assert not left, left

    def _left(self) -> dict[int, str]:
        """What lives on after `down`; what is just ending, or keeps connections for a moment, is given time for it."""
        with suppress(TimeoutError):
            until(lambda: not self.processes(), "", LINGER_S + EXIT_TIMEOUT_S + 20.0)
        return self.processes()

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def client(self) -> ServiceClient:
        """Of the service that runs now."""
        file = self.folder.running()
        assert file is not None, "no service runs"
        known = (file.url, self.folder.token())
        if self._client is None or self._known != known:
            self._leave()
            self._client, self._known = ServiceClient(*known), known
        return self._client

    # Jobs

    def train(self, name: str, *arguments: object, options: tuple[object, ...] = (), script: Path = TRAIN) -> Course:
        """Submit `train.py`, or a script that runs it; the options are those of `pollux submit`."""
        out = self.home / "out" / name
        command = ("--name", name, *options, "--", "python", script, "--out", out, *arguments)
        return Course(self.pollux("submit", *command).strip(), out)

    def job(self, job: str) -> JobView:
        return self.client.job(job).job

    def phase(self, job: str) -> Phase:
        return self.job(job).phase

    def wait(self, job: str, *phases: str) -> JobView:
        until(lambda: self.phase(job) in phases, lambda: f"{job} is {phases}: {self.story(job)}")
        return self.job(job)

    def wait_gpus(self, job: str, is_right: Callable[[int], bool]) -> JobView:
        """Until it trains on so many GPUs."""

        def has() -> bool:
            view = self.job(job)
            assert not view.phase.is_terminal, self.story(job)
            return view.phase is Phase.RUNNING and is_right(view.gpus)

        until(has, lambda: f"{job} has other GPUs: {self.story(job)}")
        return self.job(job)

    def wait_step(self, course: Course, step: int) -> None:
        until(lambda: course.last_step >= step, lambda: f"step {step} of {course.job}: {self.logs()}")

    def succeed(self, course: Course) -> JobView:
        """Let it come to its end, and see that it did well."""
        course.finish()
        view = self.wait(course.job, "succeeded", "failed", "cancelled")
        assert view.phase is Phase.SUCCEEDED, self.story(course.job)
        return view

    def events(self, job: str) -> list[EventView]:
        found: list[EventView] = []
        while page := self.client.events(found[-1].sequence if found else 0, job=job, limit=1000).events:
            found += page
        return found

    def kinds(self, job: str) -> list[str]:
        return [event.kind for event in self.events(job)]

    def story(self, job: str) -> str:
        told = (event.text for event in self.events(job) if event.kind not in ("JobReported", "LearningRateChanged"))
        return "\n".join([repr(self.job(job)), *told, self.logs()])

    def logs(self, characters: int = 1000) -> str:
        """The ends of all logs, to tell a failed test by."""
        found = [self.folder.log, self.folder.out, *sorted(self.folder.nodes.glob("n*/jobs/*/logs/*.log"))]
        parts = [(path, path.read_text(errors="replace")[-characters:]) for path in found if path.exists()]
        return "\n".join(f"--- {path.relative_to(self.folder.path)}\n{text}" for path, text in parts)

    def json(self, *arguments: object, exit_code: int | None = 0) -> Any:
        return json.loads(self.pollux(*arguments, "--json", exit_code=exit_code))
