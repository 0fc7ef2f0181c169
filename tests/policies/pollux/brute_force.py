"""The best plan of a small round by trying all of them: what solvers are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.choices import Choices, Rows


class Node(NamedTuple):
    """What is left of a node, and what tells it from others: nodes that are equal here are worth the same."""

    rack: int
    held: tuple[int, ...]  # GPUs that jobs yet to be placed hold on it now
    free: int
    has_distributed: bool


def best_sum(choices: Choices) -> float:
    """The highest sum of values that any plan has; −inf if no plan keeps the rules."""
    held = choices.held.matrix(choices.num_nodes)
    order = np.argsort(~choices.pinned, kind="stable")  # who must stay comes first
    start = [
        Node(int(rack), tuple(held[order, n].tolist()), int(capacity), False)
        for n, (rack, capacity) in enumerate(zip(choices.rack, choices.capacity, strict=True))
    ]
    best = {tuple(sorted(start)): 0.0}  # by what is left: the best sum of the jobs placed so far
    for job in order:
        found: dict[tuple[Node, ...], float] = {}
        for nodes, total in best.items():
            for row in _rows(choices, int(job), nodes):
                value = _value(choices, int(job), nodes, row)
                if value > -np.inf:
                    left = tuple(sorted(_left(nodes, row)))
                    found[left] = max(total + value, found.get(left, -np.inf))
        best = found
    return max(best.values(), default=-np.inf)


def sum_of(choices: Choices, rows: Rows) -> float:
    """Of a plan; −inf if it breaks a rule."""
    plan, held = rows.matrix(choices.num_nodes), choices.held.matrix(choices.num_nodes)
    is_distributed = (plan > 0).sum(axis=1) > 1
    meeting = ((plan > 0) & is_distributed[:, None]).sum(axis=0)
    pinned_meeting = ((plan > 0) & (is_distributed & choices.pinned)[:, None]).sum(axis=0)
    if (
        rows.gpus.min(initial=1) < 1
        or (plan.sum(axis=0) > choices.capacity).any()
        or (plan != held)[choices.pinned].any()
        or (choices.avoid_interference and (meeting > np.maximum(pinned_meeting, 1)).any())
    ):
        return -np.inf
    nodes = [Node(int(rack), tuple(held[:, n].tolist()), 0, False) for n, rack in enumerate(choices.rack)]
    total = 0.0
    for job, row in enumerate(plan):
        total += _value(choices, job, [node._replace(held=node.held[job:]) for node in nodes], tuple(row.tolist()))
    return total


def _rows(choices: Choices, job: int, nodes: tuple[Node, ...]) -> Iterator[tuple[int, ...]]:
    """What a job may be given of each node, whether it is worth anything or not."""
    kept = tuple(node.held[0] for node in nodes)
    if choices.pinned[job]:
        yield kept
        return
    most = _width(choices, job) - 1
    for row in product(*(range(node.free + 1) for node in nodes)):
        used = [node for node, gpus in zip(nodes, row, strict=True) if gpus]
        meets = choices.avoid_interference and len(used) > 1 and any(node.has_distributed for node in used)
        twin_first = any(
            a == b and gpus < more for a, b, gpus, more in zip(nodes, nodes[1:], row, row[1:], strict=False)
        )  # equal nodes: one order is enough
        if not (meets or twin_first) and (sum(row) <= most or row == kept):
            yield row


def _value(choices: Choices, job: int, nodes: tuple[Node, ...] | list[Node], row: tuple[int, ...]) -> float:
    """Of a row to a job; `nodes` begin their `held` with it."""
    first, width, num_gpus = int(choices.first[job]), _width(choices, job), sum(row)
    is_kept = row == tuple(node.held[0] for node in nodes)
    if not num_gpus:
        return float(choices.value[first])
    used = [node.rack for node, gpus in zip(nodes, row, strict=True) if gpus]
    value = float(choices.keep[job]) if is_kept else -np.inf
    if num_gpus < width and len(used) <= choices.most_nodes[job] and not choices.pinned[job]:
        value = max(value, float(choices.value[first + choices.spread[len(used), len(set(used))] * width + num_gpus]))
    return value


def _left(nodes: tuple[Node, ...], row: tuple[int, ...]) -> Iterator[Node]:
    is_distributed = sum(gpus > 0 for gpus in row) > 1
    for node, gpus in zip(nodes, row, strict=True):
        met = node.has_distributed or (is_distributed and gpus > 0)
        yield Node(node.rack, node.held[1:], node.free - gpus, met)


def _width(choices: Choices, job: int) -> int:
    """Values of each class: for 0, 1 … GPUs."""
    return int(choices.first[job + 1] - choices.first[job]) // choices.num_classes


def price_bound(choices: Choices, price: float) -> float:
    """No plan has a higher sum: as if any job could buy any GPUs at `price` each."""
    highest = price * float(choices.capacity.sum())
    held = choices.held.matrix(choices.num_nodes).sum(axis=1)
    for job in range(choices.num_jobs):
        width = _width(choices, job)
        offers: FloatArray = choices.value[choices.first[job] : choices.first[job + 1]].reshape(-1, width).max(axis=0)
        highest += max(float((offers - price * np.arange(width)).max()), float(choices.keep[job] - price * held[job]))
    return highest
