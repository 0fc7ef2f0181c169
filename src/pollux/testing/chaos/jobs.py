"""The jobs of a campaign: real ones, of kinds whose end is known beforehand, each with a folder for its witnesses."""

from __future__ import annotations

import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.errors import PolluxError
from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.local_bed import SCRIPTS
from pollux.testing.chaos.watch import Watch
from pollux.testing.chaos.witness import FINISH, Run, runs_in

FOR_EVER = 1000
"""Retries of jobs that have to succeed, whatever is done to them."""
KINDS = {"elastic": 10, "works": 4, "fails": 2, "breaks": 2, "leaves": 2}
"""How often each is submitted, relative to the others."""
RESOLVE_S = 3.0
"""After a submission that may or may not have arrived, a list of jobs that is so much younger tells."""


@dataclass
class Ticket:
    """One job as the campaign wants it, and what it knows of it."""

    token: str
    """Unique, also where ids should be and are not: the job has it as its team."""
    kind: str
    document: dict[str, Any]
    folder: Path
    code: int = 0
    """How each of its processes means to end; signals as their negatives."""
    retries: int = 0
    id: str = ""
    """Empty until the service has said it."""
    sent_s: float | None = None
    """By the monotonic clock: since when it is not known whether the submission arrived."""

    @property
    def is_elastic(self) -> bool:
        return self.kind in ("elastic", "nonsense")

    @property
    def must_succeed(self) -> bool:
        return self.retries >= FOR_EVER

    def runs(self) -> list[Run]:
        return runs_in(self.folder)

    def __str__(self) -> str:
        return f"{self.id or self.token} ({self.kind})"


class Crew:
    """Submits jobs, so that some are always there. The same seed gives the same jobs in the same order."""

    def __init__(self, bed: Bed, watch: Watch, seed: int, *, num_unfinished: int = 4) -> None:
        self.tickets: list[Ticket] = []
        self._bed = bed
        self._watch = watch
        self._draw = random.Random(f"jobs/{seed}")
        self._num_unfinished = num_unfinished
        self._waiting: list[Ticket] = []
        """Made, and not known to have arrived."""

    @property
    def submitted(self) -> list[Ticket]:
        """Those that the service has taken."""
        return [ticket for ticket in self.tickets if ticket.id]

    def tend(self, *, may_grow: bool = True) -> None:
        """Submit what is missing, if the service takes it; to be called often."""
        unfinished = [ticket for ticket in self.submitted if not self._watch.is_over(ticket.token)]
        if may_grow and not self._waiting and len(unfinished) < self._num_unfinished:
            self._waiting.append(self._make(self._next_kind()))
        for ticket in list(self._waiting):
            self._try(ticket)

    def add(self, kind: str) -> Ticket:
        """One more of that kind, as soon as the service takes it."""
        ticket = self._make(kind)
        self._waiting.append(ticket)
        self._try(ticket)
        return ticket

    def finish(self) -> None:
        """Let those that wait for it come to their ends, and submit nothing any more."""
        for ticket in self.tickets:
            ticket.folder.mkdir(parents=True, exist_ok=True)
            (ticket.folder / FINISH).touch()

    @property
    def is_settled(self) -> bool:
        """Whether it is known of each submission whether it arrived."""
        return not self._waiting

    def _try(self, ticket: Ticket) -> None:
        if ticket.sent_s is not None:
            found = self._watch.view(ticket.token)
            if found is None and self._watch.looked_s < ticket.sent_s + RESOLVE_S:
                return
            ticket.id, ticket.sent_s = "" if found is None else found.id, None
        if not ticket.id:
            try:
                with self._bed.client() as client:
                    ticket.sent_s = time.monotonic()
                    ticket.id = client.submit(ticket.document).id
                ticket.sent_s = None
            except PolluxError:
                return
        self._waiting.remove(ticket)
        self._watch.expect(ticket.token, ticket.folder)

    def _next_kind(self) -> str:
        if not self.tickets:
            return "patient"
        (kind,) = self._draw.choices(list(KINDS), list(KINDS.values()))
        return kind

    def _make(self, kind: str) -> Ticket:
        draw = self._draw
        token = f"{len(self.tickets):03d}-{kind}"
        folder = self._bed.home / "witness" / token
        common: dict[str, Any] = {"name": kind, "team": token, "working_dir": str(self._bed.home)}
        if kind in ("elastic", "nonsense"):
            arguments = ["--passes", str(draw.randint(2, 4)), "--step-s", f"{draw.uniform(0.06, 0.14):.3f}"]
            if kind == "nonsense":
                arguments += ["--nonsense", "6"]
            least = draw.choice((1, 1, 2))
            more = {"min_gpus": least, "max_gpus": draw.randint(least, 3), "retries": FOR_EVER}
            command = ["python", str(SCRIPTS / "train.py"), "--witness", str(folder), *arguments]
            ticket = Ticket(token, kind, {**common, **more, "command": command}, folder, 0, FOR_EVER)
        else:
            code, retries, arguments = _plan(kind, draw)
            program = [sys.executable, "-E", "-S", str(SCRIPTS / "command.py"), "--witness", str(folder)]
            more = {"gpus": 1, "retries": retries}
            ticket = Ticket(token, kind, {**common, **more, "command": [*program, *arguments]}, folder, code, retries)
        self.tickets.append(ticket)
        return ticket


def _plan(kind: str, draw: random.Random) -> tuple[int, int, list[str]]:
    """Exit code, retries and arguments of a plain command."""
    seconds = ["--seconds", f"{draw.uniform(0.5, 8.0):.1f}"]
    match kind:
        case "fails":
            code = draw.choice((1, 7, 42, 100))
            return code, draw.choice((0, 0, 1)), [*seconds, "--code", str(code)]
        case "breaks":
            number = draw.choice((signal.SIGUSR2, signal.SIGKILL, signal.SIGTERM))
            return -number, draw.choice((0, 0, 1)), [*seconds, "--signal", str(int(number))]
        case "leaves":
            return 0, draw.choice((0, FOR_EVER)), [*seconds, "--children", "2"]
        case "patient":
            return 0, FOR_EVER, ["--until-told"]
    return 0, draw.choice((0, FOR_EVER)), seconds
