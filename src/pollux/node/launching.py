"""Daemons on this machine that act as nodes, for as long as one process wants them: `pollux launch`, tests, benchmarks.

with LocalCluster(nodes=2) as cluster:
    generation = cluster.run(Launch(JobId("train"), "/path/train.py"), 2)
    cluster.wait("train", generation)
    cluster.resize("train", 4)
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pollux.core import NodeId, StopReason
from pollux.errors import InvalidSpec, Permanent, PolluxError, Temporary
from pollux.node.devices import visible_devices as visible_devices
from pollux.node.folder import StateFolder, last_lines
from pollux.node.launched import Launched
from pollux.wire.frames import ask
from pollux.wire.nodes import DescribeNode, NodeDescription, RunPhase

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "pollux.cli.main", "node")
START_TIMEOUT_S = 180.0
"""A node first loads torch, which takes many seconds on a busy machine."""
END_TIMEOUT_S = 60.0
MIN_CPU_SLOTS = 8
"""Cores can be shared, so that a small machine still shows how a job grows."""
POLL_S = 0.02


class DaemonProcess:
    """One daemon, started as often as need be on its folder."""

    def __init__(self, folder: Path, token_file: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.pid = 0
        self._state = StateFolder(folder, token_file)
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_left_something(self) -> bool:
        """A keeper, and perhaps replicas, of a daemon that was killed."""
        return not self.is_alive and (self.folder / "keeper.sock").exists()

    def description(self) -> NodeDescription | None:
        """None: no daemon answers on this folder."""
        try:
            answer = ask(self._state.address, self._state.token, DescribeNode(), 5.0)
        except (Temporary, Permanent):
            return None
        return answer if isinstance(answer, NodeDescription) else None

    def start(self) -> None:
        """Returns at once; see `wait_until_ready`."""
        with (self.folder / "node.out").open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment,
                start_new_session=True,  # Ctrl-C at the terminal is for the launcher
            )
        self.pid = self._process.pid

    def wait_until_ready(self, until_s: float) -> None:
        assert self._process is not None
        while (said := self.description()) is None or said.pid != self.pid:
            code = self._process.poll()
            if code is not None or time.monotonic() > until_s:
                how = "did not answer in time" if code is None else f"ended with exit code {code} as it was started"
                words = last_lines(self.folder / "node.out", 5) or "nothing"
                raise Permanent(f"The daemon in {self.folder} {how}. Its last lines: {words}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """By kill -9: what it started lives on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def ask_to_end(self) -> None:
        if self.is_alive:
            os.kill(self.pid, signal.SIGTERM)

    def wait_until_ended(self, until_s: float) -> bool:
        """False: it had to be killed."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        (self.folder / "node.out").unlink(missing_ok=True)  # node.log says the same
        return True

    def end_predecessor(self, until_s: float) -> None:
        """A daemon whose launcher was killed ends by itself; this hurries it, and waits."""
        while (said := self.description()) or self._is_locked():
            if said is not None:
                with suppress(ProcessLookupError):
                    os.kill(said.pid, signal.SIGTERM)
            if time.monotonic() > until_s:
                who = f"Process {said.pid}, a" if said else "A"
                raise Permanent(f"{who} daemon that is left in {self.folder} does not end. Kill it.")
            time.sleep(0.2)

    def _is_locked(self) -> bool:
        try:
            self._state.lock()
        except Permanent:
            return True
        self._state.close()
        return False


class LocalCluster(Launched):
    """Starts so many daemons, and ends them with all that they started. Only one at a time uses a folder.

    `slots`: of each node; by default its share of the GPUs, or what a CPU can bear. `options`: more of `pollux node`.
    `folder`: kept, with all logs, and used again by the next one with it; None: a temporary one.
    """

    def __init__(
        self,
        folder: Path | None = None,
        nodes: int = 1,
        slots: int | None = None,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._is_temporary = folder is None
        # Not tempfile's default folder: its path may be too long for sockets.
        super().__init__(Path(tempfile.mkdtemp(prefix="pollux-", dir="/tmp")) if folder is None else folder)
        self._state = StateFolder(self.folder)
        self._environment = dict(os.environ if environment is None else environment)
        self._options = tuple(options)
        self._lock()
        try:
            devices = visible_devices(self._environment)
            room = slots_per_node(nodes, devices) if slots is None else slots
            self.daemons = [self._daemon(position, room, devices) for position in range(nodes)]
            self._start(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def kill_daemon(self, position: int) -> None:
        """By kill -9. Replicas live on."""
        self.daemons[position].kill()

    def restart_daemon(self, position: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """As after a crash: killed if it is there, started, and back when this returns."""
        daemon = self.daemons[position]
        daemon.kill()
        daemon.start()
        daemon.wait_until_ready(time.monotonic() + timeout_s)

    def close(self, *, at_once: bool = False) -> None:
        """End everything; replicas save first, unless it has to be `at_once`. May be called again."""
        daemons = getattr(self, "daemons", [])
        until_s = time.monotonic() + END_TIMEOUT_S
        for daemon in daemons:
            if daemon.has_left_something:  # only a daemon can end what another one left
                daemon.start()
                with suppress(Permanent):
                    daemon.wait_until_ready(until_s)
        if at_once and daemons:
            self._cancel_all()
        super().close()
        for daemon in daemons:
            daemon.ask_to_end()
        stubborn = [daemon for daemon in daemons if not daemon.wait_until_ended(until_s)]
        self._state.close()
        if stubborn:
            raise Permanent(f"The daemon in {stubborn[0].folder} did not end and was killed; its replicas may live on.")
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _lock(self) -> None:
        try:
            self._state.lock()
        except Permanent:
            name = self.folder.name
            fix = f"Resize it with pollux resize {name} N, end it, or give another name"
            raise InvalidSpec("name", name, f"a launch of that name runs already in {self.folder}", fix) from None

    def _daemon(self, position: int, slots: int, devices: Sequence[str]) -> DaemonProcess:
        node = NodeId(f"n{position}")
        mine = devices[position * slots : (position + 1) * slots]
        shared = {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if len(mine) == slots else {}
        command = [*COMMAND, "--dir", str(self.folder / node), "--node", node, "--slots", str(slots), "--ephemeral"]
        command += ["--token-file", str(self._state.token_file), "--inherit-env", *self._options]
        return DaemonProcess(self.folder / node, self._state.token_file, command, {**self._environment, **shared})

    def _start(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        known = {daemon.folder for daemon in self.daemons}
        found = (path.parent for path in sorted(self.folder.glob("n*/keeper.sock")))
        extra = [self._daemon(int(path.name[1:]), 1, ()) for path in found if path not in known]
        for daemon in (*self.daemons, *extra):
            daemon.end_predecessor(until_s)
        leftover = [daemon for daemon in extra if daemon.has_left_something]
        for daemon in (*self.daemons, *leftover):
            daemon.start()
        try:
            for daemon in (*self.daemons, *leftover):
                daemon.wait_until_ready(until_s)
            self._stop_all()
        finally:
            for daemon in leftover:
                daemon.ask_to_end()
                daemon.wait_until_ended(time.monotonic() + END_TIMEOUT_S)
        for path in self.folder.glob("n*/node.json"):
            if path.parent not in known:
                path.unlink()
        _ = self.news  # from now on nothing is missed

    def _stop_all(self) -> None:
        """Jobs that a killed launcher left running are saved: they go on when they are run again."""
        for job in self._jobs_that_run():
            self.wait_end(job, self.stop(job), END_TIMEOUT_S)
        super().close()  # what these jobs told is nobody's news

    def _cancel_all(self) -> None:
        with suppress(PolluxError, TimeoutError):
            for job in self._jobs_that_run():
                self.wait_end(job, self.stop(job, StopReason.CANCELLED), END_TIMEOUT_S)

    def _jobs_that_run(self) -> list[str]:
        return [run.job for run in self.runs() if run.phase is not RunPhase.ENDED]


def slots_per_node(nodes: int, devices: Sequence[str]) -> int:
    """What each of so many nodes on this machine offers."""
    if not devices:
        return max(os.cpu_count() or 1, MIN_CPU_SLOTS)
    if len(devices) < nodes:
        raise InvalidSpec("nodes", nodes, f"more than the {len(devices)} GPUs to share", "Use fewer, or give the slots")
    return len(devices) // nodes
