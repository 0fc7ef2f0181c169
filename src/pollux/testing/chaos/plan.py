"""Which faults fall, in which order and how close to each other: all of that follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pollux.errors import UnknownName
from pollux.testing.chaos import faults_agents, faults_files, faults_processes
from pollux.testing.chaos.fault import FAULTS, Fault

__all__ = ["Round", "Strike", "chosen", "rounds"]

SIZES = (1, 1, 2, 2, 3)
"""How many faults fall at nearly the same time."""
OVERLAP = 0.25
"""How often the next round does not wait until the cluster has recovered from the one before."""
_DECLARED = (faults_agents, faults_files, faults_processes)  # importing them is what fills FAULTS


@dataclass(frozen=True)
class Strike:
    fault: Fault
    pause_s: float
    """From the fault before it, of the same round, to this one."""
    seed: str
    """Of its own choices: whom it befalls, for how long."""


@dataclass(frozen=True)
class Round:
    strikes: tuple[Strike, ...]
    waits: bool
    """Until the cluster has recovered."""
    pause_s: float
    """Before it."""


def chosen(names: Sequence[str] | None) -> list[Fault]:
    """Those of these names; None: all of them."""
    for name in names or ():
        if name not in FAULTS:
            raise UnknownName("fault", name, FAULTS)
    return [one for one in FAULTS.values() if names is None or one.name in names]


def rounds(seed: int, faults: Sequence[Fault]) -> Iterator[Round]:
    """For ever. Every fault falls once before any of them falls again."""
    draw = random.Random(f"plan/{seed}")
    count = 0
    deck: list[Fault] = []
    while True:
        strikes: list[Strike] = []
        size = draw.choice(SIZES)
        while len(strikes) < size:
            if not deck:
                deck = draw.sample(faults, len(faults))
            # Two ends of the service at a time are one.
            if deck[-1].ends_service and any(one.fault.ends_service for one in strikes):
                break
            fault = deck.pop()
            strikes.append(Strike(fault, draw.uniform(0.0, 0.6) if strikes else 0.0, f"{seed}/{count}/{fault.name}"))
            count += 1
        strikes.sort(key=lambda strike: strike.fault.ends_all)
        yield Round(tuple(strikes), draw.random() >= OVERLAP, draw.uniform(0.0, 1.5))
