"""The search for the best plan of a round: the seam, and the solver that is the default."""

from pollux.policies.pollux.solver.choices import Choices, Rows
from pollux.policies.pollux.solver.priced import Priced
from pollux.policies.pollux.solver.seam import Budget, Solution, Solver

__all__ = ["Budget", "Choices", "Priced", "Rows", "Solution", "Solver"]
