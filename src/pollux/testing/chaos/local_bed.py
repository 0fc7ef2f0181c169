"""A cluster on this machine as a test bed: `pollux up` in a folder of its own, on a small file system for root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pollux.errors import Temporary
from pollux.service.place import ClusterFolder
from pollux.testing.chaos.bed import Record, Told
from pollux.testing.chaos.processes import Process, Role, processes_of
from pollux.testing.chaos.quick import RETRY_PAUSE_S
from pollux.wire.service_client import ServiceClient

SCRIPTS = Path(__file__).with_name("scripts")
QUICK = Path(__file__).with_name("quick.py")
UP_TIMEOUT_S = 90.0
COMMAND_TIMEOUT_S = 120.0
DISK_BYTES = 256 * 2**20
BALLAST = ".ballast"
SETTINGS = ("--interval", "1", "--set", "policy.realloc_delay_s=0.5")
"""Rounds often, and re-allocations worth while for jobs of seconds."""


class LocalBed:
    """Some nodes of two CPU slots each. Implements `Bed`."""

    def __init__(self, num_nodes: int = 2, slots: int = 2) -> None:
        # Not the test runner's folder: the paths of sockets must be short.
        self.home = Path(tempfile.mkdtemp(prefix="pollux-chaos-", dir="/tmp"))
        self.folder = ClusterFolder(self.home / "cluster")
        self.record = Record()
        self.nodes: Sequence[str] = tuple(f"n{number}" for number in range(num_nodes))
        self.retry_pause_s = RETRY_PAUSE_S
        self._shape = ("--nodes", str(num_nodes), "--slots", str(slots), *SETTINGS)
        (self.home / "tmp").mkdir()
        self.folder.path.mkdir(mode=0o700)
        self._is_mounted = self._mount()

    # Commands

    def up(self, *options: str, timeout_s: float = UP_TIMEOUT_S) -> Told:
        port = () if "--port" in options else ("--port", "0")
        return self._run([str(QUICK), "up", *self._shape, *port, *options], timeout_s)

    def pollux(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Told:
        return self._run(["-m", "pollux.cli.main", *arguments], timeout_s)

    def client(self, timeout_s: float = 10.0) -> ServiceClient:
        file = self.folder.running()
        if file is None:
            raise Temporary(f"No service runs in {self.folder.path}.", 0.1)
        return ServiceClient(file.url, self.folder.token(), timeout_s)

    def _run(self, arguments: list[str], timeout_s: float) -> Told:
        began_s = time.monotonic()
        # Into files: a daemon that outlives the command may have kept its pipes, and nobody would see their end.
        with tempfile.TemporaryFile(dir=self.home) as out, tempfile.TemporaryFile(dir=self.home) as err:
            process = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                env=self._environment(),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            exit_code: int | None
            try:
                exit_code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                exit_code = None
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace"))
        return Told(exit_code, texts[0], texts[1], time.monotonic() - began_s)

    def _environment(self) -> dict[str, str]:
        """Every process of the cluster inherits the folder, by which it is found."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("POLLUX_")}
        here = {"POLLUX_HOME": str(self.home), "TMPDIR": str(self.home / "tmp")}
        return kept | here | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    # Processes

    def find(self, role: Role | None = None, node: str | None = None) -> list[Process]:
        return [
            one for one in processes_of(self.home, self.folder) if role in (None, one.role) and node in (None, one.node)
        ]

    def send(self, process: Process, number: int) -> bool:
        if not process.lives:
            return False
        self.record.note(process, number)  # before: whoever reads the record must not find an end without a cause
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
            return True
        return False

    def node_folder(self, node: str) -> Path:
        return self.folder.nodes / node

    # The disk

    def _mount(self) -> bool:
        if os.geteuid() != 0:
            return False
        options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(self.folder.path)]
        try:
            return subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def fill_disk(self) -> str | None:
        if not self._is_mounted:
            return "needs the right to mount a small file system: run it as root"
        with (self.folder.path / BALLAST).open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        return None

    def free_disk(self) -> None:
        (self.folder.path / BALLAST).unlink(missing_ok=True)

    # The end

    def keep(self) -> Path:
        self._kill_all()
        if self._is_mounted:
            kept = self.home / "kept"
            shutil.copytree(self.folder.path, kept, symlinks=True, ignore=_sockets, dirs_exist_ok=True)
            self._unmount()
            self.folder.path.rmdir()
            kept.rename(self.folder.path)
        return self.home

    def close(self) -> None:
        self._kill_all()
        self._unmount()
        shutil.rmtree(self.home, ignore_errors=True)

    def _kill_all(self) -> None:
        while found := self.find():
            for one in found:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            time.sleep(0.02)

    def _unmount(self) -> None:
        if self._is_mounted:
            # Lazily: a process that is just ending may still be in it.
            subprocess.run(["umount", "--lazy", str(self.folder.path)], capture_output=True, check=False)
            self._is_mounted = False


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]
