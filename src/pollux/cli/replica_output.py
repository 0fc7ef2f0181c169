"""What the replicas of a job print, gathered from their logs: the main one's as it is, the others' with their names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from pollux.wire.nodes import ReplicaHere

MOST_BYTES = 1 << 20
"""Of one log at a time."""


@dataclass(slots=True)
class _Log:
    path: Path
    offset: int
    is_alive: bool = True
    rest: bytes = b""
    """A line that has no end yet."""

    def read(self, ends: bytes) -> bytes:
        """What was added, up to the last of these bytes; if the replica has ended, all of it."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                came = file.read(MOST_BYTES)
        except OSError:
            came = b""
        self.offset += len(came)
        text = self.rest + came
        end = max(text.rfind(bytes([letter])) for letter in ends) + 1
        if not came and not self.is_alive and text:
            text += b"" if text.endswith(b"\n") else b"\n"
            end = len(text)
        self.rest = text[end:]
        return text[:end]


class ReplicaOutput:
    """Shows on standard output what comes to the logs. What is in them from the start is not shown."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the launch."""
        self._logs: dict[str, _Log] = {}
        self._main: str | None = None
        self._old = {path: path.stat().st_size for path in folder.glob("n*/jobs/*/logs/*.log")}

    def know(self, here: ReplicaHere) -> None:
        if here.log and here.replica not in self._logs:
            path = Path(here.log)
            self._logs[here.replica] = _Log(path, self._old.get(path, 0))
        if here.has_ended and here.replica in self._logs:
            self._logs[here.replica].is_alive = False

    def show(self) -> bool:
        """Show what is new; False if that was nothing."""
        has_shown, main = False, self._main or self._oldest()
        for replica in sorted(self._logs, key=_number):
            log = self._logs[replica]
            new = log.read(b"\r\n" if replica == main else b"\n")
            if not new:
                continue
            has_shown = True
            text = new.decode("utf-8", "replace")
            if replica != main:
                lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n"))
                text = "".join(f"[{replica}] {line}\n" for line in lines)
            typer.echo(text, nl=False)
        return has_shown

    def choose_main(self) -> None:
        """Those that live train together: the oldest of them is the main one, also after its end."""
        self._main = self._oldest()

    def forget_main(self) -> None:
        """All have ended, and others are about to begin."""
        self._main = None

    def finish(self) -> None:
        """Nothing comes any more: show all that is left."""
        main = self._main or self._oldest()
        for log in self._logs.values():
            log.is_alive = False
        self._main = main
        while self.show():
            pass

    def _oldest(self) -> str | None:
        """Ranks go by age."""
        living = [replica for replica, log in self._logs.items() if log.is_alive]
        return min(living or self._logs, key=_number, default=None)


def _number(replica: str) -> int:
    """The one that counts replicas, in GENERATION-NUMBER."""
    number = replica.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
