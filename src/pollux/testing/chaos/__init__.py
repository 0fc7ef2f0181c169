"""Faults on a live cluster with real jobs, by a seed, and what must hold whatever falls: docs/chaos.md.

    python -m pollux.testing.chaos --minutes 5 --seed 1

As a library: `run_campaign(bed, seed, chosen(None), most_faults=100)` on a `LocalBed()`, or on a bed of your own.
"""

from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.campaign import Result, run_campaign
from pollux.testing.chaos.fault import FAULTS, Fault, NotNow, Scene, fault
from pollux.testing.chaos.local_bed import LocalBed
from pollux.testing.chaos.plan import chosen
from pollux.testing.chaos.violations import Kind, Violation

__all__ = [
    "FAULTS",
    "Bed",
    "Fault",
    "Kind",
    "LocalBed",
    "NotNow",
    "Result",
    "Scene",
    "Violation",
    "chosen",
    "fault",
    "run_campaign",
]
