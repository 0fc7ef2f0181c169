"""What one job did over time, read off the events of a scheduler: of the live one and of the simulated one alike.

Nothing is asked here. Events come with their times already in emulated seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pollux.core import JobId
from pollux.wire.api import EventView

Steps = tuple[tuple[float, int], ...]
"""A value over time: from when on it is what."""


@dataclass(frozen=True, slots=True)
class Change:
    """One generation, from the plan that asked for it until it trains."""

    ordered_at_s: float
    ready_at_s: float
    gpus: int
    gpus_before: int
    """0: it came from nowhere."""

    @property
    def is_start(self) -> bool:
        return self.gpus_before == 0

    @property
    def seconds(self) -> float:
        return self.ready_at_s - self.ordered_at_s


@dataclass(frozen=True, slots=True)
class Course:
    """One job on one side."""

    submitted_at_s: float
    finished_at_s: float
    reallocations: int
    changes: tuple[Change, ...]
    stopped_at_s: tuple[float, ...]
    """When it lost all its GPUs and waited again."""
    batch_sizes: Steps
    pauses_s: tuple[float, ...]
    """How long training stood still at each re-allocation that was measured."""
    reported_at_s: tuple[float, ...] = ()
    """When it told the scheduler how it stands."""
    ending_s: float = 0.0
    """From its last step until the scheduler knew of it."""
    pacing_slip: float = 0.0
    """By which share its steps came later than they should have."""
    assumed_pause_s: float = 0.0
    """What a re-allocation is taken to have cost if none was measured."""

    @property
    def jct_s(self) -> float:
        return self.finished_at_s - self.submitted_at_s

    @property
    def first_step_after_s(self) -> float | None:
        """From its submission."""
        return self.changes[0].ready_at_s - self.submitted_at_s if self.changes else None

    @property
    def gpus(self) -> Steps:
        """What it held, from each plan on that gave it; nothing after its end."""
        steps = [(change.ordered_at_s, change.gpus) for change in self.changes]
        steps += [(at_s, 0) for at_s in (*self.stopped_at_s, self.finished_at_s)]
        return tuple(sorted(steps))

    @property
    def getting_ready(self) -> tuple[tuple[float, float], ...]:
        """From when to when it awaited the replicas of a new generation."""
        return tuple((change.ordered_at_s, change.ready_at_s) for change in self.changes)

    @property
    def waiting_s(self) -> float:
        """Without GPUs, from its submission on."""
        orders = [change.ordered_at_s for change in self.changes if change.is_start]
        ends = [self.submitted_at_s, *self.stopped_at_s]
        return sum(max(order - end, 0.0) for end, order in zip(ends, orders, strict=False))

    @property
    def starting_s(self) -> float:
        """From the plan that gave it GPUs to its first step there, over all its starts."""
        return sum(change.seconds for change in self.changes if change.is_start)

    @property
    def pause_s(self) -> float:
        """Of one re-allocation in place: the mean of those that were measured, or what is assumed."""
        return sum(self.pauses_s) / len(self.pauses_s) if self.pauses_s else self.assumed_pause_s

    @property
    def pausing_s(self) -> float:
        """Standing still at re-allocations in place: those that were not measured take the mean."""
        return self.pause_s * sum(not change.is_start for change in self.changes)

    @property
    def training_s(self) -> float:
        """All the rest."""
        return self.jct_s - self.waiting_s - self.starting_s - self.pausing_s - self.ending_s


def changes_of(job: JobId, events: Iterable[EventView]) -> tuple[tuple[Change, ...], tuple[float, ...]]:
    """The generations of a job that got ready, and when it lost everything before its end."""
    reading = _Reading()
    for event in events:
        if event.kind == "PlanMade":
            reading.plan(event.at_s, _allocation(event, job))
        elif event.job == job:
            reading.own(event)
    return tuple(reading.changes), tuple(reading.stops)


class _Reading:
    """Follows the scheduler's own rule: one change of a job at a time, towards what the latest plan wants for it."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.stops: list[float] = []
        self._target: Mapping[str, int] = {}
        self._held: Mapping[str, int] = {}
        self._awaited: tuple[float, Mapping[str, int]] | None = None
        self._generation = 0

    def plan(self, at_s: float, allocation: Mapping[str, int]) -> None:
        self._target = allocation
        self._go_on(at_s)

    def own(self, event: EventView) -> None:
        match event.kind:
            case "ReplicasReady" if (generation := _whole(event, "generation")) > self._generation:
                self._generation = generation
                ordered_at_s, allocation = self._awaited or (event.at_s, self._target)
                before, now = sum(self._held.values()), sum(allocation.values())
                self.changes.append(Change(ordered_at_s, event.at_s, now, before))
                self._held, self._awaited = allocation, None
            case "JobStopped":
                self.stops.append(event.at_s)
                self._held, self._awaited = {}, None
            case "GenerationAbandoned":
                self._awaited = None
            case "JobFinished" | "JobFailed" | "JobCancelled":
                self._target, self._awaited = {}, None
        self._go_on(event.at_s)

    def _go_on(self, at_s: float) -> None:
        if self._awaited is None and self._target and self._target != self._held:
            self._awaited = at_s, self._target


def rounds_of(events: Iterable[EventView]) -> list[float]:
    """When rounds began."""
    return [event.at_s for event in events if event.kind == "RoundDue"]


def planning_of(events: Iterable[EventView]) -> list[float]:
    """From the beginning of each round to its plan."""
    began: dict[int, float] = {}
    found = []
    for event in events:
        if event.kind == "RoundDue":
            began[_whole(event, "round")] = event.at_s
        elif event.kind == "PlanMade" and (since_s := began.get(_whole(event, "round"))) is not None:
            found.append(event.at_s - since_s)
    return found


def waits_for_round(events: Sequence[EventView]) -> list[float]:
    """Of each job: from its submission to the next round."""
    rounds = rounds_of(events)
    submitted = [event.at_s for event in events if event.kind == "JobSubmitted"]
    after = [[round_s for round_s in rounds if round_s >= at_s] for at_s in submitted]
    return [found[0] - at_s for found, at_s in zip(after, submitted, strict=True) if found]


def report_ages(rounds: Iterable[float], courses: Sequence[Course]) -> list[float]:
    """How old what the scheduler knew of each job was, each time that it planned; jobs it knew nothing of left out."""
    ages = []
    for round_s in rounds:
        for course in courses:
            known = [at_s for at_s in course.reported_at_s if at_s <= round_s < course.finished_at_s]
            ages += [round_s - max(known)] if known else []
    return ages


def reported_pauses(events: Iterable[EventView]) -> list[float]:
    """What a job measured its re-allocations to cost, in the seconds it measured: each figure that was new."""
    figures: list[float] = [0.0]
    for event in events:
        model: Any = event.detail.get("model") if event.kind == "JobReported" else None
        if model is not None and (delay_s := model.get("realloc_delay_s")) is not None:
            figures.append(float(delay_s))
    return [after for before, after in pairwise(figures) if after != before]


def _allocation(event: EventView, job: JobId) -> Mapping[str, int]:
    plan: Any = event.detail["plan"]
    found: Mapping[str, int] = plan["allocations"].get(job, {}).get("gpus", {})
    return found


def _whole(event: EventView, key: str) -> int:
    found: Any = event.detail[key]
    return int(found)
