"""The paper's solver, a genetic algorithm. Each operator is a small function in a file of its own."""

from pollux.policies.pollux.genetic.search import Genetic

__all__ = ["Genetic"]
