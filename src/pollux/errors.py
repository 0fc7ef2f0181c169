"""Every exception that Pollux raises on purpose.

    PolluxError
    ├── InvalidInput           what a person or another program handed in: field, value, problem, fix
    │   ├── InvalidSpec        a job or cluster specification
    │   ├── InvalidJob         the document of a job, with all its faults at once
    │   ├── InvalidProfile     measurements of a job
    │   ├── InvalidModel       parameters, limits or statistics of a goodput model
    │   ├── InvalidDocument    JSON that is not one of ours, or of another schema version
    │   └── UnknownName        a name that no registry knows (application, policy, throughput model …)
    ├── LoopMisuse             a training loop that calls the agent in the wrong way: problem, fix
    ├── PacingSlipped          an emulated job that falls behind the pace of its profile: by how much, fix
    ├── CheckpointError        a checkpoint that cannot be read or written: path, problem, fix
    ├── MissingDependency      an optional package that this command needs
    ├── IllegalTransition      a bug: the job life cycle has no such step
    ├── InfeasiblePlan         a bug: a policy gave out what the cluster does not have
    ├── PolicyFailed           a bug: a policy raised what it must not, or returned no plan
    ├── StaleGeneration        a message of an earlier generation, to be dropped
    ├── Refusal                the service says no: status, title, detail, faults
    └── BackendError           an engine or a machine failed
        ├── Temporary          worth another try after `retry_after_s`
        └── Permanent          trying again cannot help
            └── DiskFull       until somebody makes room: what was to be written is not there

A message says what is wrong, with the values, and what to do next. All of them can be pickled: plans are made in
other processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Protocol


class PolluxError(Exception):
    """The root: `except PolluxError` catches everything that Pollux raises on purpose."""


class InvalidInput(PolluxError, ValueError):
    """Input that cannot be used; nothing of it was applied."""

    def __init__(self, field: str, value: object, problem: str, fix: str) -> None:
        super().__init__(field, value, problem, fix)
        self.field = field
        self.value = value
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.problem}. {self.fix}."


class InvalidSpec(InvalidInput):
    """A job or cluster specification that cannot be used."""


class FaultLike(Protocol):
    """One thing that is wrong with a document. Its value is text for people, empty where it may be a secret."""

    @property
    def field(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def problem(self) -> str: ...
    @property
    def fix(self) -> str: ...
    @property
    def line(self) -> int | None: ...


def fault_text(fault: FaultLike, source: str = "") -> str:
    """One line: where it is, `field = value: problem. Fix.`; what is empty is left out."""
    if source:
        where = f"{source}: " if fault.line is None else f"{source}:{fault.line}: "
    else:
        where = "" if fault.line is None else f"line {fault.line}: "
    what = " = ".join(part for part in (fault.field, fault.value) if part)
    sentences = "".join(f" {text}." for text in (fault.problem, fault.fix) if text)
    return f"{where}{what}:{sentences}" if what else f"{where}{sentences.lstrip()}"


class InvalidJob(InvalidInput):
    """The document of a job that cannot be used. `faults`: all that is wrong with it, at least one."""

    def __init__(self, faults: Sequence[FaultLike], source: str = "") -> None:
        self.faults = tuple(faults)
        self.source = source
        """The file that it came from, if it came from one."""
        first = self.faults[0]
        super().__init__(first.field, first.value, first.problem, first.fix)

    def __str__(self) -> str:
        return "\n".join(fault_text(fault, self.source) for fault in self.faults)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.faults, self.source)


class InvalidProfile(InvalidInput):
    """Measurements that cannot be fitted."""


class InvalidModel(InvalidInput):
    """Parameters, limits or statistics outside their range."""


class InvalidDocument(InvalidInput):
    """JSON that does not describe the expected type."""


class UnknownName(InvalidInput):
    """A name that is not registered; the message lists the names that are."""

    def __init__(self, field: str, value: str, known: Iterable[str]) -> None:
        self.known = tuple(sorted(known))
        close = difflib.get_close_matches(value, self.known, n=1)
        hint = f"Did you mean {close[0]!r}? Known" if close else "Known"
        super().__init__(field, value, "no such name", f"{hint}: {', '.join(self.known) or 'none'}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.field, self.value, self.known)


class LoopMisuse(PolluxError, RuntimeError):
    """A training loop that uses the agent in a way that cannot work; raised where the loop does it."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}."


