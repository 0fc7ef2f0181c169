from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.pollux.problems import problem, problems

from pollux.policies.pollux.genetic.problem import Problem


def answer(*rows):
    return np.array(rows, dtype=np.int64)


@st.composite
def problems_with_answers(draw):
    drawn = draw(problems())
    rng = np.random.default_rng(draw(st.integers(0, 2**24 - 1)))
    allocation, free = np.zeros_like(drawn.present), drawn.capacity.copy()
    for job, row in enumerate(allocation):
        row[:] = drawn.present[job] if rng.random() < 0.5 else rng.integers(0, 3, len(free))
        np.minimum(row, free, out=row)
        free -= row
    return drawn, allocation


def speedups_slow(of: Problem, allocation) -> list[float]:
    found = []
    for job, row in enumerate(allocation.tolist()):
        nodes = [node for node, count in enumerate(row) if count]
        racks = {int(of.rack[node]) for node in nodes}
        found.append(float(of.speedup[job, of.spread[len(nodes), len(racks)], sum(row)]))
    return found


@settings(deadline=None)
@given(problems_with_answers())
def test_is_judged_as_its_plain_loop_specification_says(drawn):
    of, allocation = drawn
    speedups = speedups_slow(of, allocation)
    assert of.speedups(allocation).tolist() == speedups
    left = [
        speedup if (allocation[job] == of.present[job]).all() else speedup * of.factor[job]
        for job, speedup in enumerate(speedups)
    ]
    values = [float(of.objective.values(np.array([each]))[0]) for each in left]
    assert of.values(allocation).tolist() == pytest.approx(values)
    assert of.fitness(allocation) == pytest.approx(of.objective.fitness(np.array(values)))


def test_whoever_keeps_its_row_pays_nothing():
    of = problem([4, 4], [{0: 2}, {1: 1}], factor=[0.5, 0.5])
    same, moved = answer([2, 0], [0, 1]), answer([0, 2], [1, 0])
    assert of.speedups(same).tolist() == of.speedups(moved).tolist()
    np.testing.assert_allclose(1.0 / (-of.values(same)), of.speedups(same) + 1e-3)
    np.testing.assert_allclose(1.0 / (-of.values(moved)), 0.5 * of.speedups(same) + 1e-3)


class TestViolations:
    def test_none_of_an_idle_cluster_or_of_the_present(self):
        of = problem([4, 4], [{0: 2, 1: 1}, {}])
        assert of.violations(of.present) == of.violations(np.zeros_like(of.present)) == []

    @pytest.mark.parametrize(
        ("name", "rows", "fields"),
        [
            ("negative", ([-1, 2], [0, 0]), {}),
            ("more than a node has", ([3, 0], [2, 0]), {}),
            ("fewer than least", ([1, 0], [0, 0]), {"least": [2, 1]}),
            ("more than most", ([3, 0], [0, 0]), {"most": [2, 8]}),
            ("too many nodes", ([2, 2], [0, 0]), {"max_nodes": 1}),
            ("pinned moved", ([0, 1], [0, 0]), {"held": [{0: 1}, {}], "pinned": [True, False]}),
            ("interference", ([1, 1], [1, 1]), {}),
        ],
    )
    def test_each_is_found_by_its_name(self, name, rows, fields):
        of = problem([4, 4], fields.pop("held", [{}, {}]), **fields)
        assert of.violations(answer(*rows)) == [name]

    def test_jobs_on_several_nodes_may_meet_if_nobody_minds_or_others_are_on_one(self):
        assert problem([4, 4], [{}, {}], avoid_interference=False).violations(answer([1, 1], [1, 1])) == []
        assert problem([4, 4], [{}, {}]).violations(answer([1, 1], [0, 3])) == []

    def test_the_pinned_are_excused_but_nobody_joins_them(self):
        held = [{0: 1, 1: 1}, {0: 1, 1: 1}, {}]
        of = problem([4, 4], held, pinned=[True, True, False], most=[1, 1, 8], max_nodes=1)
        assert of.violations(of.present) == []
        of = problem([4, 4], held, pinned=[True, True, False])
        assert of.violations(answer([1, 1], [1, 1], [1, 1])) == ["interference"]
