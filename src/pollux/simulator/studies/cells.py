"""Figures as the tables of a study show them: rounded, sorted by what they were before."""

from __future__ import annotations

from pollux.simulator.report import Cell


def time(seconds: float | None, digits: int = 2) -> Cell | None:
    """In hours."""
    return None if seconds is None else Cell(f"{seconds / 3600:.{digits}f}", seconds)


def fixed(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:.2f}", value)


def ratio(here: float, published: float | None) -> Cell | None:
    return None if published is None else fixed(here / published)


def percent(share: float | None, signed: bool = False, digits: int = 0) -> Cell | None:
    if share is None:
        return None
    text = f"{100 * share:+.{digits}f} %" if signed else f"{100 * share:.{digits}f} %"
    return Cell(text.replace("-", "−"), share)
