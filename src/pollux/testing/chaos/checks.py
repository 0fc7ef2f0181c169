"""What must hold after a campaign. Each check gives sentences on what does not; none is ever made to pass more easily.

The truth is what processes wrote of themselves (`witness`) and which signals the campaign sent (`Record`). Where
a process was killed just as it came to its end, both ways are true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pollux.core import Phase
from pollux.testing.chaos.bed import Record
from pollux.testing.chaos.jobs import Ticket
from pollux.testing.chaos.violations import Kind, Violation
from pollux.testing.chaos.witness import Run
from pollux.wire.api import JobView

UNKNOWN = re.compile(r"unknown", re.IGNORECASE)
NO_ROOM = "No space left"
SIGKILL = -9
RECORDED_S = 5.0
"""How long after a process' end its exit code may still be on its way to the disk."""


class Truth:
    """What is known of the processes of a campaign beyond what they say."""

    def __init__(self, record: Record, *, has_witnesses: bool, was_full: bool) -> None:
        self._record = record
        self._has_witnesses = has_witnesses
        self.was_full = was_full

    def ends(self, run: Run) -> set[int]:
        """How it may have ended; empty: by none of its own doing or ours, as when Pollux ends it."""
        found = set() if run.code is None else {run.code}
        return found | {SIGKILL} if self._record.is_killed(run.pid, run.began) else found

    def is_forgotten(self, run: Run) -> bool:
        """Whether all that could have known its exit code was killed meanwhile."""
        span = (run.started_s, run.last_s + RECORDED_S)
        return bool(self._record.nodes_without_record(*span, has_witnesses=self._has_witnesses))


def check_job(ticket: Ticket, view: JobView | None, seen: JobView | None, truth: Truth) -> Iterator[Violation]:
    """One job. `view`: what the service says in the end; `seen`: its outcome when it was first told."""
    runs = ticket.runs()
    told = view or seen
    if told is None:
        yield Violation(Kind.LOST_JOB, f"{ticket} was submitted, and nobody knows it any more")
    elif not told.phase.is_terminal:
        yield Violation(Kind.LOST_JOB, f"{ticket} did not come to an end: {_said(told)}")
    else:
        yield from (_elastic if ticket.is_elastic else _plain)(ticket, told, runs, truth)
    if obeyed := [order for run in runs for order in run.obeyed]:
        sentence = f"{ticket} has no say in other jobs, but {len(obeyed)} of its orders were obeyed: {obeyed[0]} …"
        yield Violation(Kind.WRONG_STATE, sentence)


def check_ids(tickets: Sequence[Ticket]) -> Iterator[Violation]:
    """An id is given once: whatever is filed under it would be another job's."""
    owners: dict[str, list[str]] = {}
    for ticket in tickets:
        owners.setdefault(ticket.id, []).append(ticket.token)
    for name, tokens in owners.items():
        if len(tokens) > 1:
            yield Violation(Kind.WRONG_STATE, f"the id {name} was given to {len(tokens)} jobs: {', '.join(tokens)}")


def _plain(ticket: Ticket, view: JobView, runs: Sequence[Run], truth: Truth) -> Iterator[Violation]:
    for before, after in pairwise(runs):
        if before.last_s > after.started_s:
            yield _wrong(ticket, f"ran twice at a time, as pids {before.pid} and {after.pid}")
        if truth.ends(before) == {0}:
            yield _wrong(ticket, f"ran again (pid {after.pid}) after it had finished well (pid {before.pid})")
    if view.phase is Phase.SUCCEEDED:
        if not runs or 0 not in truth.ends(runs[-1]):
            yield _wrong(ticket, f"succeeded, but {_did(runs, truth)}")
    elif view.phase is Phase.FAILED:
        yield from _failed(ticket, view, runs, truth)
    else:
        yield _wrong(ticket, f"nobody asked for that: {_said(view)}")


def _failed(ticket: Ticket, view: JobView, runs: Sequence[Run], truth: Truth) -> Iterator[Violation]:
    if view.failures <= ticket.retries:
        yield _wrong(ticket, f"was given up after {view.failures} of {ticket.retries + 1} tries: {_said(view)}")
    if truth.was_full and NO_ROOM in view.exit_reason:
        return
    if not runs:
        yield _wrong(ticket, f"failed, but never ran: {_said(view)}")
        return
    is_unknown = view.exit_code is None and UNKNOWN.search(view.exit_reason) is not None
    if is_unknown and any(map(truth.is_forgotten, runs[-1:])):
        return
    ends = truth.ends(runs[-1])
    if view.exit_code not in ends - {0}:
        yield _wrong(ticket, f"{_said(view)}; but {_did(runs, truth)}")


def _elastic(ticket: Ticket, view: JobView, runs: Sequence[Run], truth: Truth) -> Iterator[Violation]:
    finished = [run for run in runs if run.has_finished]
    if view.phase is not Phase.SUCCEEDED:
        yield _wrong(ticket, f"has to succeed, whatever happens: {_said(view)}")
    elif not finished:
        yield _wrong(ticket, f"succeeded, but no replica came to the end of the training; {_did(runs, truth)}")
    for run in finished:
        wrong = round(run.facts["samples_wrong"])
        if wrong or run.facts["out_of_order"]:
            sentence = f"{ticket}: {wrong} samples were lost or counted twice, and {run.facts['out_of_order']} steps"
            yield Violation(Kind.WRONG_SAMPLES, f"{sentence} out of order (pid {run.pid})", max(wrong, 1))
    done = [run for run in finished if run.has_ended and SIGKILL not in truth.ends(run)]
    for run in runs:
        if done and run.first_step_s is not None and run.started_s > done[0].last_s:
            yield _wrong(ticket, f"trained again (pid {run.pid}) after it had finished well (pid {done[0].pid})")


def _wrong(ticket: Ticket, what: str) -> Violation:
    return Violation(Kind.WRONG_OUTCOME, f"{ticket} {what}")


def _said(view: JobView) -> str:
    code = "" if view.exit_code is None else f", exit code {view.exit_code}"
    waits = f", waits for {view.waits_for}" if view.waits_for else ""
    reason = f", {view.exit_reason!r}" if view.exit_reason else ""
    return f"the service says {view.phase}{code}{reason}{waits}"


def _did(runs: Sequence[Run], truth: Truth) -> str:
    if not runs:
        return "it never ran"
    words = []
    for run in runs[-3:]:
        ends = " or ".join(str(end) for end in sorted(truth.ends(run))) or "nothing that it or the campaign did"
        words.append(f"pid {run.pid} ended by {ends}")
    return f"{'…, ' if len(runs) > 3 else ''}{', '.join(words)}"
