"""The default solver: it keeps all rules, its bound is one, and small rounds are solved as by trying everything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver import Budget, Choices, Priced, Rows, Solution

Held = Mapping[int, int]
"""Node → GPUs."""


def value_of(speedup: float, p: float) -> float:
    x = speedup + 1e-3
    return math.log(x) if p == 0 else math.copysign(1.0, p) * x**p


def round_of(
    nodes: Sequence[int],
    held: Sequence[Held],
    *,
    p: float = -1.0,
    most: int = 8,
    least: Sequence[int] = (),
    pinned: Sequence[int] = (),
    factor: float = 0.8,
    slope: Sequence[float] = (),
    apart: float = 0.8,
    racks: Sequence[int] = (),
    afar: float | None = None,
    **fields: Any,
) -> Choices:
    """One job for each of `held`. A job's speedup is K^slope, `apart` of that on several nodes, `afar` in several
    racks; `factor` of it is left if it does not keep what it held."""
    classes = 2 if afar is None else 3
    num_racks = max(racks, default=0) + 1
    spread = np.ones((len(nodes) + 1, num_racks + 1), dtype=np.int64)
    spread[:2] = 0
    if afar is not None:
        spread[2:, 2:] = 2
    values, keep = [], []
    matrix = np.zeros((len(held), len(nodes)), dtype=np.int64)
    for job, its in enumerate(held):
        steep = slope[job] if slope else 0.8
        curve = [[scale * gpus**steep for gpus in range(most + 1)] for scale in (1.0, apart, afar or 0.0)[:classes]]
        table = np.array([[value_of(factor * x, p) for x in row] for row in curve])
        table[:, 1 : least[job] if least else 1] = -np.inf
        if job in pinned:
            table[:] = -np.inf
        values.append(table.ravel())
        of_class = spread[len(its), len({racks[n] if racks else 0 for n in its})] if its else 0
        keep.append(value_of(curve[of_class][sum(its.values())], p) if its else -np.inf)
        for node, gpus in its.items():
            matrix[job, node] = gpus
    given = {
        "capacity": np.array(nodes, dtype=np.int64),
        "rack": np.array(racks or [0] * len(nodes), dtype=np.int64),
        "spread": spread,
        "num_classes": classes,
        "first": np.concatenate([[0], np.cumsum([len(each) for each in values])]).astype(np.int64),
        "value": np.concatenate([*values, np.zeros(0)]),
        "keep": np.array(keep, dtype=np.float64),
        "held": Rows.of_matrix(matrix),
        "pinned": np.array([job in pinned for job in range(len(held))], dtype=bool),
        "most_nodes": np.full(len(held), 1 << 30, dtype=np.int64),
    }
    return Choices(**(given | fields))


def worth(choices: Choices, job: int, row: FloatArray) -> float:
    """What a row [N] is worth to a job; −inf if it may not have it."""
    held = choices.held.matrix(choices.num_nodes)[job]
    stays = bool(row.any() and (row == held).all())
    if choices.pinned[job]:
        return float(choices.keep[job]) if (row == held).all() else -math.inf
    width = (choices.first[job + 1] - choices.first[job]) // choices.num_classes
    used = np.flatnonzero(row)
    of_class = choices.spread[len(used), len(set(choices.rack[used].tolist()))] if len(used) else 0
    value = -math.inf
    if row.sum() < width and len(used) <= choices.most_nodes[job]:
        value = float(choices.value[choices.first[job] + of_class * width + row.sum()])
    return max(value, float(choices.keep[job])) if stays else value


def violations(choices: Choices, rows: Rows) -> list[str]:
    plan, found = rows.matrix(choices.num_nodes), []
    apart = (plan > 0) & ((plan > 0).sum(axis=1) > 1)[:, None]
    pinned_apart = apart[choices.pinned].sum(axis=0)
    if (plan.sum(axis=0) > choices.capacity).any():
        found.append("more than a node has")
    if choices.avoid_interference and (apart.sum(axis=0) > np.maximum(pinned_apart, 1)).any():
        found.append("jobs on several nodes meet")
    for job in range(choices.num_jobs):
        if worth(choices, job, plan[job]) == -math.inf:
            found.append(f"job {job} has what it may not have")
        nodes = rows.node[rows.first[job] : rows.first[job + 1]]
        if (np.diff(nodes) <= 0).any():
            found.append("nodes are not in order")
    return found


def total(choices: Choices, rows: Rows) -> float:
    plan = rows.matrix(choices.num_nodes)
    return math.fsum(worth(choices, job, plan[job]) for job in range(choices.num_jobs))


def all_plans(choices: Choices) -> Iterator[FloatArray]:
    """Every plan that keeps the rules, however bad."""
    every = [np.array(row, dtype=np.int64) for row in product(*(range(gpus + 1) for gpus in choices.capacity.tolist()))]
    options = [[row for row in every if worth(choices, job, row) > -math.inf] for job in range(choices.num_jobs)]
    for rows in product(*options):
        plan = np.array(rows, dtype=np.int64).reshape(choices.num_jobs, choices.num_nodes)
        apart = (plan > 0) & ((plan > 0).sum(axis=1) > 1)[:, None]
        if (plan.sum(axis=0) <= choices.capacity).all() and (
            not choices.avoid_interference or (apart.sum(axis=0) <= 1).all()
        ):
            yield plan


def solve(choices: Choices, seed: int = 0, work: int | None = None, **options: Any) -> Solution:
    return Priced(**options).solve(choices, Budget(work), np.random.default_rng(seed))


@st.composite
def rounds(draw: st.DrawFn, most_nodes: int = 5, most_jobs: int = 7) -> Choices:
    """Any round: uneven nodes, racks, minima, pinned jobs, jobs that hold GPUs and jobs that do not."""
    nodes = draw(st.lists(st.integers(0, 4), min_size=0, max_size=most_nodes))
    num_jobs, free = draw(st.integers(0, most_jobs)), list(nodes)
    held, shared = [], set()
    for _ in range(num_jobs):
        its: dict[int, int] = {}
        for node in draw(st.lists(st.integers(0, max(len(nodes) - 1, 0)), unique=True, max_size=2)):
            if nodes and free[node] and node not in shared:
                its[node] = draw(st.integers(1, free[node]))
                free[node] -= its[node]
        if len(its) > 1:
            shared |= set(its)
        held.append(its)
    of_jobs = st.integers(0, max(num_jobs - 1, 0))
    has_racks = draw(st.booleans())
    return round_of(
        nodes,
        held,
        p=draw(st.sampled_from([-10.0, -1.0, 0.0, 1.0])),
        least=[draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in held],
        pinned=[job for job in draw(st.sets(of_jobs, max_size=2)) if job < num_jobs and held[job]],
        slope=[draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])) for _ in held],
        factor=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        apart=draw(st.sampled_from([0.5, 0.95, 1.0])),
        racks=[draw(st.integers(0, 1)) for _ in nodes] if has_racks else (),
        afar=draw(st.sampled_from([0.4, 0.9])) if has_racks else None,
        most_nodes=np.array([draw(st.sampled_from([1, 2, 1 << 30])) for _ in held], dtype=np.int64),
        avoid_interference=draw(st.booleans()),
    )


@settings(max_examples=80, deadline=None)
@given(rounds(), st.integers(0, 3), st.sampled_from([0, 300, None]))
def test_every_answer_keeps_the_rules_and_its_value_is_within_the_bound(
    choices: Choices, seed: int, work: int | None
) -> None:
    solution = solve(choices, seed, work, exact_gpus=0)
    assert violations(choices, solution.rows) == []
    assert solution.value == pytest.approx(total(choices, solution.rows), rel=1e-9)
    assert solution.bound is not None
    assert solution.value <= solution.bound


@settings(max_examples=40, deadline=None)
@given(rounds(), st.booleans())
def test_nobody_waits_beside_a_gpu_that_it_could_use(choices: Choices, is_exact: bool) -> None:
    solution = solve(choices, exact_gpus=16 if is_exact else 0)
    plan = solution.rows.matrix(choices.num_nodes)
    free = choices.capacity - plan.sum(axis=0)
    for job in np.flatnonzero(~plan.any(axis=1) & ~choices.pinned).tolist():
        for node in np.flatnonzero(free > 0).tolist():
            one = np.zeros(choices.num_nodes, dtype=np.int64)
            one[node] = 1
            assert worth(choices, job, one) == -math.inf


@settings(max_examples=20, deadline=None)
@given(rounds(), st.integers(0, 3))
def test_equal_rounds_and_seeds_have_equal_answers(choices: Choices, seed: int) -> None:
    one, solver = solve(choices, seed), Priced()
    solver.solve(round_of([4, 4], [{}, {0: 2}]), Budget(), np.random.default_rng(9))
    other = solver.solve(choices, Budget(), np.random.default_rng(seed))
    assert (one.rows.node == other.rows.node).all()
    assert (one.rows.gpus == other.rows.gpus).all()
    assert (one.value, one.bound, one.stats) == (other.value, other.bound, other.stats)


@settings(max_examples=25, deadline=None)
@given(rounds(), st.integers(0, 3))
def test_more_work_is_never_worse(choices: Choices, seed: int) -> None:
    values = [solve(choices, seed, work, node_price=0.0, exact_gpus=0).value for work in (0, 256, 512, 2048)]
    assert all(after >= before - 1e-9 * abs(before) for before, after in pairwise(values))


@settings(max_examples=40, deadline=None)
@given(rounds(most_nodes=2, most_jobs=3))
def test_the_bound_is_above_every_plan_and_the_answer_is_the_best(choices: Choices) -> None:
    solution = solve(choices, gap_target=0.0)
    best = max(total(choices, Rows.of_matrix(plan)) for plan in all_plans(choices))
    assert solution.bound is not None
    assert solution.bound >= best - 1e-9 * abs(best)
    assert solution.value >= best - 1e-6 * abs(best)
    hasty = solve(choices, work=0, gap_target=0.0, exact_gpus=0)
    assert hasty.bound is not None
    assert hasty.bound >= best - 1e-9 * abs(best)


@pytest.mark.parametrize(
    ("nodes", "held", "least"),
    [([4], [{}, {}], [3, 3]), ([3, 3], [{}, {}, {}], [2, 2, 2]), ([2, 2, 2], [{0: 1, 1: 1}, {}, {2: 1}], [2, 4, 1])],
)
def test_the_bound_is_that_of_plans_that_can_be_placed(nodes: list[int], held: list[Held], least: list[int]) -> None:
    solution = solve(round_of(nodes, held, least=least), exact_gpus=0)
    assert solution.bound == pytest.approx(solution.value, rel=1e-6)


@pytest.mark.parametrize("p", [-10.0, -1.0, 0.0, 1.0])
def test_as_many_jobs_as_gpus_have_one_each_whatever_p(p: float) -> None:
    solution = solve(round_of([4] * 4, [{} for _ in range(16)], p=p))
    assert np.diff(solution.rows.first).tolist() == [1] * 16
    assert solution.value == pytest.approx(solution.bound)


def test_nothing_moves_where_nothing_is_gained_by_it() -> None:
    held: list[Held] = [{0: 2}, {0: 2}, {1: 4}, {2: 1, 3: 4}, {2: 3}]
    choices = round_of([4] * 4, held, slope=[0.8, 0.8, 0.8, 0.8, 0.7], apart=1.0, most=5)
    solution = solve(choices)
    assert (solution.rows.matrix(4) == choices.held.matrix(4)).all()


def test_an_idle_job_gets_a_gpu_of_the_one_that_loses_least() -> None:
    held: list[Held] = [{0: 4}, {1: 4}, {}]
    solution = solve(round_of([4, 4], held, slope=[0.9, 0.1, 0.9]), work=0, exact_gpus=0)
    assert solution.rows.matrix(2).sum(axis=1)[0] == 4
    assert (solution.rows.matrix(2).sum(axis=1) > 0).all()


def test_a_job_that_is_as_well_off_apart_stays_together() -> None:
    solution = solve(round_of([4, 4, 4], [{}, {}], slope=[1.0, 1.0], apart=1.0, most=4), node_price=1e-3)
    assert ((solution.rows.matrix(3) > 0).sum(axis=1) == 1).all()


def test_nodes_of_one_rack_are_taken_where_that_is_worth_more() -> None:
    choices = round_of([4] * 4, [{}], most=8, slope=[1.0], racks=[0, 1, 0, 1], apart=0.95, afar=0.4)
    used = solve(choices).rows.node.tolist()
    assert used in ([0, 2], [1, 3])


def test_pinned_jobs_that_meet_already_go_on_and_others_keep_off() -> None:
    held: list[Held] = [{0: 1, 1: 1}, {0: 1, 1: 1}, {}]
    choices = round_of([4, 4, 2], held, pinned=[0, 1], slope=[1.0] * 3, apart=1.0)
    solution = solve(choices)
    assert violations(choices, solution.rows) == []
    assert solution.rows.matrix(3)[2].sum() == 2


def test_a_solver_that_is_told_to_stop_still_answers() -> None:
    choices = round_of([4] * 3, [{0: 1, 1: 2}, {}, {2: 4}, {}])
    solution = Priced().solve(choices, Budget(should_stop=lambda: True), np.random.default_rng(0))
    assert violations(choices, solution.rows) == []
    assert solution.stats["steps"] == 0


@pytest.mark.parametrize(("nodes", "held"), [([], []), ([4, 4], []), ([], [{}, {}]), ([4], [{}]), ([0, 0], [{}])])
def test_rounds_without_jobs_or_nodes_are_answered(nodes: list[int], held: list[Held]) -> None:
    choices = round_of(nodes, held)
    solution = solve(choices)
    assert len(solution.rows) == len(held)
    assert violations(choices, solution.rows) == []


def test_read_only_arrays_will_do() -> None:
    choices = round_of([4, 4], [{0: 2}, {}])
    for array in (choices.capacity, choices.value, choices.first, choices.keep, choices.spread):
        array.setflags(write=False)
    assert solve(choices).value == solve(replace(choices, value=choices.value.copy())).value
