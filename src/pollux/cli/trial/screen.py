"""How a trial looks while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pollux.cli import output, top, words
from pollux.cli.trial.running import Show, Tell

LINE_S = 10.0
"""From line to line where there is no terminal to show a table on."""


@contextmanager
def show_on_terminal() -> Iterator[tuple[Tell, Show]]:
    """Sentences, and below them the table of `pollux top`; without a terminal, a line now and then."""
    console = output.console
    if not console.is_terminal:
        yield output.note, _Lines(output.note).show
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield (
            lambda text: console.print(text, soft_wrap=True),
            lambda look: live.update(_table(look, console), refresh=True),
        )


def _table(look: top.Look, console: Console) -> RenderableType:
    shown = top.screen(look, console.width)
    assert isinstance(shown, Group)
    return Group(Text(), *shown.renderables[:-1], Text("Ctrl-C ends this and its cluster", style="dim"))


class _Lines:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told_s = 0.0

    def show(self, look: top.Look) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < LINE_S:
            return
        self._told_s = now_s
        jobs = [
            f"{job.name} {words.gpus(job)}" + ("" if job.batch_size is None else f" (batch {job.batch_size})")
            for job in look.jobs
            if job.phase.holds_gpus
        ]
        waiting = sum(not job.phase.holds_gpus and not job.phase.is_terminal for job in look.jobs)
        rest = [f"{waiting} waiting"] if waiting else []
        self._tell(f"       {look.cluster.policy}: {' · '.join([*jobs, *rest]) or 'no jobs'}")
