"""The last steps to the best plan of a small cluster, after all other means: an integer program.

The prices of GPUs and of nodes say of most options that no plan with them beats the one in hand. The others go into
the program (program.py). All sums are of *losses*, how much less than by its best option a job gets: values may be as
far apart as −1e30 and −1, but what the prices leave is not.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.choices import Choices, Rows
from pollux.policies.pollux.solver.program import APART, KEEP, LOCAL, NOTHING, Cluster, Options, Program

REPEATS = 4
"""How often a better plan in hand may make the program smaller."""
TELLABLE = 1e-9
"""Smallest gap, as a share of what is at stake, that is worth a search: below it rounding decides."""
CERTAIN = 1e-6
"""Share of the gap by which the tolerances of HiGHS may move its bound."""
PRECISE = 1e-7
"""How near to the value, as a share of what is at stake, the bound of the best plan should be."""


def finish(
    choices: Choices, incumbent: Rows, value: float, bound: float, price: float, node_price: float, *, node_limit: int
) -> tuple[Rows, float, float] | None:
    """A plan no worse than `incumbent`, which is worth `value`; its value; and a bound no higher than `bound`.

    `price` is of a GPU, `node_price` of each node of a job on several. Any prices ≥ 0 will do, but those of the
    lowest bound leave the smallest program. `node_limit` counts nodes of the search tree. None if the round is
    beyond the model (several racks, more than two classes of spread, too many options) or `incumbent` breaks a rule.
    """
    options = _options(choices, cluster := _without_pinned(choices)) if _is_supported(choices) else None
    worth = worth_of(choices, incumbent)
    if options is None or worth is None:
        return None
    best = np.where(choices.pinned, choices.keep, -np.inf)
    np.maximum.at(best, options.job, options.value)
    rows, loss, total = incumbent, math.fsum(best - worth), math.fsum(best)

    node_price = node_price if choices.avoid_interference else 0.0
    charged = best[options.job] - options.value + price * options.gpus + node_price * options.nodes
    cheapest = np.full(choices.num_jobs, np.inf)
    np.minimum.at(cheapest, options.job, charged)
    regret = charged - cheapest[options.job]
    sold = price * float(cluster.free.sum()) + node_price * float(cluster.may_be_apart.sum())
    at_prices = math.fsum([*cheapest[~choices.pinned], -sold])  # no plan loses less
    least = max(at_prices, 0.0)
    has_choice = np.bincount(options.job, minlength=choices.num_jobs) > 1
    at_stake = math.fsum(np.abs(best[has_choice]))
    for _ in range(REPEATS):
        gap = loss - at_prices
        if loss - least <= TELLABLE * (at_stake + loss):
            break
        left = regret <= gap * (1.0 + CERTAIN)
        program = Program(choices, cluster, options.only(left), regret[left], price, node_price, gap)
        if program.is_too_large:
            return None
        found, proven = program.solve(node_limit)
        least = min(max(least, at_prices + gap * (proven - CERTAIN)), loss)
        worth = None if found is None else worth_of(choices, found)
        if found is None or worth is None or (new_loss := math.fsum(best - worth)) >= loss:
            break
        rows, loss, value = found, new_loss, math.fsum(worth)
        if gap * CERTAIN <= PRECISE * (at_stake + loss):
            break
    return rows, value, max(value, min(bound, total - least))


def worth_of(choices: Choices, rows: Rows) -> FloatArray | None:
    """[J] what each job's share of a plan is worth; None if the plan breaks a rule."""
    count, held_count = np.diff(rows.first), np.diff(choices.held.first)
    job = np.repeat(np.arange(choices.num_jobs), count)
    gpus = np.bincount(job, rows.gpus, choices.num_jobs).astype(np.int64)
    is_kept = (count > 0) & (count == held_count)
    mine, theirs = is_kept[job], np.repeat(is_kept, held_count)
    differs = (rows.node[mine] != choices.held.node[theirs]) | (rows.gpus[mine] != choices.held.gpus[theirs])
    is_kept[job[mine][differs]] = False

    apart = count > 1
    used = np.bincount(rows.node, rows.gpus, choices.num_nodes)
    meeting = np.bincount(rows.node[apart[job]], minlength=choices.num_nodes)
    pinned = np.bincount(rows.node[(apart & choices.pinned)[job]], minlength=choices.num_nodes)
    if (used > choices.capacity).any() or (choices.pinned & ~is_kept).any() or (rows.gpus < 1).any():
        return None
    if choices.avoid_interference and (meeting > np.maximum(pinned, 1)).any():
        return None

    width = np.diff(choices.first) // choices.num_classes
    fits = (gpus < width) & (count <= choices.most_nodes) & ~choices.pinned
    spread = choices.spread[count, np.minimum(count, 1)]
    place = choices.first[:-1] + np.where(fits, spread * width + gpus, 0)
    worth = np.where(fits, choices.value[place], -np.inf)
    worth = np.where(is_kept, np.maximum(worth, choices.keep), worth)
    return worth if (worth > -np.inf).all() else None


