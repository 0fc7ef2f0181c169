"""The figures of the benchmark of faults, from made-up campaigns: nothing is started or killed."""

from __future__ import annotations

from collections import Counter

from benchmarks.areas import faults
from benchmarks.measurement import Measurement, Table

from pollux.testing.chaos import Kind, Result, Violation


def made_up() -> list[Result]:
    good = Result(1, Counter({"kill-keeper": 2}), {"full-disk": "not root"}, Counter({"succeeded": 3}), seconds=60.0)
    bad = Result(2, Counter({"kill-keeper": 1, "power-cut": 1}), longest_hang_s=12.0, longest_hang="a-1", seconds=60.0)
    bad.violations += [Violation(Kind.WRONG_SAMPLES, "a-1: five samples", 5), Violation(Kind.ORPHAN, "a process")]
    return [good, bad]


def test_the_figures_add_up_over_the_seeds():
    figures = {one.key: one for one in faults.figures(made_up()) if isinstance(one, Measurement)}
    assert tuple(figures) == faults.KEYS
    assert {key: one.value for key, one in figures.items()} == {
        "faults.injected": 4,
        "faults.jobs_lost": 0,
        "faults.wrong_outcomes": 0,
        "faults.samples_wrong": 5,
        "faults.orphans": 1,
        "faults.failed_recoveries": 0,
        "faults.wrong_states": 0,
        "faults.longest_hang_s": 12.0,
    }
    assert "a process" in figures["faults.orphans"].note
    assert "a-1, seed 2" in figures["faults.longest_hang_s"].note


def test_the_table_says_why_a_fault_never_fell():
    (table,) = (one for one in faults.figures(made_up()) if isinstance(one, Table))
    assert table.rows == [("kill-keeper", 3.0, ""), ("power-cut", 1.0, ""), ("full-disk", 0.0, "not root")]
