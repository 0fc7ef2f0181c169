"""Where in its loops a script is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """The how-many-eth loop of the script, its epoch, and what that counts from."""

    loop: int = 0
    epoch: int = 0
    start: float = 0.0
    is_finished: bool = False
    kind: str = ""
    """epochs or passes."""
    count: int = 0
    """How many of them the loop has."""
