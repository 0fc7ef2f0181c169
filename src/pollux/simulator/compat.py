"""Presets: sets of options that make a run follow somebody else's rules. Each option can also be set alone."""

from __future__ import annotations

from collections.abc import Mapping

from pollux.errors import UnknownName

ARTIFACT: Mapping[str, object] = {
    "world.whole_seconds": True,
    "world.oracle_doubles_one_gpu": True,
    "agent.report_interval_s": 60.0,
    "agent.single_gpu_accumulation": True,
    "agent.published_grid": True,
    "agent.published_fit": True,
    "agent.pinned": ["ncf"],
    "scheduler.in_place": False,
}
"""The published simulator, to the second (docs/deviations.md)."""

PRESETS: Mapping[str, Mapping[str, object]] = {"artifact": ARTIFACT}


def preset(name: str) -> Mapping[str, object]:
    """The options of a preset, by their dotted names."""
    if name not in PRESETS:
        raise UnknownName("--compat", name, PRESETS)
    return PRESETS[name]
