"""How the figures of live jobs read: times, shares, allocations, and what colour a phase has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime

from rich.text import Text

from pollux.core import NodeId, Phase
from pollux.wire.api import JobView

MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86400
UNITS = (("d", "h", DAY_S, HOUR_S), ("h", "min", HOUR_S, MINUTE_S), ("min", "s", MINUTE_S, 1))
"""With the next smaller one, and the seconds of both."""
STYLES = {
    Phase.PENDING: "yellow",
    Phase.STARTING: "cyan",
    Phase.RUNNING: "green",
    Phase.RESIZING: "cyan",
    Phase.STOPPING: "yellow",
    Phase.PAUSING: "yellow",
    Phase.PAUSED: "yellow",
    Phase.CANCELLING: "red",
    Phase.FAILED: "red",
    Phase.CANCELLED: "red",
    Phase.SUCCEEDED: "green",
}


def duration(seconds: float | None) -> str:
    """In the two largest units: `3 d 4 h`, `2 h 5 min`, `7 min 12 s`, `8 s`; a dash for None."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    for unit, small, size, per in UNITS:
        if whole >= size:
            rest = whole % size // per
            return f"{whole // size} {unit} {rest} {small}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def clock(at_s: float | None) -> str:
    """The local time of day; with the date if that is not today."""
    if at_s is None:
        return "–"
    then = datetime.fromtimestamp(at_s)
    return then.strftime("%H:%M:%S" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M:%S")


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def count(number: int, what: str) -> str:
    ending = "es" if what.endswith("s") else "s"
    return f"{number} {what}" if number == 1 else f"{number} {what}{ending}"


def figure(value: float | None, digits: int = 3) -> str:
    """So many digits that mean something, and never an exponent below a billion."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 10**digits:
        return f"{value:.0f}" if abs(value) < 1e9 else f"{value:.{digits}g}"
    return f"{value:.{digits}g}"


def phase(job: JobView) -> Text:
    return Text(job.phase, style=STYLES[job.phase])


def placed(allocation: Mapping[NodeId, int]) -> str:
    """`n0×2 n1×1`."""
    return " ".join(f"{node}×{gpus}" for node, gpus in sorted(allocation.items()))


def gpus(job: JobView) -> str:
    """What it holds; during a resize, with what it will hold."""
    if job.next_allocation is not None:
        return f"{job.gpus}→{sum(job.next_allocation.values())}"
    return str(job.gpus) if job.phase.holds_gpus else "–"


def why(job: JobView) -> str:
    """One line on how it stands: why it ended, or what it waits for, and how it failed before."""
    failure = failed(job.exit_reason, job.exit_code)
    if job.phase.is_terminal or not failure:
        return failure or job.waits_for
    if job.waits_for:
        return f"{job.waits_for} ({failure})"
    return f"tried again after {failure}"


def failed(reason: str, code: int | None) -> str:
    """Why it failed, in one line: of the end of its log, which the reason quotes, only the last line."""
    what, _, quote = reason.partition(" Last lines of ")
    last = quote.rpartition(" | ")[2] if " | " in quote else quote.partition(": ")[2]
    lines = what.strip().splitlines()
    if not last or code is None:
        return lines[0].strip() if lines else ""
    return f"{f'signal {-code}' if code < 0 else f'exit code {code}'}: {last.strip()}"


def age(job: JobView, now_s: float) -> float:
    """Since its submission, until its end."""
    return (now_s if job.finished_at_s is None else job.finished_at_s) - job.submitted_at_s


def title(job: JobView) -> str:
    """Its id, and its name if the id does not tell it."""
    return f"{job.id} ({name(job)})" if name(job) else job.id


def name(job: JobView) -> str:
    """Empty if the id tells it."""
    return "" if job.id.startswith(job.name) else job.name
