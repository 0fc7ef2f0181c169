"""What the genetic solver's individuals are worth, many at once, and which of them are new.

Axes: S places of the store of individuals, J jobs, N nodes, C classes of spread, K GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.genetic.problem import Problem


class Worth(NamedTuple):
    """A problem's objectives as tables, so that compiled code needs no formula of them."""

    capacity: FloatArray  # [N] int64
    rack: FloatArray  # [N] int64
    spread: FloatArray  # [N + 1, racks + 1] int64
    present: FloatArray  # [J, N] int16
    speedup: FloatArray  # [J, C, K + 1]
    kept: FloatArray  # [J, C, K + 1]: value to the objective of a row that is the present one
    moved: FloatArray  # [J, C, K + 1]: of another

    @classmethod
    def of(cls, problem: Problem) -> Worth:
        values, speedup = problem.objective.values, np.array(problem.speedup, dtype=np.float64, order="C")
        # Copies: arrays that cannot be written or lie otherwise in memory would each be compiled for anew.
        return cls(
            capacity=np.array(problem.capacity, dtype=np.int64, order="C"),
            rack=np.array(problem.rack, dtype=np.int64, order="C"),
            spread=np.array(problem.spread, dtype=np.int64, order="C"),
            present=np.array(problem.present, dtype=np.int16, order="C"),
            speedup=speedup,
            kept=values(speedup),
            moved=values(speedup * problem.factor[:, None, None]),
        )


@compiled
def evaluate(store: FloatArray, places: FloatArray, worth: Worth, mean_value: FloatArray, utility: FloatArray) -> None:
    """Mean value to the objective, and utility, of the individuals at these places of the store [S, J, N].

    Utility, the artifact's second objective: all speedups together per GPU of the nodes in use.
    Both are written into the last two arguments [S].
    """
    _, J, N = store.shape
    seen = np.empty(len(worth.spread[0]), dtype=np.int64)
    in_use = np.empty(N, dtype=np.bool_)
    for place in places:
        individual = store[place]
        value, speedup = 0.0, 0.0
        for n in range(N):
            in_use[n] = False
        for r in range(len(seen)):
            seen[r] = -1
        for j in range(J):
            num_gpus, num_nodes, changes = 0, 0, 0
            for n in range(N):
                gpus = individual[j, n]
                num_gpus += gpus
                num_nodes += gpus > 0
                changes += gpus != worth.present[j, n]
            num_racks = min(num_nodes, 1)
            if num_nodes > 0:
                for n in range(N):
                    in_use[n] |= individual[j, n] > 0
            if num_nodes > 1 and len(seen) > 2:
                num_racks = 0
                for n in range(N):
                    if individual[j, n] > 0 and seen[worth.rack[n]] != j:
                        seen[worth.rack[n]] = j
                        num_racks += 1
            spread = worth.spread[num_nodes, num_racks]
            speedup += worth.speedup[j, spread, num_gpus]
            value += worth.moved[j, spread, num_gpus] if changes else worth.kept[j, spread, num_gpus]
        gpus_in_use = 0
        for n in range(N):
            if in_use[n]:
                gpus_in_use += worth.capacity[n]
        mean_value[place] = value / J
        utility[place] = speedup / gpus_in_use if gpus_in_use > 0 else 0.0


@compiled
def new_ones(
    store: FloatArray, mean_value: FloatArray, utility: FloatArray, known: FloatArray, places: FloatArray
) -> FloatArray:
    """Which of these places [M] of the store hold somebody who is neither at a known one nor at an earlier of them.

    Equals are worth the same, so that hardly any others are compared entry by entry.
    """
    _, J, N = store.shape
    is_new = np.ones(len(places), dtype=np.bool_)
    for i in range(len(places)):
        place = places[i]
        for k in range(len(known) + i):
            other = known[k] if k < len(known) else places[k - len(known)]
            if mean_value[other] != mean_value[place] or utility[other] != utility[place]:
                continue
            differs = False
            for j in range(J):
                for n in range(N):
                    if store[other, j, n] != store[place, j, n]:
                        differs = True
                        break
                if differs:
                    break
            if not differs:
                is_new[i] = False
                break
    return is_new
