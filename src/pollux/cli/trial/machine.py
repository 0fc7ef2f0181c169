"""How busy this machine is, as Linux counts it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
IDLE = slice(3, 5)
"""Of the counters of all cores together: idle, and waiting for a disk."""
COUNTERS = slice(0, 8)
"""Those that are no part of others: guests are counted in user and nice already."""


class CpuTime(NamedTuple):
    """Ticks of all cores since the machine started."""

    busy: int
    total: int

    def share_since(self, before: CpuTime) -> float | None:
        """Of what the cores could do from then to now; None if that was too short a time to tell."""
        total = self.total - before.total
        return (self.busy - before.busy) / total if total > 0 else None


def cpu_time(stat: Path = STAT) -> CpuTime | None:
    """None where there is no /proc/stat."""
    try:
        name, *counters = stat.read_text("ascii").split("\n", 1)[0].split()
        ticks = [int(count) for count in counters][COUNTERS]
    except (OSError, ValueError):
        return None
    return CpuTime(sum(ticks) - sum(ticks[IDLE]), sum(ticks)) if name == "cpu" else None
