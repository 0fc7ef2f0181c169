"""Measurements of a job as arrays, checked once, in the form that the fit works on.

One observation is a (shape, per-GPU batch size) that the job ran with: the mean time of a pass without communication
and of a pass with it. `core.Profile` is what travels and is stored; this is what kernels read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pollux.core import Observation, ObservationKey
from pollux.errors import InvalidProfile
from pollux.goodput.numerics import FloatArray

SHORTEST_PASS_S, LONGEST_PASS_S = 1e-9, 1e6
"""A nanosecond or eleven days is a broken clock; the bounds also keep powers of times inside floating point."""

_LEAST, _MOST = np.nextafter(0.0, 1.0), np.finfo(float).max
LOWEST = np.array([[1.0], [1.0], [1.0], [_LEAST], [SHORTEST_PASS_S], [SHORTEST_PASS_S]])
HIGHEST = np.array([[_MOST], [_MOST], [_MOST], [_MOST], [LONGEST_PASS_S], [LONGEST_PASS_S]])
"""Of each column of `Observations`. The rules one by one, with what to say: `Observations._refuse`."""


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Parallel arrays [n] of floats: GPUs, nodes, racks, examples per GPU and pass, seconds."""

    K: FloatArray
    N: FloatArray
    R: FloatArray
    m: FloatArray
    t_grad: FloatArray
    t_iter: FloatArray

    def __len__(self) -> int:
        return len(self.K)

    @classmethod
    def of(cls, measured: Mapping[ObservationKey, Observation]) -> Observations:
        """From one GPU type's part of a `Profile`; keys without a whole, measurable iteration are left out."""
        rows = []
        for key, seen in measured.items():
            count, shape = seen.sync_count, key.shape
            if count == 0:
                continue
            # The means that `Observation` has, without asking twice whether there are any.
            computing = seen.accum_time_s + (seen.sync_pass_time_s - seen.sync_time_s)
            t_grad, t_iter = computing / (seen.accum_count + count), seen.sync_pass_time_s / count
            if t_grad >= SHORTEST_PASS_S:
                rows.append((shape.num_gpus, shape.num_nodes, shape.num_racks, key.per_gpu_batch_size, t_grad, t_iter))
        return cls.from_rows(rows)

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[float, float, float, float, float, float]]) -> Observations:
        """From rows (K, N, R, m, t_grad, t_iter); raises InvalidProfile for what cannot be fitted."""
        listed = list(rows)
        try:
            table = np.array(listed, dtype=float).reshape(len(listed), 6)
        except (TypeError, ValueError):
            fix = "Give (K, N, R, m, t_grad, t_iter) a row"
            raise InvalidProfile("rows", listed[:1], "not six numbers in each row", fix) from None
        return cls(*np.ascontiguousarray(table.T))

    def subset(self, chosen: FloatArray) -> Observations:
        """The observations that a boolean mask or an index array picks."""
        return Observations(
            self.K[chosen], self.N[chosen], self.R[chosen], self.m[chosen], self.t_grad[chosen], self.t_iter[chosen]
        )

    def __post_init__(self) -> None:
        if not len(self.K):
            raise InvalidProfile("profile", [], "no observation to fit", "Run at least one synchronising pass first")
        columns = np.array((self.K, self.N, self.R, self.m, self.t_grad, self.t_iter))
        is_possible = ((columns >= LOWEST) & (columns <= HIGHEST)).all()
        if not is_possible or (columns[:2] < columns[1:3]).any():  # K ≥ N ≥ R
            self._refuse()

    def _refuse(self) -> None:
        """Name the first observation that breaks a rule, and the rule."""
        time_fix = f"Check the timer: a pass takes {SHORTEST_PASS_S:g} to {LONGEST_PASS_S:g} s"
        rules = (
            ("num_gpus", self.K, self.K >= 1, "at least one GPU is needed", "Give K ≥ 1"),
            ("num_racks", self.R, self.R >= 1, "at least one rack is needed", "Give 1 ≤ racks ≤ nodes"),
            ("num_nodes", self.N, self.N >= self.R, "fewer nodes than racks", "Give nodes ≥ racks ≥ 1"),
            ("num_gpus", self.K, self.K >= self.N, "K < N: fewer GPUs than nodes", "Give K ≥ N, one GPU a node"),
            ("per_gpu_batch_size", self.m, self.m > 0, "must be positive", "Give the examples per GPU and pass"),
            ("grad_time_s", self.t_grad, _is_possible(self.t_grad), "not a time that a pass takes", time_fix),
            ("iteration_time_s", self.t_iter, _is_possible(self.t_iter), "not a time that a pass takes", time_fix),
        )
        for field, values, holds, problem, fix in rules:
            good = holds & np.isfinite(values)
            if not good.all():
                row = int(np.flatnonzero(~good)[0])
                value = float(values[row])
                raise InvalidProfile(
                    f"observation {row}: {field}", value, problem if np.isfinite(value) else "must be finite", fix
                )


def _is_possible(seconds: FloatArray) -> FloatArray:
    return (seconds >= SHORTEST_PASS_S) & (seconds <= LONGEST_PASS_S)
