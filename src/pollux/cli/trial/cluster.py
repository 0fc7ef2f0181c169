"""A cluster that lives as long as a trial: in a folder of its own, started and ended by commands that users have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from pollux.cli.finding import find
from pollux.errors import Permanent, PolluxError, Temporary

if TYPE_CHECKING:
    from pollux.wire.service_client import ServiceClient

T = TypeVar("T")

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "pollux.cli.main")
DOWN_TIMEOUT_S = 60.0
SILENCE_S = 60.0
"""A service that does not answer for so long has died, and nobody here has killed it."""
LOOK_S = 0.2
GRACE_S = 5.0
"""What is still there after `pollux down` may end by itself for so long."""
NOT_OURS = (
    *("POLLUX_URL", "POLLUX_TOKEN_FILE", "POLLUX_HOME", "POLLUX_DEBUG"),
    *("POLLUX_COMPRESS", "POLLUX_REALLOC_DELAY_S", "POLLUX_MACHINE_SLOTS"),
)
"""Variables of the shell that are about other clusters, or none."""


class TrialCluster:
    """`with TrialCluster(folder, "pollux", …) as cluster`: it runs inside, and nothing of it is left afterwards.

    Also after Ctrl-C. What `pollux down` should have ended and has not is killed, and counted in `left`.
    """

    def __init__(
        self,
        folder: Path,
        policy: str,
        *,
        nodes: int,
        slots: int,
        interval_s: float,
        use_gpus: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        """`use_gpus`: all GPUs of the machine instead of slots. `options`: more of `pollux up`."""
        self.folder = folder
        self.left: list[int] = []
        """Processes that had to be killed; known after the end."""
        self._options = ["--policy", policy, "--interval", f"{interval_s:g}", "--port", "0"]
        self._options += ["--nodes", "1" if use_gpus else str(nodes), "--slots", "0" if use_gpus else str(slots)]
        self._options += options
        kept = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
        # Each process that belongs to it names the folder, by which a straggler is found: those that are forked in the
        # command line of their keeper, all others in their environment.
        self._environment = {**kept, "POLLUX_HOME": str(folder)}
        if not use_gpus:
            self._environment["CUDA_VISIBLE_DEVICES"] = ""
        self._client: ServiceClient | None = None

    def __enter__(self) -> Self:
        try:
            self._call("up", *self._options)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, question: Callable[[ServiceClient], T]) -> T:
        """The answer of the service, which may just be starting again."""
        until_s = time.monotonic() + SILENCE_S
        while True:
            try:
                if self._client is None:
                    self._client = find(self.folder)
                return question(self._client)
            except Temporary:
                self._hang_up()
                if time.monotonic() > until_s:
                    raise
            except Permanent:  # there is no service, or it is not listening yet
                if self._client is not None or time.monotonic() > until_s:
                    raise
            time.sleep(LOOK_S)

    def kill_service(self) -> None:
        """With SIGKILL; its daemons and jobs are not touched."""
        from pollux.service.place import ClusterFolder

        running = ClusterFolder(self.folder).running()
        if running is None:
            raise Permanent(f"There is no service in {self.folder} to kill. See {self.folder / 'service.log'}.")
        os.kill(running.pid, signal.SIGKILL)

    def start_again(self) -> None:
        """The service that was killed: all it is told is where."""
        self._call("up")

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _end(self) -> None:
        self._hang_up()
        with _undisturbed():
            with suppress(PolluxError):
                self._call("down", "--timeout", f"{DOWN_TIMEOUT_S:g}")
            self.left = _swept(str(self.folder))

    def _call(self, command: str, *options: str) -> None:
        """A command of ours; if it fails, what it said is the error."""
        # In a session of its own, Ctrl-C does not reach it: who presses that wants the end, but a whole one.
        done = subprocess.run(
            [*COMMAND, command, "--dir", str(self.folder), *options],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        if done.returncode:
            said = done.stderr.strip().removeprefix("error: ") or done.stdout.strip() or "It said nothing."
            raise Permanent(f"pollux {command} ended with exit code {done.returncode}. {said}")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C has been pressed, and is pressed again: the end of a cluster is not cut short."""
    before = {}
    with suppress(ValueError):  # not in the main thread: no signals there
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """A polite kill ends the cluster as Ctrl-C does."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _swept(mark: str) -> list[int]:
    """Processes of the cluster that did not end; they are killed. Nothing is found where there is no /proc."""
    until_s = time.monotonic() + GRACE_S
    while left := processes_of(mark):
        if time.monotonic() > until_s:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return left
        time.sleep(LOOK_S)
    return []


def processes_of(mark: str) -> list[int]:
    """Other processes than this one that name a folder in their command line or in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            is_ours = any(mark.encode() in (process / file).read_bytes() for file in ("cmdline", "environ"))
            if is_ours and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found
