"""The simulated part of the OSDI'21 paper's evaluation, as cases: which runs each figure and table needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pollux.errors import UnknownName
from pollux.simulator.compat import options_of
from pollux.simulator.scenario import Scenario
from pollux.simulator.studies.cases import NOTHING, Case, Measured, Runs
from pollux.simulator.studies.published import AVOIDING_JCT_S, INTERVAL_JCT_S, NOT_AVOIDING_JCT_S, TESTBED
from pollux.simulator.studies.samples import Samples

POLICIES = ("pollux", "optimus", "tiresias")
LOADS = (0.5, 1.0, 1.5, 2.0)
POWERS: Mapping[str, float] = {"pollux, p = 1": 1.0, "pollux, p = −1": -1.0, "pollux, p = −10": -10.0}
AVOIDING, NOT_AVOIDING = "pollux, avoiding", "pollux, not avoiding"
GENETIC_NOT_AVOIDING = "pollux, genetic, not avoiding"

THESE = "the artifact's results for these samples"
EIGHT = "means over the paper's eight samples"
TESTBED_RUN = "the paper's testbed, sample 6"


@dataclass(frozen=True, slots=True)
class World:
    """What all runs of a reproduction have in common: the paper's world, unless a test wants a smaller one."""

    samples: Samples
    compat: str | None = None
    search: Mapping[str, object] = field(default=NOTHING)
    """Settings of the genetic search where the reproduction asks for it by itself; a test wants a short one."""

    @property
    def is_genetic(self) -> bool:
        """Whether Pollux searches as in the paper anyway."""
        return options_of(["pollux"], NOTHING, self.compat)["pollux"].policy.get("solver") == "genetic"

    def scenarios(
        self,
        policy: str,
        settings: Mapping[str, object] = NOTHING,
        load: float = 1.0,
        is_realistic: bool = False,
    ) -> tuple[Scenario, ...]:
        """One a sample."""
        options = options_of([policy], settings, self.compat)[policy]
        return tuple(
            replace(self.samples.scenario(sample, load, is_realistic), policy=policy, options=options)
            for sample in self.samples.names
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A table or a figure."""

    name: str
    title: str
    cases: tuple[Case, ...]
    source: str = ""
    """Of the published figures."""
    base: float | None = None
    """Value that changes are relative to."""

    def measured(self, runs: Runs) -> MeasuredPart:
        return MeasuredPart(self, tuple(runs.measured(case) for case in self.cases))


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    part: Part
    cases: tuple[Measured, ...]

    def case(self, label: str, value: float | None = None) -> Measured:
        return next(it for it in self.cases if (it.case.label, it.case.value) == (label, value))

    def change(self, case: Measured) -> float | None:
        """Of its average JCT, relative to the base value of the same line; None without one."""
        if self.part.base is None:
            return None
        return case.avg_jct_s / self._base(case).avg_jct_s - 1

    def published_change(self, case: Measured) -> float | None:
        """The same, as published."""
        if self.part.base is None:
            return None
        here, base = (it.case.published.get("avg_jct_s") for it in (case, self._base(case)))
        return None if here is None or base is None else here / base - 1

    def _base(self, case: Measured) -> Measured:
        return self.case(case.case.label, self.part.base)

    def document(self) -> dict[str, Any]:
        return {
            "title": self.part.title,
            "published": self.part.source,
            "cases": [
                {**case.document(), "change": self.change(case), "published_change": self.published_change(case)}
                for case in self.cases
            ],
        }


def _table(world: World) -> Part:
    cases = []
    for is_realistic in (False, True):
        for policy in POLICIES[1:] if is_realistic else POLICIES:
            label = f"{policy}, realistic" if is_realistic else policy
            published = {} if is_realistic else world.samples.published(policy)
            scenarios = world.scenarios(policy, is_realistic=is_realistic)
            cases.append(Case(label, scenarios, published={**published, **TESTBED[label].figures()}))
    return Part("table", "Policies", tuple(cases), f"{THESE}; {TESTBED_RUN}")


def _load(world: World) -> Part:
    cases = [
        Case(policy, world.scenarios(policy, load=load), load, world.samples.published(policy, load))
        for policy in POLICIES
        for load in LOADS
    ]
    return Part("load", "Load", tuple(cases), THESE, base=1.0)


def _interval(world: World) -> Part:
    cases = [
        Case("pollux", world.scenarios("pollux", {"interval_s": interval_s}), interval_s, {"avg_jct_s": jct_s})
        for interval_s, jct_s in INTERVAL_JCT_S.items()
    ]
    return Part("interval", "Scheduling interval", tuple(cases), EIGHT, base=60.0)


def _interference(world: World) -> Part:
    """The solver of our own packs jobs so that they seldom meet: what meeting costs shows with the paper's search."""
    lines: dict[str, dict[str, object]] = {
        AVOIDING: {"policy.avoid_interference": True},
        NOT_AVOIDING: {"policy.avoid_interference": False},
    }
    if not world.is_genetic:
        lines[GENETIC_NOT_AVOIDING] = {**lines[NOT_AVOIDING], "policy.solver": "genetic", **world.search}
    cases = []
    for label, settings in lines.items():
        for slowdown, jct_s in NOT_AVOIDING_JCT_S.items():
            published = {"avg_jct_s": AVOIDING_JCT_S if label == AVOIDING else jct_s}
            scenarios = world.scenarios("pollux", {**settings, "world.interference": slowdown})
            cases.append(Case(label, scenarios, slowdown, published))
    return Part("interference", "Interference", tuple(cases), EIGHT, base=0.0)


def _p(world: World) -> Part:
    cases = [
        Case(label, world.scenarios("pollux", {"policy.p": p}), published=TESTBED[label].figures())
        for label, p in POWERS.items()
    ]
    return Part("p", "The exponent p", tuple(cases), TESTBED_RUN)


def _fairness(world: World) -> Part:
    of_case = {label: world.scenarios("pollux", {"policy.p": p}) for label, p in POWERS.items()}
    of_case |= {policy: world.scenarios(policy) for policy in POLICIES[1:]}
    cases = [
        Case(label, tuple(replace(scenario, fairness=True) for scenario in scenarios))
        for label, scenarios in of_case.items()
    ]
    return Part("fairness", "Finish-time fairness", tuple(cases))


def _adaptation(world: World) -> Part:
    """Of the first sample only: it is single jobs that are looked at."""
    cases = [
        Case(policy, tuple(replace(scenario, histories=True) for scenario in world.scenarios(policy)[:1]))
        for policy in ("pollux", "optimus")
    ]
    return Part("adaptation", "Co-adaptation", tuple(cases))


PARTS: Mapping[str, Callable[[World], Part]] = {
    "table": _table,
    "load": _load,
    "interval": _interval,
    "interference": _interference,
    "p": _p,
    "fairness": _fairness,
    "adaptation": _adaptation,
}


def parts_of(world: World, only: Sequence[str] = ()) -> list[Part]:
    """All of them, or those that are named; always in the order of a report."""
    for name in only:
        if name not in PARTS:
            raise UnknownName("--only", name, PARTS)
    return [make(world) for name, make in PARTS.items() if name in (only or PARTS)]
