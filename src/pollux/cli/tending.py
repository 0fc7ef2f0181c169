"""How `pollux launch` looks after its job: output, news, signals, restarts."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pollux.cli import output
from pollux.cli.replica_output import ReplicaOutput
from pollux.core import (
    Allocation,
    Event,
    GenerationAbandoned,
    JobFailed,
    JobFinished,
    JobStopped,
    ReplicaLost,
    ReplicasReady,
    StopReason,
)
from pollux.errors import Permanent, PolluxError, Temporary
from pollux.wire.nodes import Launch, NodeNews, ReplicaNews, RunNews, RunPhase

if TYPE_CHECKING:
    from pollux.node.launching import LocalCluster

LOOK_S = 0.05
LEFT_AS_ASKED = 128 + signal.SIGTERM
"""The exit code of a replica that has saved and left because it was told to."""
DAEMONS_EVERY_S = 1.0
MOST_DAEMON_STARTS = 5
"""A daemon that ends more often than that will not stay the next time either."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


def has_checkpoint(folder: Path) -> bool:
    """Whether an agent has saved something there."""
    return bool(_checkpoints(folder))


def _checkpoints(folder: Path) -> set[str]:
    """Those that are complete, and were not found damaged."""
    return {path.name for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+-step-\d+", path.name)}


class Tending:
    """One run of the command."""

    def __init__(self, program: Launch, allocation: Allocation, retries: int | None, usual_retries: int) -> None:
        self._program = program
        self._job = program.job
        self._allocation = allocation
        """What was last asked for, and came true."""
        self._num_now = allocation.num_gpus
        self._retries = retries
        self._usual_retries = usual_retries
        self._signals: list[int] = []
        self._answered = 0
        self._num_failures = 0
        self._num_daemon_starts = 0
        self._generation = 0
        self._has_trained = False
        self._saved_before: set[str] = set()
        """The checkpoints that were there when the job was told to stop."""
        self._restarted: set[int] = set()
        """Generations that were saved, since the next one has other code."""
        self._is_late = False
        """It was killed, since it did not stop in time."""
        self._first_words_s: dict[int, float] = {}
        """When a generation was first heard of."""

    def run(self, start: Callable[[], LocalCluster]) -> int:
        """From the start of the daemons to the end of the job: the exit code."""
        began_s = time.monotonic()
        cluster = start()
        try:
            with self._catching_signals():
                self._output = ReplicaOutput(cluster.folder)
                self._start(cluster, began_s)
                return self._tend(cluster)
        finally:
            cluster.close(at_once=len(self._signals) > 1)

    def _start(self, cluster: LocalCluster, began_s: float) -> None:
        self._generation = cluster.run(self._program, self._allocation)
        self._first_words_s = {self._generation: began_s}
        self._has_trained = False

    def _tend(self, cluster: LocalCluster) -> int:
        daemons_at_s = time.monotonic()
        with cluster.watch() as listener:
            while True:
                news = listener.receive(LOOK_S)
                if news is not None and (code := self._hear(cluster, news)) is not None:
                    return code
                if news is None:
                    self._output.show()
                self._heed_signals(cluster)
                if time.monotonic() - daemons_at_s > DAEMONS_EVERY_S:
                    daemons_at_s = time.monotonic()
                    self._look_after_daemons(cluster)

    # News

    def _hear(self, cluster: LocalCluster, news: NodeNews) -> int | None:
        """The exit code, if this was the end."""
        match news:
            case ReplicaNews(job=self._job):
                self._hear_of_replica(cluster, news)
            case RunNews(event=event) if getattr(event, "generation", 0) >= self._generation:
                return self._hear_of_job(cluster, event)
        return None

    def _hear_of_replica(self, cluster: LocalCluster, news: ReplicaNews) -> None:
        here = news.replica
        self._output.know(here)
        generation = here.generation if here.status is None else here.status.generation
        self._first_words_s.setdefault(generation, time.monotonic())
        is_missed = here.status is not None and here.status.has_state  # others end with a change that is given up
        self._is_late |= here.exit_code == -signal.SIGKILL and self._answered == 1
        if here.exit_code == LEFT_AS_ASKED and not self._signals and self._is_restarting(cluster):
            if generation not in self._restarted:
                self._restarted.add(generation)
                self._say("its code has changed: it saves and starts anew.")
        elif here.exit_code and is_missed and not self._signals:
            how = f"was killed by signal {-here.exit_code}" if here.exit_code < 0 else f"ended with {here.exit_code}"
            self._say(f"replica {here.replica} {'hung and was killed' if news.is_hung else how}.")

    def _is_restarting(self, cluster: LocalCluster) -> bool:
        with suppress(PolluxError):
            status = cluster.status(self._job)
            return status is not None and status.phase in (RunPhase.RESTARTING, RunPhase.STARTING)
        return False

    def _hear_of_job(self, cluster: LocalCluster, event: Event) -> int | None:
        match event:
            case ReplicasReady(generation=generation):
                self._tell_ready(cluster, generation)
            case GenerationAbandoned(reason=reason):
                self._say(f"the change was given up: {_sentence(reason)}")
            case ReplicaLost(survivors=survivors):
                self._num_now = survivors.num_gpus
                self._output.choose_main()
                self._say(f"repaired: {_count(self._num_now)} on. Get the others back: {self._resize_command()}")
            case JobFinished():
                self._output.finish()
                self._say("finished.")
                return 0
            case JobStopped() if not self._signals:
                # Replicas that were to take over were lost, and another one saved: go on from there.
                return self._failed(cluster, JobFailed(event.job, event.generation, "it ended, and not at its end."))
            case JobStopped():
                self._output.finish()
                return self._stopped()
            case JobFailed():
                return self._failed(cluster, event)
        return None

    def _tell_ready(self, cluster: LocalCluster, generation: int) -> None:
        before, nodes_before = self._num_now, self._allocation.gpus.keys()
        with suppress(PolluxError):
            status = cluster.status(self._job)
            if status is not None and status.allocation:
                self._allocation = status.allocation
        began_s = self._first_words_s.get(generation)
        took = "" if began_s is None else f" in {time.monotonic() - began_s:.1f} s"
        now = self._num_now = self._allocation.num_gpus
        self._output.choose_main()
        if not self._has_trained:
            self._say(f"{_count(now)} after{took.removeprefix(' in')}. Change that: {self._resize_command()}")
        elif now == before:
            there = "other" if nodes_before != self._allocation.gpus.keys() else "the same"
            self._say(f"{_count(now)} on {there} nodes{took}.")
        else:
            self._say(f"{before} → {now} replica{'' if now == 1 else 's'}{took}.")
        self._has_trained = True

    def _stopped(self) -> int:
        from pollux.node.run import RunOptions

        saved = _checkpoints(Path(self._program.checkpoint_dir))
        go_on = f"Go on: pollux launch --name {self._job} …"
        if self._answered > 1:
            self._say("killed.")
        elif saved - self._saved_before:
            self._say(f"saved and stopped. {go_on}")
        else:
            how = (
                f"did not save within {RunOptions().stop_timeout_s:g} s and was killed" if self._is_late else "stopped"
            )
            what = f"nothing new is saved. {go_on}" if saved else "nothing is saved."
            self._say(f"{how}; {what}")
        return 128 + self._signals[0]

    def _failed(self, cluster: LocalCluster, event: JobFailed) -> int | None:
        self._output.finish()
        code = 1 if event.exit_code is None else event.exit_code
        code = 128 - code if code < 0 else code or 1
        if self._signals:
            self._say(f"failed while it stopped: {_in_short(event.reason)}")
            return code
        self._num_failures += 1
        allowed = self._retries if self._retries is not None else self._usual_retries if self._has_trained else 0
        if self._num_failures > allowed or not event.may_retry:
            tries = "" if self._num_failures == 1 else f" for the {_ordinal(self._num_failures)} time"
            self._say(f"failed{tries}: {_in_short(event.reason)}")
            return code
        pause_s = min(FIRST_PAUSE_S * 2 ** (self._num_failures - 1), LONGEST_PAUSE_S)
        folder = self._program.checkpoint_dir
        source = "from its checkpoint" if has_checkpoint(Path(folder)) else f"though {folder} holds no checkpoint"
        turn = f"try {self._num_failures} of {allowed}"
        self._say(f"failed: {_in_short(event.reason)} Starts again in {pause_s:g} s {source} ({turn}).")
        if self._pause(pause_s):
            return 128 + self._signals[0]
        self._output.forget_main()
        self._start(cluster, time.monotonic())
        return None

    def _pause(self, seconds: float) -> bool:
        """Whether a signal came meanwhile."""
        until_s = time.monotonic() + seconds
        while not self._signals and time.monotonic() < until_s:
            self._output.show()
            time.sleep(LOOK_S)
        return bool(self._signals)

    # What may happen at any time

    def _heed_signals(self, cluster: LocalCluster) -> None:
        if len(self._signals) <= min(self._answered, 1):
            return
        is_first = self._answered == 0
        if is_first:
            self._saved_before = _checkpoints(Path(self._program.checkpoint_dir))
        try:
            cluster.stop(self._job, StopReason.PAUSED if is_first else StopReason.CANCELLED)
        except Temporary:
            return  # its daemon is just being started again
        self._answered += 1
        if is_first:
            self._say("saving; Ctrl-C again kills.")

    def _look_after_daemons(self, cluster: LocalCluster) -> None:
        for daemon in cluster.daemons:
            if daemon.is_alive:
                continue
            self._num_daemon_starts += 1
            if self._num_daemon_starts > MOST_DAEMON_STARTS:
                raise Permanent(
                    f"The daemon in {daemon.folder} ends again and again. See {daemon.folder / 'node.log'}."
                )
            self._say(f"the daemon of node {daemon.folder.name} has ended and is started again. Replicas train on.")
            daemon.start()

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Under nohup, or in the background of a script, some are ignored on purpose.
        deaf_to = {number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN}
        heard = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} - deaf_to
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _say(self, sentence: str) -> None:
        while self._output.show():
            pass
        output.note(f"{self._job}: {sentence}")

    def _resize_command(self) -> str:
        return f"pollux resize {self._job} N"


def _count(replicas: int) -> str:
    return "1 replica trains" if replicas == 1 else f"{replicas} replicas train"


def _sentence(reason: str) -> str:
    return f"{reason.rstrip('. ') or 'nobody knows why'}."


def _in_short(reason: str) -> str:
    """Without the last lines of the log, which have just been shown: where it is will do."""
    what, _, quote = reason.partition(" Last lines of ")
    log, _, _ = quote.partition(": ")
    return f"{_sentence(what)} Its log: {log}." if log else _sentence(what)


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
