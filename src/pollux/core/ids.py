"""Names of things: plain text at run time, distinct types to the type checker."""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)
"""Names one job for ever: never given to another job, also after the first has ended."""

NodeId = NewType("NodeId", str)
"""Names one machine of the cluster, as its provider calls it."""

DEFAULT_GPU_TYPE = "gpu"
"""The GPU type where nobody tells types apart."""
