"""Small drawings of one job's history, a few lines of SVG each: no library is quick enough for hundreds of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from pollux.simulator.metrics import JobOutcome
from pollux.simulator.timeline import History

WIDTH = 320
"""Of all of them, in units of the drawing; no more steps than that are drawn."""
STRIP, TRACK, GAP = 22, 34, 22
Point = tuple[int, int | None]
"""From this x on, this y; None where there is nothing to show."""


def strip(history: History, end_s: float, most_gpus: int) -> str:
    """GPUs of the job over the time of the whole run, so that the strips below each other show who came when."""
    points = _points(history, history.num_gpus, 0.0, end_s, lambda gpus: STRIP * gpus / max(most_gpus, 1), STRIP)
    return (
        f'<svg class="strip" viewBox="0 0 {WIDTH} {STRIP}" aria-hidden="true"><path d="{_area(points, STRIP)}"/></svg>'
    )


def tracks(history: History, job: JobOutcome) -> str:
    """GPUs, batch size and efficiency of the job, from its submission to its end."""
    most_gpus = max(history.num_gpus, default=0)
    batches = [batch for batch in history.batch_size if batch]
    low, high = min(batches, default=1), max(batches, default=1)
    spread = math.log(high / low) or 1.0
    efficiencies = [value for value, gpus in zip(history.efficiency, history.num_gpus, strict=True) if gpus]

    def of_batch(batch: float) -> float:
        # Halfway up where it never changes, and never on the ground: that is where nothing is.
        return TRACK * (0.15 + 0.85 * (math.log(batch / low) / spread if high > low else 0.4))

    span = job.submitted_at_s, job.finished_at_s
    rows: list[tuple[str, Sequence[float], Callable[[float], float]]] = [
        (f"GPUs, up to {most_gpus}", history.num_gpus, lambda gpus: TRACK * gpus / max(most_gpus, 1)),
        (_between("batch size", low, high, "{:,d}", " (log)"), history.batch_size, of_batch),
        (
            _between("efficiency", min(efficiencies, default=0.0), max(efficiencies, default=0.0), "{:.2f}"),
            history.efficiency,
            lambda value: TRACK * value,
        ),
    ]
    height = len(rows) * (TRACK + GAP) + GAP
    label = f"{job.name}: {'; '.join(text for text, _, _ in rows)}"
    parts = [f'<svg class="tracks" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">']
    for index, (text, values, scale) in enumerate(rows):
        floor = (index + 1) * (TRACK + GAP)
        points = _points(history, values, *span, scale, floor)
        draw = f'<path d="{_area(points, floor)}"/>' if index == 0 else f'<path class="line" d="{_line(points)}"/>'
        parts.append(f'<text y="{floor - TRACK - 5}">{escape(text)}</text><path class="floor" d="M0 {floor}h{WIDTH}"/>')
        parts.append(draw)
    hours = f"{job.jct_s / 3600:.2f} h" if job.jct_s >= 6000 else f"{job.jct_s / 60:.1f} min"
    axis = f'<text y="{height - 6}">submitted</text><text class="end" x="{WIDTH}" y="{height - 6}">{hours} later</text>'
    return "".join([*parts, axis, "</svg>"])


def _between(name: str, low: float, high: float, pattern: str, ending: str = "") -> str:
    low_text, high_text = pattern.format(low), pattern.format(high)
    return f"{name} {low_text}" if low_text == high_text else f"{name} {low_text} – {high_text}{ending}"


def _points(
    history: History,
    values: Sequence[float],
    start_s: float,
    end_s: float,
    scale: Callable[[float], float],
    floor: int,
) -> list[Point]:
    """Whole pixels, the last value of each, and nothing that repeats the one before."""
    width_s = max(end_s - start_s, 1e-9)
    at: dict[int, int | None] = {}
    for time_s, value, gpus in zip(history.time_s, values, history.num_gpus, strict=True):
        x = min(max(round(WIDTH * (time_s - start_s) / width_s), 0), WIDTH)
        at[x] = floor - round(scale(value)) if gpus else None
    points: list[Point] = []
    for x, y in at.items():
        if not points or points[-1][1] != y:
            points.append((x, y))
    return points


def _area(points: Sequence[Point], floor: int) -> str:
    steps, y_now = [f"M0 {floor}"], floor
    for x, y in points:
        y = floor if y is None else y
        steps.append(f"H{x}V{y}")
        y_now = y
    return "".join(steps) + (f"H{WIDTH}V{floor}" if y_now != floor else "") + "Z"


def _line(points: Sequence[Point]) -> str:
    steps, is_down = [], False
    for x, y in points:
        if is_down:
            steps.append(f"H{x}")
        if y is not None:
            steps.append(f"V{y}" if is_down else f"M{x} {y}")
        is_down = y is not None
    return "".join(steps) + (f"H{WIDTH}" if is_down else "")
