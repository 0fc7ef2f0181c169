"""A campaign in figures, and in sentences on what it found."""

from __future__ import annotations

from collections.abc import Sequence

from pollux.testing.chaos.campaign import Result
from pollux.testing.chaos.violations import Kind


def summary(results: Sequence[Result]) -> str:
    """For people: a table, then every violation, then where the files are."""
    lines = [f"{'seed':>6} {'faults':>7} {'jobs':>5}  {'longest hang':>12} {'slowest recovery':>17}  violations"]
    for result in results:
        slowest_s = max(result.recoveries_s, default=0.0)
        found = [f"{result.count(kind)} {kind}" for kind in Kind if result.count(kind)]
        lines.append(
            f"{result.seed:>6} {result.num_injected:>7} {result.jobs.total():>5}  {result.longest_hang_s:>10.1f} s "
            f"{slowest_s:>15.1f} s  {', '.join(found) or 'none'}"
        )
    for result in results:
        lines += ["", f"seed {result.seed}, {result.seconds:.0f} s:"]
        lines.append(f"  the longest hang was that of {result.longest_hang or 'nobody'}")
        lines.append("  faults: " + ", ".join(f"{name} {count}" for name, count in sorted(result.injected.items())))
        lines.append("  jobs: " + ", ".join(f"{count} {phase}" for phase, count in result.jobs.most_common()))
        never = {name: why for name, why in result.skipped.items() if name not in result.injected}
        lines += [f"  {name} never fell: {why}" for name, why in sorted(never.items())]
        lines += [f"  {violation}" for violation in result.violations]
        if result.kept is not None:
            lines.append(f"  files are kept in {result.kept}")
    return "\n".join(lines)
