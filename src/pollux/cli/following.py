"""One job from its submission to its end: what it prints on standard output, what becomes of it beside that."""

from __future__ import annotations

from time import sleep

from rich.text import Text

from pollux.cli import output, words
from pollux.cli.finding import Link
from pollux.cli.follow import LOOK_S, as_text
from pollux.cli.job_output import JobOutput
from pollux.core import Phase
from pollux.wire.api import JobView

TOLD = frozenset(
    {"BatchChanged", "GuardFired", "OutOfMemory", "TrainingResumed", "ReplicaLost", "GenerationAbandoned", "JobFailed"}
)
"""Events that say more than the phase and the GPUs do."""


class Follower:
    """`follow` may be called again after an interruption, and goes on where it was."""

    def __init__(self, link: Link, job: JobView, *, shows_output: bool = True) -> None:
        self.job = job.id
        self._link = link
        self._before = job
        self._gpus = 0
        """What it trained on last."""
        self._after = 0
        self._stream = JobOutput(link, job.id, as_text) if shows_output else None
        if job.phase is Phase.PENDING and job.waits_for:
            self._say(f"waits: {job.waits_for}")

    def follow(self) -> JobView:
        """Until the job has ended."""
        while True:
            view = self._link.view(self.job)  # before its output: nothing is printed after its end
            if view.phase.holds_gpus:
                self._tell_changes(view)
                self._show_output()
                self._tell_events()
            else:  # first what it printed, then how it ended, then what comes next
                self._show_output()
                self._tell_events()
                self._tell_changes(view)
            if view.phase.is_terminal:
                if self._stream is not None:
                    self._stream.finish()
                return view
            sleep(LOOK_S)

    def _show_output(self) -> None:
        if self._stream is not None:
            self._stream.show()

    def _tell_changes(self, view: JobView) -> None:
        before, self._before = self._before, view
        match view.phase:
            case Phase.PENDING:
                if view.waits_for and view.waits_for != before.waits_for:
                    self._say(f"waits: {view.waits_for}")
            case Phase.RUNNING | Phase.RESIZING:
                if view.gpus != self._gpus:
                    verb = "runs on " if view.is_rigid else "trains on "
                    was = f"{self._gpus} → " if self._gpus else verb
                    self._say(f"{was}{words.count(view.gpus, 'GPU')} ({words.placed(view.allocation)})")
                elif view.allocation != before.allocation and before.allocation:
                    self._say(f"moved to {words.placed(view.allocation)}")
                self._gpus = view.gpus
            case _:
                if view.phase is not before.phase and not view.phase.is_terminal:
                    self._say(str(view.phase))
        if not view.phase.holds_gpus:
            self._gpus = 0

    def _tell_events(self) -> None:
        page = self._link.ask(lambda client: client.events(self._after, job=self.job))
        self._after = page.next
        news = [event for event in page.events if event.kind in TOLD]
        if news:
            self._show_output()  # what it printed before that
        for event in news:
            self._say(event.text.removeprefix(f"{self.job}: "))

    def _say(self, what: str) -> None:
        output.err_console.print(Text(f"[{self.job}] {what}", style="dim"), soft_wrap=True)
