"""Sweeps: one thing is varied, all else stays, and what jobs come to is set beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pollux.core import FrozenMap
from pollux.errors import InvalidInput, UnknownName
from pollux.policies import registry
from pollux.simulator.comparison import prepare_once
from pollux.simulator.compat import options_of
from pollux.simulator.generator import BUILT_IN
from pollux.simulator.scenario import Scenario
from pollux.simulator.settings import POLICY
from pollux.simulator.studies.cases import Case, Measured
from pollux.simulator.studies.loads import generated_at, scaled

NO_VARIANTS: Mapping[str, Mapping[str, object]] = FrozenMap({"": FrozenMap()})
AVOIDANCE: Mapping[str, Mapping[str, object]] = FrozenMap(
    {
        "avoiding": FrozenMap({"policy.avoid_interference": True}),
        "not avoiding": FrozenMap({"policy.avoid_interference": False}),
    }
)


@dataclass(frozen=True, slots=True)
class Axis:
    """What can be varied."""

    name: str
    title: str
    """Of the axis of a plot, with the unit."""
    values: tuple[float, ...]
    """Usual ones."""
    base: float
    """What all else is compared with."""
    setting: str | None = None
    """The option that takes the value; None: it is the workload that changes."""
    variants: Mapping[str, Mapping[str, object]] = field(default=NO_VARIANTS)
    """Settings that each value is run with, where the policy has them."""
    is_logarithmic: bool = False


AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis("load", "load: jobs in the same time, relative to the workload", (0.5, 1, 1.5, 2), 1),
        Axis("interval", "seconds from round to round", (30, 60, 120, 240, 480), 60, "interval_s", is_logarithmic=True),
        Axis(
            "interference",
            "share of its speed that a job on several nodes loses where it meets another",
            (0, 0.25, 0.5),
            0,
            "world.interference",
            AVOIDANCE,
        ),
        Axis("p", "p, the exponent of the power mean of speedups", (1, 0, -1, -10), -1, "policy.p"),
    )
}


def axis_of(name: str) -> Axis:
    if name not in AXES:
        raise UnknownName("axis", name, AXES)
    return AXES[name]


def values_of(axis: Axis, text: str | None) -> tuple[float, ...]:
    """The values that a text lists with commas between them, each once; the usual ones without a text."""
    if text is None:
        return axis.values
    usual = ",".join(f"{value:g}" for value in axis.values)
    found: dict[float, None] = {}
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InvalidInput("--values", text, f"{part.strip()!r} is no number", f"Write for example {usual}")
        found[value] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep needs to know besides its axis."""

    scenarios: Sequence[Scenario]
    """One a workload; their policy and options do not matter."""
    policies: Sequence[str]
    settings: Mapping[str, object] = field(default_factory=dict)
    compat: str | None = None


def cases_of(axis: Axis, values: Sequence[float], plan: Plan) -> list[Case]:
    """Each value under each policy in each variant that the policy has."""
    _check(axis, plan)
    return [
        Case(
            label,
            tuple(_at(axis, value, scenario, policy, plan, variant) for scenario in plan.scenarios),
            value,
        )
        for policy in plan.policies
        for label, variant in _variants(axis, policy).items()
        for value in values
    ]


def _check(axis: Axis, plan: Plan) -> None:
    options_of(plan.policies, plan.settings, plan.compat)  # a setting that nobody has is refused there
    varied = {axis.setting, *(setting for variant in axis.variants.values() for setting in variant)}
    for setting in varied & plan.settings.keys():
        problem = f"a sweep of {axis.name} sets {setting} itself"
        raise InvalidInput("setting", setting, problem, "Leave it out, and name the values with --values")
    for policy in plan.policies:
        if axis.setting is not None and not _has(policy, axis.setting):
            able = [name for name in registry.names() if _has(name, axis.setting)]
            problem = f"{policy} has no option {_last(axis.setting)}"
            raise InvalidInput("--policies", policy, problem, f"Name policies that have it: {', '.join(able)}")


def _has(policy: str, setting: str) -> bool:
    """Whether a setting means anything to a policy; what is not a policy's own means something to all."""
    section, _, option = setting.partition(".")
    return section != POLICY or option in registry.describe(policy)["options"]


def _variants(axis: Axis, policy: str) -> dict[str, Mapping[str, object]]:
    """By label; the policy alone, where it has none of them."""
    if all(_has(policy, setting) for variant in axis.variants.values() for setting in variant):
        return {f"{policy}, {name}" if name else policy: variant for name, variant in axis.variants.items()}
    return {policy: {}}


def _at(
    axis: Axis, value: float, scenario: Scenario, policy: str, plan: Plan, variant: Mapping[str, object]
) -> Scenario:
    try:
        return _varied(axis, value, scenario, policy, plan, variant)
    except InvalidInput as error:
        if _last(error.field) != _last(axis.setting or axis.name):
            raise
        raise InvalidInput("--values", value, error.problem, error.fix) from error


def _last(dotted: str) -> str:
    """`p` of the setting `policy.p` and of the field `pollux.p`, which are the same thing."""
    return dotted.rpartition(".")[2]


def _varied(
    axis: Axis, value: float, scenario: Scenario, policy: str, plan: Plan, variant: Mapping[str, object]
) -> Scenario:
    own = {} if axis.setting is None else {axis.setting: value}
    options = options_of([policy], _known(policy, {**plan.settings, **variant, **own}), plan.compat)[policy]
    registry.make(policy, options.policy)  # checks them; the runs would do so much later
    found = replace(scenario, policy=policy, options=options)
    if axis.setting is not None or value == 1:
        return found
    if scenario.workload in BUILT_IN:
        return replace(found, content=generated_at(scenario.workload, value))
    return replace(found, content=scaled(prepare_once(found).workload, value, options.seed))


def _known(policy: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Those that the policy has; that somebody has each was checked for all policies together."""
    return {key: value for key, value in settings.items() if _has(policy, key)}


@dataclass(frozen=True, slots=True)
class Row:
    """A value under a policy, as a table shows it."""

    value: float
    label: str
    avg_jct_s: float
    figures: Mapping[str, float | None]
    change: float
    """Of the average JCT, relative to the base value."""

    def document(self) -> dict[str, Any]:
        return {"value": self.value, "label": self.label, "change": self.change, **self.figures}


def rows_of(axis: Axis, measured: Iterable[Measured]) -> list[Row]:
    """In the order of the cases. Without the base value among them, changes are relative to the first."""
    found = [(it.case.value or 0.0, it.case.label, it.avg_jct_s, it.figures) for it in measured]
    base: dict[str, float] = {}
    for value, label, jct_s, _ in found:
        if value == axis.base or label not in base:
            base[label] = jct_s
    return [Row(value, label, jct_s, figures, jct_s / base[label] - 1) for value, label, jct_s, figures in found]