class PacingSlipped(PolluxError):
    """An emulated job is too far behind the pace of its profile: what it measures and reports is not true any more."""

    def __init__(self, slip: float, trained_s: float, bound: float) -> None:
        super().__init__(slip, trained_s, bound)
        self.slip = slip
        self.trained_s = trained_s
        self.bound = bound

    def __str__(self) -> str:
        return (
            f"This emulated job cannot keep its pace: at most {self.bound:.0%} are allowed (this replica is"
            f" {self.slip:.1%} behind after {self.trained_s:.0f} s). The machine is too busy: give pollux up a smaller"
            " --compress or fewer --slots, or end what else runs here."
        )


class CheckpointError(PolluxError):
    """A checkpoint that cannot be used; the ones beside it are untouched."""

    def __init__(self, path: str, problem: str, fix: str, *, is_lasting: bool = False) -> None:
        """`is_lasting`: it will be the same at the next try, unless somebody does something about it."""
        super().__init__(path, problem, fix)
        self.path = path
        self.problem = problem
        self.fix = fix
        self.is_lasting = is_lasting

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}. {self.fix}."


class MissingDependency(PolluxError, ImportError):
    """A package that is not installed because it is optional."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        PolluxError.__init__(self, package, purpose, extra)
        self.package = package
        self.purpose = purpose
        self.extra = extra

    def __str__(self) -> str:
        return (
            f"{self.purpose} needs the package {self.package!r}. Install it with: pip install 'pollux[{self.extra}]'."
        )


class IllegalTransition(PolluxError):
    """A step that the job life cycle does not have: always a bug in Pollux."""

    def __init__(self, job: str, phase: str, event: str, history: tuple[str, ...] = ()) -> None:
        super().__init__(job, phase, event, history)
        self.job = job
        self.phase = phase
        self.event = event
        self.history = history

    def __str__(self) -> str:
        story = " → ".join(self.history) or "none recorded"
        step = f"job {self.job}: {self.event!r} is impossible in phase {self.phase!r}"
        return f"{step}. History: {story}. Please report this."


class InfeasiblePlan(PolluxError):
    """A plan that the cluster cannot hold: always a bug in a policy."""


class PolicyFailed(PolluxError):
    """A policy raised what is no `PolluxError`, or broke its interface: a bug in the policy, not in Pollux."""

    def __init__(self, policy: str, doing: str, error: str) -> None:
        super().__init__(policy, doing, error)
        self.policy = policy
        self.doing = doing
        self.error = error

    def __str__(self) -> str:
        advice = "See the traceback with pollux --debug …, and hold the policy to pollux.testing.PolicyContract"
        return f"policy {self.policy} failed while {self.doing}: {self.error.rstrip('.')}. {advice}."


class StaleGeneration(PolluxError):
    """A message that belongs to an earlier generation of a job; drop it."""

    def __init__(self, job: str, got: int, current: int) -> None:
        super().__init__(job, got, current)
        self.job = job
        self.got = got
        self.current = current

    def __str__(self) -> str:
        return f"job {self.job}: message of generation {self.got} dropped, the job is at {self.current}."


class Refusal(PolluxError):
    """What the service answers to a request that it does not fulfil; `status` is that of HTTP."""

    def __init__(self, status: int, title: str, detail: str, faults: Sequence[FaultLike] = ()) -> None:
        super().__init__(status, title, detail, tuple(faults))
        self.status = status
        self.title = title
        self.detail = detail
        self.faults = tuple(faults)

    def __str__(self) -> str:
        return "\n".join([self.detail or self.title, *map(fault_text, self.faults)])


class BackendError(PolluxError):
    """An engine, a daemon or a machine failed."""


class Temporary(BackendError):
    """A failure that may pass."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.args[0]} Trying again in {self.retry_after_s:g} s."


class Permanent(BackendError):
    """A failure that another try cannot mend."""


class DiskFull(Permanent):
    """There is no room for what was to be kept, and so it did not happen."""