def _is_supported(choices: Choices) -> bool:
    """Whether "on one node" and "on several" is all that matters."""
    is_one_rack = choices.num_classes <= 2 and (choices.rack == 0).all()
    return bool(choices.num_jobs and is_one_rack and (choices.spread[2:, 1] == choices.num_classes - 1).all())


def _without_pinned(choices: Choices) -> Cluster:
    everything = Cluster(choices.capacity, np.ones(choices.num_nodes, dtype=bool))
    return everything.give_held(choices, np.flatnonzero(choices.pinned))


def _options(choices: Choices, cluster: Cluster) -> Options | None:
    """What jobs that are not pinned may have; None if one of them may not even have nothing."""
    width = np.diff(choices.first) // choices.num_classes
    job = np.repeat(np.arange(choices.num_jobs), width * choices.num_classes)
    spread, gpus = np.divmod(np.arange(len(choices.value)) - choices.first[job], width[job])
    allowed = (choices.value > -np.inf) & ~choices.pinned[job]

    def offered(kind: int, mask: FloatArray, nodes: FloatArray) -> Options:
        (at,) = np.nonzero(allowed & mask)
        return Options(job[at], np.full(len(at), kind), gpus[at], nodes[at], choices.value[at])

    on_one, no_nodes = spread == 0, np.zeros(len(job), dtype=np.int64)
    fits = (gpus > 0) & (gpus <= cluster.free.max(initial=0)) & (choices.most_nodes[job] > 0)
    # The largest nodes say how many GPUs a job on several can reach, and how few nodes will do.
    within = np.cumsum(-np.sort(-cluster.free[cluster.may_be_apart]))
    reach = np.concatenate([[0, 0], within[1:]])[np.clip(choices.most_nodes, 0, len(within))]
    fewest = np.maximum(np.searchsorted(within, gpus) + 1, 2)
    is_apart = (spread == choices.num_classes - 1) & (gpus > 1) & (gpus <= reach[job])
    parts = (
        offered(NOTHING, on_one & (gpus == 0), no_nodes),
        offered(LOCAL, on_one & fits, no_nodes),
        offered(APART, is_apart, fewest),
        _kept(choices, cluster),
    )
    found = Options(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    has_some = np.bincount(found.job, minlength=choices.num_jobs) > 0
    return found if (has_some | choices.pinned).all() else None


def _kept(choices: Choices, cluster: Cluster) -> Options:
    """Of the jobs that may keep what they hold, and can beside those that are pinned."""
    held, num_nodes = choices.held, np.diff(choices.held.first)
    job = np.repeat(np.arange(choices.num_jobs), num_nodes)
    is_blocked = (held.gpus > cluster.free[held.node]) | ((num_nodes[job] > 1) & ~cluster.may_be_apart[held.node])
    may = (choices.keep > -np.inf) & ~choices.pinned
    may[job[is_blocked]] = False
    gpus = np.bincount(job, held.gpus, choices.num_jobs).astype(np.int64)
    (jobs,) = np.nonzero(may)
    nodes = np.where(num_nodes > 1, num_nodes, 0)[jobs]
    return Options(jobs, np.full(len(jobs), KEEP), gpus[jobs], nodes, choices.keep[jobs])
