"""Cases: what a study compares. A case is one way to run a workload, done for each workload of the study.

Cases of different figures often ask for the same run; it is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pollux.core import FrozenMap
from pollux.policies import registry
from pollux.simulator.comparison import run_all
from pollux.simulator.fairness import ROUNDING
from pollux.simulator.metrics import Outcome, means
from pollux.simulator.scenario import Scenario

NOTHING: Mapping[str, float] = FrozenMap()


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table, one point of a line."""

    label: str
    """Which line: the policy, and what is special about it."""
    scenarios: tuple[Scenario, ...]
    """One a workload."""
    value: float | None = None
    """Where on the axis, if there is one."""
    published: Mapping[str, float] = field(default=NOTHING)
    """The same figures as published, as far as they are."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A case and what came out of it."""

    case: Case
    outcomes: tuple[Outcome, ...]
    """In the order of the scenarios, with the label in the place of the policy."""

    @property
    def figures(self) -> Mapping[str, float | None]:
        """Means over the workloads."""
        (found,) = means(self.outcomes).values()
        return found

    @property
    def avg_jct_s(self) -> float:
        average = self.figures["avg_jct_s"]
        assert average is not None
        return average

    def document(self) -> dict[str, Any]:
        """As JSON holds it; of single jobs and rounds nothing."""
        return {
            "label": self.case.label,
            "value": self.case.value,
            "means": self.figures,
            "published": dict(self.case.published),
            "fairness": None if (spread := spread_of(self)) is None else asdict(spread),
            "runs": [{"workload": run.workload, **run.figures()} for run in self.outcomes],
        }


@dataclass(frozen=True, slots=True)
class Spread:
    """Finish-time fairness ρ over the jobs of all workloads."""

    worst: float
    above_1: float
    below_2: float
    """Shares of the jobs."""


def spread_of(measured: Measured) -> Spread | None:
    """None where it was not measured."""
    rho = [rho for run in measured.outcomes if run.fairness is not None for rho in run.fairness.rho]
    if not rho:
        return None
    return Spread(
        max(rho), sum(each > 1 + ROUNDING for each in rho) / len(rho), sum(each < 2 for each in rho) / len(rho)
    )


class Runs:
    """The outcomes of the distinct scenarios of some cases."""

    def __init__(self, outcomes: Mapping[Scenario, Outcome]) -> None:
        self._outcomes = outcomes

    def __len__(self) -> int:
        return len(self._outcomes)

    def __getitem__(self, scenario: Scenario) -> Outcome:
        return self._outcomes[_key(scenario)]

    def measured(self, case: Case) -> Measured:
        return Measured(case, tuple(replace(self[scenario], policy=case.label) for scenario in case.scenarios))


def distinct(cases: Iterable[Case]) -> list[Scenario]:
    """Each run once, with everything that any case wants to know about it."""
    found: dict[Scenario, Scenario] = {}
    for case in cases:
        for scenario in case.scenarios:
            key = _key(scenario)
            known = found.get(key, key)
            found[key] = replace(
                key,
                fairness=known.fairness or scenario.fairness,
                histories=known.histories or scenario.histories,
            )
    return list(found.values())


def run_cases(scenarios: Sequence[Scenario], processes: int, on_progress: Callable[[float], None]) -> Runs:
    """Run what `distinct` gave, all in one pool. The longest begin first, so that no core waits for the last one."""
    ordered = sorted(scenarios, key=lambda scenario: not scenario.fairness)
    outcomes = run_all(ordered, processes, on_progress)
    return Runs({_key(scenario): outcome for scenario, outcome in zip(ordered, outcomes, strict=True)})


def _key(scenario: Scenario) -> Scenario:
    """The run alone: without what else is measured, and without options of the policy that are the usual ones."""
    usual = registry.describe(scenario.policy)["options"]
    special = {
        name: value for name, value in scenario.options.policy.items() if name not in usual or value != usual[name]
    }
    options = replace(scenario.options, policy=FrozenMap(special))
    return replace(scenario, options=options, fairness=False, histories=False)
