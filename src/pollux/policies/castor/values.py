"""What GPUs are worth to each job in a round of castor, in the solver's terms.

A plan is worth what it brings per second, minus what changing to it costs: with c·r(k) the worth of training on k GPUs,
a change that stops training for δ seconds must pay within a horizon H, or within what is left of the job:

    keep what it holds            c·r(k)
    other GPUs                    c·r(k)·(1 − δ/min(H, δ + time left on k GPUs))
    start, or go on after waiting c·r(k)·(1 − δ/H)
    nothing                       0; −c·r(held)·δ/H for a job that runs: it will have to start again
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray
from pollux.policies.castor.pricing import balanced
from pollux.policies.pollux.roster import Columns
from pollux.policies.pollux.solver.choices import Choices

YOUNG_S, YOUNG_POWER = 60.0, 0.8
"""A job that was never measured is taken to need a minute on one GPU, and to speed up by K^0.8: short and scalable, so
that it starts at once. A minute on, its own figures take over."""
SHORTEST_HORIZON_S = 60.0
"""However cheap a re-allocation is: nobody can tell from less what another would bring."""
USUAL_DELAY_S = 30.0
"""For which `horizon_s` is given."""
TRUST = 1.4
"""How much longer the horizon is for a job of a known kind: what other GPUs bring it is no guess."""
DRAINING = 2.0
"""By how much the rank counts more when nobody arrives any longer: whoever ends first makes room, and nobody new takes
it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the policy is set to: see `Castor`."""

    rank_exponent: float
    drain_s: float
    unmeasured_delay_s: float
    horizon_s: float
    hold_s: float
    rest: float
    patience_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Believed:
    """What castor knows of the jobs of a round beside their columns."""

    sizes: FloatArray  # [1 + GPUs of the cluster] bool: so many are offered to jobs; their least always
    is_foreseen: FloatArray  # [J] bool: its kind is known
    waited_s: FloatArray  # [J]: without GPUs


def choices_of(
    columns: Columns, believed: Believed, rules: Rules, avoid_interference: bool
) -> tuple[Choices, float, int]:
    """All that each job may have, with its value; the price of a GPU; and how many have waited too long."""
    value, keep, pinned, price, num_overdue = appraise(
        columns.goodput,
        columns.first,
        columns.width,
        columns.has_model,
        columns.initial_batch_size,
        columns.least,
        columns.may_have,
        columns.most_nodes,
        columns.pinned,
        columns.fewest,
        columns.highest,
        columns.nodes.largest,
        columns.nodes.total,
        columns.held.first,
        columns.held_gpus,
        columns.held_class,
        columns.age_s,
        columns.held_for_s,
        columns.started_ago_s,
        columns.delay_s,
        columns.done,
        columns.total,
        believed.sizes,
        believed.is_foreseen,
        believed.waited_s,
        rules.rank_exponent,
        rules.drain_s,
        rules.unmeasured_delay_s,
        rules.horizon_s,
        rules.hold_s,
        rules.rest,
        rules.patience_s,
    )
    return columns.choices(value, keep, pinned, avoid_interference), price, num_overdue


@compiled
def appraise(
    goodput: FloatArray,
    first: FloatArray,
    width: FloatArray,
    has_model: FloatArray,
    initial: FloatArray,
    least: FloatArray,
    most: FloatArray,
    most_nodes: FloatArray,
    pinned: FloatArray,
    fewest: FloatArray,
    highest: FloatArray,
    largest_node: int,
    num_gpus: int,
    held_first: FloatArray,
    held_gpus: FloatArray,
    held_class: FloatArray,
    age_s: FloatArray,
    held_for_s: FloatArray,
    started_ago_s: FloatArray,
    measured_delay_s: FloatArray,
    done: FloatArray,
    total: FloatArray,
    sizes: FloatArray,
    is_foreseen: FloatArray,
    waited_s: FloatArray,
    rank_exponent: float,
    drain_s: float,
    unmeasured_delay_s: float,
    usual_horizon_s: float,
    hold_s: float,
    rest: float,
    patience_s: float,
) -> tuple[FloatArray, FloatArray, FloatArray, float, int]:
    """`value`, `keep` and `pinned` of `Choices`, the price, and the number of jobs that are overdue.

    Arrays are those of `Columns` and `Believed`. All in one: with few jobs, calls from Python take longest.
    """
    jobs = len(width)
    left, delay_s, horizon_s, overdue = np.empty(jobs), np.empty(jobs), np.empty(jobs), np.empty(jobs)
    keeps, stays = np.empty(jobs, dtype=np.bool_), np.empty(jobs, dtype=np.bool_)
    num_overdue, youngest_s = 0, np.inf
    for j in range(jobs):
        youngest_s = min(youngest_s, age_s[j])
        left[j] = 1.0
        if has_model[j]:
            left[j] = total[j] - done[j] if done[j] < total[j] else np.nan
        delay_s[j] = unmeasured_delay_s if np.isnan(measured_delay_s[j]) else measured_delay_s[j]
        horizon_s[j] = horizon(delay_s[j], usual_horizon_s * (TRUST if is_foreseen[j] else 1.0))
        overdue[j] = max(waited_s[j] / patience_s - 1.0, 0.0)
        num_overdue += overdue[j] > 0.0
        may_keep = least[j] <= held_gpus[j] <= most[j] and held_first[j + 1] - held_first[j] <= most_nodes[j]
        keeps[j] = held_gpus[j] > 0 and (may_keep or pinned[j])
        rests = held_for_s[j] < rest * delay_s[j] or (not is_foreseen[j] and started_ago_s[j] < hold_s)
        stays[j] = pinned[j] or (rests and keeps[j])
    rate = np.empty(len(goodput))
    begin, size, pace = menus(goodput, first, width, len(fewest), has_model, initial, least, most, sizes, rate)
    exponent = rank_exponent * (DRAINING if youngest_s > drain_s else 1.0)
    price, worth = balanced(begin, size, pace, left, age_s, exponent, num_gpus)
    value, keep = np.empty(len(goodput)), np.empty(jobs)
    fill_values(
        rate,
        first,
        width,
        least,
        most,
        most_nodes,
        stays,
        fewest,
        highest,
        largest_node,
        held_gpus,
        held_class,
        keeps,
        sizes,
        left,
        worth,
        delay_s,
        horizon_s,
        overdue,
        value,
        keep,
    )
    return value, keep, stays, price, num_overdue


@compiled
def horizon(delay_s: float, usual_s: float) -> float:
    """Seconds within which a re-allocation of that delay must pay."""
    return max(usual_s * math.sqrt(delay_s / USUAL_DELAY_S), SHORTEST_HORIZON_S, delay_s)


@compiled
def menus(
    goodput: FloatArray,
    first: FloatArray,
    width: FloatArray,
    num_classes: int,
    has_model: FloatArray,
    initial: FloatArray,
    least: FloatArray,
    most: FloatArray,
    sizes: FloatArray,
    rate: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Sizes that each job is offered, with its best rate on so many GPUs: where each job's begin [J + 1], and both.

    `rate`, in iterations of M0 a second, is filled for all that `goodput` is about.
    """
    jobs = len(width)
    begin = np.zeros(jobs + 1, dtype=np.int64)
    length = 0
    for j in range(jobs):
        length += width[j]
    size, best = np.empty(length, dtype=np.int64), np.empty(length)
    count = 0
    for j in range(jobs):
        for K in range(width[j] + 1):
            highest = 0.0
            for c in range(num_classes):
                at = first[j] + c * (width[j] + 1) + K
                rate[at] = goodput[at] / initial[j] if has_model[j] else K**YOUNG_POWER / YOUNG_S
                highest = max(highest, rate[at])
            if highest > 0.0 and K > 0 and least[j] <= K <= most[j] and (sizes[K] or least[j] == K):
                size[count], best[count] = K, highest
                count += 1
        begin[j + 1] = count
    return begin, size[:count], best[:count]


