"""The life cycle of a job: phases, and one table of every step between them. See docs/job-lifecycle.md.

The table is about phases only. Whether a message is still of interest (its generation) is asked before, with
`Job.expects`; a message that is not expected never reaches the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType

from pollux.core.ids import JobId
from pollux.errors import IllegalTransition


class Phase(StrEnum):
    """Where a job is in its life. Every job begins as `PENDING`."""

    PENDING = "pending"
    """Waits for GPUs."""
    STARTING = "starting"
    """Has GPUs; its replicas are not ready yet."""
    RUNNING = "running"
    RESIZING = "resizing"
    """Trains on what it has while the replicas of the next generation get ready."""
    STOPPING = "stopping"
    """Pre-empted: saves and leaves, then waits again."""
    PAUSING = "pausing"
    """Saves and leaves because somebody asked for a pause."""
    CANCELLING = "cancelling"
    """Leaves because somebody cancelled it."""
    PAUSED = "paused"
    """Holds nothing and wants nothing until it is resumed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    is_terminal: bool
    """Nothing ever changes again."""
    holds_gpus: bool
    """Its allocation is not empty, and nobody else may have those GPUs."""
    may_be_given_gpus: bool
    """A plan may name it: it has not ended, is not paused, and is on its way to neither."""

    def __init__(self, value: str) -> None:
        # Set once, as policies ask millions of times: hashing an enum member to look it up costs more than the answer.
        self.is_terminal = value in {"succeeded", "failed", "cancelled"}
        self.holds_gpus = not self.is_terminal and value not in {"pending", "paused"}
        self.may_be_given_gpus = not self.is_terminal and value not in {"paused", "pausing", "cancelling"}


class Trigger(StrEnum):
    """What can move a job from one phase to another."""

    START = "start"
    """Decided: give it GPUs."""
    RESIZE = "resize"
    """Decided: other GPUs than it has."""
    STOP = "stop"
    """Decided: take its GPUs away."""
    PAUSE = "pause"
    """Asked for by a person, as are the next two."""
    RESUME = "resume"
    CANCEL = "cancel"
    READY = "ready"
    """Reported: the newest generation trains. All that follow are reports, too."""
    ABANDON = "abandon"
    """The newest generation did not get ready and was given up."""
    LOSE_REPLICA = "lose replica"
    """Some replicas are gone, the others have re-formed and train on."""
    STOPPED = "stopped"
    """No replica is left, asked for or by no fault of the job (its nodes are gone)."""
    FINISH = "finish"
    RETRY = "retry"
    """It failed, and may try again."""
    FAIL = "fail"
    """It failed once too often."""


def _table() -> Mapping[tuple[Phase, Trigger], Phase]:
    pending, starting, running, resizing = Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESIZING
    stopping, pausing, cancelling, paused = Phase.STOPPING, Phase.PAUSING, Phase.CANCELLING, Phase.PAUSED
    succeeded, failed, cancelled = Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED
    # Columns: where each phase leads; `no` is a step that does not exist. A job on its way out stays on it whatever is
    # reported, except the end itself. A finish always counts, even one reported by a node that had been given up.
    columns = (pending, starting, running, resizing, stopping, pausing, cancelling, paused)
    t, no = Trigger, None
    # fmt: off
    rows: dict[Trigger, tuple[Phase | None, ...]] = {
        #                pending    starting    running     resizing    stopping   pausing    cancelling  paused
        t.START:        (starting,  no,         no,         no,         no,        no,        no,         no),
        t.RESIZE:       (no,        no,         resizing,   no,         no,        no,        no,         no),
        t.STOP:         (no,        stopping,   stopping,   stopping,   no,        no,        no,         no),
        t.PAUSE:        (paused,    pausing,    pausing,    pausing,    pausing,   pausing,   cancelling, paused),
        t.RESUME:       (pending,   starting,   running,    resizing,   stopping,  stopping,  cancelling, pending),
        t.CANCEL:       (cancelled, cancelling, cancelling, cancelling, cancelling, cancelling, cancelling, cancelled),
        t.READY:        (no,        running,    running,    running,    stopping,  pausing,   cancelling, no),
        t.ABANDON:      (no,        pending,    running,    running,    stopping,  pausing,   cancelling, no),
        t.LOSE_REPLICA: (no,        starting,   running,    resizing,   stopping,  pausing,   cancelling, no),
        t.STOPPED:      (no,        pending,    pending,    pending,    pending,   paused,    cancelled,  no),
        t.FINISH:       (succeeded, succeeded,  succeeded,  succeeded,  succeeded, succeeded, succeeded,  succeeded),
        t.RETRY:        (no,        pending,    pending,    pending,    pending,   paused,    cancelled,  no),
        t.FAIL:         (no,        failed,     failed,     failed,     failed,    failed,    cancelled,  no),
    }
    # fmt: on
    return MappingProxyType(
        {
            (phase, trigger): after
            for trigger, row in rows.items()
            for phase, after in zip(columns, row, strict=True)
            if after is not None
        }
    )


TRANSITIONS: Mapping[tuple[Phase, Trigger], Phase] = _table()
"""Every step there is: (phase, trigger) → next phase."""


def next_phase(phase: Phase, trigger: Trigger, job: JobId, history: Iterable[str] = ()) -> Phase:
    """The phase that follows, or `IllegalTransition` with the job's history."""
    after = TRANSITIONS.get((phase, trigger))
    if after is None:
        raise IllegalTransition(job, phase.value, trigger.value, tuple(history))
    return after
