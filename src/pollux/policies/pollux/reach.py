"""How many GPUs of each job a round is worked out for: with thousands of jobs, far fewer than they may have.

At p < 0 no number of GPUs is worth more than 0, so whoever gains enough by a few of them at the price cannot want many,
whatever they would bring. The solver tells whom that does not hold for.
"""

from __future__ import annotations

import numpy as np

from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.roster import Facts

MANY_JOBS = 2000
"""Below it, tables of all that jobs may have take no time to speak of."""
SHARES = 4
"""GPUs at first, in equal parts of the cluster. Jobs that scale perfectly need two, to be sure."""


class Reach:
    """By row, from round to round. Whoever has the row of a job that is gone may have a needlessly long one."""

    def __init__(self) -> None:
        self._of: FloatArray = np.zeros(0, dtype=np.int64)

    def cut(self, facts: Facts, most: FloatArray) -> FloatArray:
        """[J]: so many GPUs of those [J] that each may have at most; never less than it has or needs."""
        if len(facts) <= MANY_JOBS:
            return most
        missing = int(facts.row.max()) + 1 - len(self._of)
        if missing > 0:
            self._of = np.concatenate([self._of, np.zeros(2 * missing, dtype=np.int64)])
        at_first = SHARES * -(-facts.nodes.total // len(facts))
        reach = np.maximum(np.maximum(self._of[facts.row], at_first), np.maximum(facts.held_gpus, facts.least))
        return np.minimum(most, reach)

    def extend(self, facts: Facts, jobs: FloatArray, reached: FloatArray) -> None:
        """Twice as far for these jobs, who have reached so many [J]."""
        self._of[facts.row[jobs]] = 2 * reached[jobs]