@compiled
def fill_values(
    rate: FloatArray,
    first: FloatArray,
    width: FloatArray,
    least: FloatArray,
    most: FloatArray,
    most_nodes: FloatArray,
    pinned: FloatArray,
    fewest: FloatArray,
    highest: FloatArray,
    largest_node: int,
    held_gpus: FloatArray,
    held_class: FloatArray,
    keeps: FloatArray,
    sizes: FloatArray,
    left: FloatArray,
    worth: FloatArray,
    delay_s: FloatArray,
    horizon_s: FloatArray,
    overdue: FloatArray,
    value: FloatArray,
    keep: FloatArray,
) -> None:
    """Write `value` and `keep` of `Choices`. Arrays are those of `appraise`."""
    all_together = 1.0
    for j in range(len(width)):
        kept = rate[first[j] + held_class[j] * (width[j] + 1) + held_gpus[j]] if held_gpus[j] > 0 else 0.0
        keep[j] = worth[j] * kept if keeps[j] else -np.inf
        charge = delay_s[j] / horizon_s[j]
        row, dearest = first[j], worth[j] * kept
        for c in range(len(fewest)):
            value[row] = -np.inf if pinned[j] else -charge * worth[j] * kept
            for K in range(1, width[j] + 1):
                is_allowed = (
                    not pinned[j]
                    and (sizes[K] or least[j] == K)
                    and least[j] <= K <= most[j]
                    and fewest[c] <= K <= highest[c]
                    and fewest[c] <= most_nodes[j]
                    and most_nodes[j] * largest_node >= K
                    and rate[row + K] > 0.0
                )
                if not is_allowed:
                    value[row + K] = -np.inf
                    continue
                pays = 1.0 - charge
                if held_gpus[j] > 0 and not np.isnan(left[j]):
                    pays = min(pays, 1.0 - delay_s[j] / (delay_s[j] + left[j] / rate[row + K]))
                value[row + K] = worth[j] * rate[row + K] * max(pays, 0.0)
                dearest = max(dearest, value[row + K])
            row += width[j] + 1
        all_together += dearest
    # Whoever is overdue goes before all others, and the longest overdue before the rest of them.
    for j in range(len(width)):
        if overdue[j] > 0.0 and not pinned[j]:
            for c in range(len(fewest)):
                value[first[j] + c * (width[j] + 1)] = -all_together * (1.0 + overdue[j])
