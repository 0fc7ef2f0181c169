"""Where the live cluster and the simulated one lose time, and how much of the difference of JCTs that explains.

The parts of a JCT add up: waiting, starting, standing still at re-allocations, training, ending. What is left of their
differences once rounds and pacing are told apart is put down to decisions: other GPUs and other batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pollux.cli.fidelity.course import Course, planning_of, report_ages, rounds_of, waits_for_round
from pollux.wire.api import EventView


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some durations; None: there are none."""

    mean_s: float | None
    max_s: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        return cls(mean(seconds), max(seconds, default=None))


@dataclass(frozen=True, slots=True)
class Delay:
    """One place where time goes."""

    name: str
    live: Spread
    simulated: Spread
    explains_s: float | None
    """Mean over all jobs of what it adds to the live JCT; None: not to be told apart from decisions."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Side:
    """All that one side tells."""

    events: Sequence[EventView]
    courses: Sequence[Course]
    """In the order of the workload."""


def delays(live: Side, simulated: Side) -> tuple[Delay, ...]:
    """What `explains_s` of all of them adds up to is the difference of the average JCTs."""

    def difference(part: Callable[[Course], float]) -> float:
        pairs = zip(live.courses, simulated.courses, strict=True)
        return mean([part(ours) - part(theirs) for ours, theirs in pairs]) or 0.0

    def both(read: Callable[[Side], Sequence[float]]) -> tuple[Spread, Spread]:
        return Spread.of(read(live)), Spread.of(read(simulated))

    rounds = both(lambda side: waits_for_round(side.events))
    by_rounds = (rounds[0].mean_s or 0.0) - (rounds[1].mean_s or 0.0)
    by_pacing = mean([_behind_s(course) for course in live.courses]) or 0.0
    return (
        Delay(
            "round phase",
            *rounds,
            by_rounds,
            "From a submission to the next round. Both sides keep one rule, but a round that comes a moment later "
            "shifts all that follow it.",
        ),
        Delay(
            "planning",
            *both(lambda side: planning_of(side.events)),
            None,
            "From the beginning of a round to its plan: real work of the machine, which compression does not shorten; "
            "the simulator takes none. It is part of what jobs wait.",
        ),
        Delay(
            "waiting for GPUs",
            *both(lambda side: [course.waiting_s for course in side.courses]),
            difference(lambda course: course.waiting_s) - by_rounds,
            "From a submission to the plan that gives the job GPUs; what it explains is without the round phase.",
        ),
        Delay(
            "start",
            *both(lambda side: [change.seconds for each in side.courses for change in each.changes if change.is_start]),
            difference(lambda course: course.starting_s),
            "From the plan that gives a job GPUs to its first step: live this is the start of real processes, padded "
            "to the re-allocation delay.",
        ),
        Delay(
            "resize pause",
            *both(lambda side: [pause_s for each in side.courses for pause_s in each.pauses_s]),
            difference(lambda course: course.pausing_s),
            "How long training stands still at a re-allocation, as the jobs measured it; the simulator takes the "
            "delay that it was told, and so does what is explained for jobs that measured none.",
        ),
        Delay(
            "newcomers",
            *both(_newcomers),
            None,
            "What passes at a re-allocation before the pause, while the job trains on: newcomers get ready, another "
            "job makes room, and steps under way come to their end, which with large batches takes a while. It "
            "moves the change, not the work.",
        ),
        Delay(
            "report delay",
            *both(lambda side: report_ages(rounds_of(side.events), side.courses)),
            None,
            "How old what the scheduler knew of a job was when it planned. It acts through decisions.",
        ),
        Delay(
            "end",
            *both(lambda side: [course.ending_s for course in side.courses]),
            difference(lambda course: course.ending_s),
            "From the last step of a job until the scheduler knows: real processes end, the simulated ones do not.",
        ),
        Delay(
            "pacing",
            *both(lambda side: [_behind_s(course) for course in side.courses]),
            by_pacing,
            "By how much steps came later than the profile says, because the machine was busy.",
        ),
        Delay(
            "decisions",
            *both(lambda side: [course.training_s for course in side.courses]),
            difference(lambda course: course.training_s) - by_pacing,
            "Training itself, the rest: other GPUs or other batch sizes at other times, from whatever of the above.",
        ),
    )


def _behind_s(course: Course) -> float:
    return course.training_s * course.pacing_slip / (1.0 + course.pacing_slip)


def _newcomers(side: Side) -> list[float]:
    """Of each re-allocation in place, what is not pause."""
    found = []
    for course in side.courses:
        found += [max(change.seconds - course.pause_s, 0.0) for change in course.changes if not change.is_start]
    return found


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
