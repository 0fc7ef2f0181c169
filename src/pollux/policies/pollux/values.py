"""From goodput to what the solver is asked: the value to FITNESS_p of all that each job may have (`objective`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pollux.core import Shape
from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.holdings import lengths_of
from pollux.policies.pollux.objective import Objective
from pollux.policies.pollux.roster import Columns
from pollux.policies.pollux.solver.choices import Choices


class Question(NamedTuple):
    """A round of Pollux, before it is written in a solver's terms."""

    columns: Columns
    fair_share: Shape
    """An equal part of the cluster."""
    fair_goodput: FloatArray  # [J]: what each would have of that; 0 if nobody knows
    factor: FloatArray  # [J]: what re-allocation leaves of the speedup of a job that does not keep just what it holds
    objective: Objective
    avoid_interference: bool
    is_cut: FloatArray | None = None  # [J]: it may have more than the columns tell; None: nobody may


def choices_of(question: Question) -> Choices:
    """All that each job may have, with its value."""
    columns, fair_share, fair_goodput, factor, objective, avoid_interference, is_cut = question
    value, keep = np.empty(len(columns.goodput)), np.empty(len(columns))
    fill_values(
        columns.goodput,
        columns.first,
        columns.width,
        columns.least,
        columns.may_have,
        columns.most_nodes,
        columns.pinned,
        np.where(columns.has_model, fair_goodput, 0.0),
        factor,
        columns.fewest,
        columns.highest,
        columns.nodes.largest,
        columns.held_gpus,
        columns.held_class,
        lengths_of(columns.held),
        float(fair_share.num_gpus),
        objective.p,
        objective.scale,
        objective.floor,
        value,
        keep,
    )
    beyond = None if is_cut is None else np.where(is_cut, objective.supremum, -np.inf)
    return columns.choices(value, keep, columns.pinned, avoid_interference, beyond)


@compiled
def fill_values(
    goodput: FloatArray,
    first: FloatArray,
    width: FloatArray,
    least: FloatArray,
    most: FloatArray,
    most_nodes: FloatArray,
    pinned: FloatArray,
    fair: FloatArray,
    factor: FloatArray,
    fewest: FloatArray,
    highest: FloatArray,
    largest_node: int,
    held_gpus: FloatArray,
    held_class: FloatArray,
    held_nodes: FloatArray,
    fair_gpus: float,
    p: float,
    scale: float,
    floor: float,
    value: FloatArray,
    keep: FloatArray,
) -> None:
    """Write `value` and `keep` of `Choices`. A job whose goodput on the fair share is 0 is believed to scale perfectly.

    Arrays are those of `Columns`: [J], but for goodput and value, and for fewest and highest [C].
    """
    nothing = worth(0.0, p, scale, floor)
    for j in range(len(width)):
        row = first[j]
        for c in range(len(fewest)):
            value[row] = -np.inf if pinned[j] else nothing
            for K in range(1, width[j] + 1):
                is_allowed = (
                    not pinned[j]
                    and least[j] <= K <= most[j]
                    and fewest[c] <= K <= highest[c]
                    and fewest[c] <= most_nodes[j]
                    and most_nodes[j] * largest_node >= K
                )
                if is_allowed:
                    speedup = goodput[row + K] / fair[j] if fair[j] > 0.0 else K / fair_gpus
                    value[row + K] = worth(speedup * factor[j], p, scale, floor)
                else:
                    value[row + K] = -np.inf
            row += width[j] + 1
        held = held_gpus[j]
        keep[j] = -np.inf
        if held > 0 and (pinned[j] or (least[j] <= held <= most[j] and held_nodes[j] <= most_nodes[j])):
            at = first[j] + held_class[j] * (width[j] + 1) + held
            speedup = goodput[at] / fair[j] if fair[j] > 0.0 else held / fair_gpus
            keep[j] = worth(speedup, p, scale, floor)


@lean
def worth(speedup: float, p: float, scale: float, floor: float) -> float:
    """`Objective.values` of one."""
    x = scale * speedup + floor
    if p == -1.0:
        return -1.0 / x
    if p == 1.0:
        return x
    if p == 0.0:
        return math.log(x)
    power: float = x**p
    return power if p > 0.0 else -power
