"""The paper's solver, a genetic algorithm over rounds as matrices, the `problem`. Each operator is a small function."""

from pollux.policies.pollux.genetic.problem import Problem
from pollux.policies.pollux.genetic.search import Genetic

__all__ = ["Genetic", "Problem"]
