"""Pollux inside a training script: `from pollux.torch import Job`. See docs/agent.md.

The public face of `pollux.agent`; everything a script needs is here.
"""

from pollux.agent.job import Job
from pollux.agent.metrics import Average
from pollux.agent.options import Options
from pollux.agent.order import permutation
from pollux.agent.rules import (
    AdamScale,
    AdaScale,
    Legw,
    Linear,
    Scaling,
    ScalingRule,
    SquareRoot,
    Unscaled,
)
from pollux.agent.shards import Shards

__all__ = [
    "AdaScale",
    "AdamScale",
    "Average",
    "Job",
    "Legw",
    "Linear",
    "Options",
    "Scaling",
    "ScalingRule",
    "Shards",
    "SquareRoot",
    "Unscaled",
    "permutation",
]
