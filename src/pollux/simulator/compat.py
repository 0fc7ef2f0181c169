"""Presets: sets of options that make a run follow somebody else's rules. Each option can also be set alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pollux.core import FrozenMap
from pollux.errors import UnknownName
from pollux.policies import registry
from pollux.simulator.options import Options
from pollux.simulator.settings import POLICY, applied

ARTIFACT: Mapping[str, object] = {
    "world.whole_seconds": True,
    "world.oracle_doubles_one_gpu": True,
    "agent.report_interval_s": 60.0,
    "agent.single_gpu_accumulation": True,
    "agent.published_grid": True,
    "agent.published_fit": True,
    "agent.kind_prior": False,
    "agent.pinned": ["ncf"],
    "scheduler.in_place": False,
}
"""The published simulator, to the second (docs/deviations.md)."""

ARTIFACT_POLLUX: Mapping[str, object] = {
    "world.rank_order": "by-node",
    "policy.solver": "genetic",
    "policy.published_search": True,
    "policy.realloc_delay_s": 30.0,
    "policy.churn_factor": 1.0,
    "policy.penalise_first_start": True,
    "policy.one_node_fair_share": True,
    "policy.max_gpus": 64,
    "policy.max_nodes": 16,
}
"""What it does besides under Pollux."""


class Preset(NamedTuple):
    """Options by their dotted names."""

    of_all: Mapping[str, object]
    of_policy: Mapping[str, Mapping[str, object]]
    """Those that come on top under a policy of that name."""
    reports_with_rounds: bool = False
    """Agents report when the policy plans, however often that is."""


PRESETS: Mapping[str, Preset] = {"artifact": Preset(ARTIFACT, {"pollux": ARTIFACT_POLLUX}, reports_with_rounds=True)}

BELIEFS = ("single_gpu_accumulation", "published_grid")
"""What a policy believes about agents, in options named as theirs: it follows them unless it is set itself."""


def preset(name: str, policy: str = "") -> Mapping[str, object]:
    """The options of a preset under a policy."""
    if name not in PRESETS:
        raise UnknownName("--compat", name, PRESETS)
    found = PRESETS[name]
    return {**found.of_all, **found.of_policy.get(policy, {})}


def options_of(
    policies: Sequence[str], settings: Mapping[str, object], compat: str | None = None
) -> dict[str, Options]:
    """The options of a run under each policy: defaults, then the preset, then the settings.

    Each policy gets those of the policies' settings that it has; one that none of them has is refused.
    """
    known = {policy: registry.describe(policy)["options"] for policy in policies}
    own = {key: key.partition(".")[2] for key in settings if key.startswith(f"{POLICY}.")}
    for key, option in own.items():
        if not any(option in has for has in known.values()):
            raise UnknownName("setting", key, sorted({f"{POLICY}.{name}" for has in known.values() for name in has}))
    found = {}
    for policy, has in known.items():
        fitting = {key: value for key, value in settings.items() if key not in own or own[key] in has}
        options = applied(Options(), {**(preset(compat, policy) if compat else {}), **fitting})
        if compat and PRESETS[compat].reports_with_rounds and "agent.report_interval_s" not in settings:
            options = applied(options, {"agent.report_interval_s": options.interval_s})
        beliefs = {name: getattr(options.agent, name) for name in BELIEFS if name in has}
        changed = {name: value for name, value in beliefs.items() if value != has[name]}
        found[policy] = replace(options, policy=FrozenMap({**changed, **options.policy}))
    return found
