"""How long each job has been without GPUs: what nobody can lie about."""

from __future__ import annotations

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.moment import Moment


class Waiting:
    """A memory of who held GPUs when. Where it knows nothing of a job that ran before, its wait begins now."""

    def __init__(self) -> None:
        self._held_at_s: FloatArray = np.full(0, np.nan)  # by row of the moment; NaN where nothing is known

    def read(self, moment: Moment) -> FloatArray:
        """[J]: seconds since each last held GPUs, or was submitted; 0 for those who hold some."""
        now_s, rows = float(moment.snapshot.time_s), moment.row
        held = moment.held_gpus, moment.ran_before, moment.age_s
        self._held_at_s, waited_s = held_at(now_s, rows, *held, self._held_at_s)
        return waited_s


@compiled
def held_at(
    now_s: float, row: FloatArray, held_gpus: FloatArray, ran_before: FloatArray, age_s: FloatArray, known: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """When jobs last held GPUs, by row, and for how long each has waited [J]; from when they did before now, by row."""
    waited_s = np.empty(len(row))
    num_rows = len(known)
    for j in range(len(row)):
        num_rows = max(num_rows, row[j] + 1)
    found = np.full(num_rows, np.nan)  # whoever is not here has no row any longer
    for j in range(len(row)):
        at_s = known[row[j]] if row[j] < len(known) else np.nan
        if held_gpus[j] > 0 or np.isnan(at_s):
            at_s = now_s
        if not ran_before[j]:
            at_s = now_s - age_s[j]
        found[row[j]], waited_s[j] = at_s, now_s - at_s
    return found, waited_s
