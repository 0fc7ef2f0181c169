"""The goodput model: throughput, efficiency, noise scale, fitting, and the best (m, s). Pure functions.

Must not know clocks, files, torch, or who asks. Formulas beside function names: docs/goodput.md.
"""

from pollux.goodput.best import NOTHING_FITS, UNKNOWN_GRADIENT, BestConfig, best, best_among
from pollux.goodput.candidates import DEFAULT_BATCH, PUBLISHED_BATCH, BatchOptions, Candidates, candidates
from pollux.goodput.efficiency import efficiency, gain, noise_scale, shares
from pollux.goodput.fit import Fit, fit, fit_many
from pollux.goodput.fit_options import DEFAULT_FIT, PUBLISHED, FitOptions
from pollux.goodput.goodput import GoodputModel
from pollux.goodput.levels import (
    PAPER,
    RACKS,
    LevelsModel,
    ThetaRacks,
    ThetaSys,
    t_grad,
    t_iter,
    t_sync,
    throughput_model,
)
from pollux.goodput.observations import Observations
from pollux.goodput.tables import Envelope, ShapeSet, Tables, tables
from pollux.goodput.throughput import Minimum, Prior, Theta, ThroughputModel, iteration_time, throughput

__all__ = [
    "DEFAULT_BATCH",
    "DEFAULT_FIT",
    "NOTHING_FITS",
    "PAPER",
    "PUBLISHED",
    "PUBLISHED_BATCH",
    "RACKS",
    "UNKNOWN_GRADIENT",
    "BatchOptions",
    "BestConfig",
    "Candidates",
    "Envelope",
    "Fit",
    "FitOptions",
    "GoodputModel",
    "LevelsModel",
    "Minimum",
    "Observations",
    "Prior",
    "ShapeSet",
    "Tables",
    "Theta",
    "ThetaRacks",
    "ThetaSys",
    "ThroughputModel",
    "best",
    "best_among",
    "candidates",
    "efficiency",
    "fit",
    "fit_many",
    "gain",
    "iteration_time",
    "noise_scale",
    "shares",
    "t_grad",
    "t_iter",
    "t_sync",
    "tables",
    "throughput",
    "throughput_model",
]
