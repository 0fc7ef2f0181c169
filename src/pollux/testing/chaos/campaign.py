"""The campaign: jobs are submitted, faults fall, the cluster recovers, and in the end everything is looked at."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pollux.errors import PolluxError
from pollux.testing.chaos.bed import Bed
from pollux.testing.chaos.checks import Truth, check_ids, check_job
from pollux.testing.chaos.fault import Fault, NotNow, Scene
from pollux.testing.chaos.faults_files import move_log_away
from pollux.testing.chaos.jobs import Crew
from pollux.testing.chaos.leftovers import check_jobs_left_nothing, check_nothing_is_left
from pollux.testing.chaos.plan import Round, Strike, rounds
from pollux.testing.chaos.processes import Role
from pollux.testing.chaos.replay import check_replay
from pollux.testing.chaos.violations import Kind, Violation
from pollux.testing.chaos.watch import Watch
from pollux.wire.api import JobView

RECOVERY_S = 60.0
"""Longer, and the cluster has not recovered."""
END_S = 300.0
"""How long the jobs may take to their ends, once no fault falls any more."""
BACKUP_EVERY_S = 15.0
BACKUPS = 4
"""How many of the last ones may be restored."""
LOOK_S = 0.2


@dataclass
class Result:
    seed: int
    injected: Counter[str] = field(default_factory=Counter)
    """By the name of the fault."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why a fault did not fall when it was its turn, by its name."""
    jobs: Counter[str] = field(default_factory=Counter)
    """How many ended how."""
    recoveries_s: list[float] = field(default_factory=list)
    longest_hang_s: float = 0.0
    longest_hang: str = ""
    seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)
    kept: Path | None = None
    """Where the files are, if something was broken."""

    @property
    def num_injected(self) -> int:
        return sum(self.injected.values())

    def count(self, kind: Kind) -> int:
        return sum(violation.count for violation in self.violations if violation.kind is kind)


class AbortedError(Exception):
    """The cluster is beyond help: the rest of the campaign would say nothing."""


def run_campaign(
    bed: Bed,
    seed: int,
    faults: Sequence[Fault],
    *,
    minutes: float | None = None,
    most_faults: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """On a bed that nobody has started yet, which is closed in the end, or kept if something was broken.

    Faults fall for so many minutes, or until so many have; jobs then come to their ends.
    """
    one = _Campaign(bed, seed, say)
    began_s = time.monotonic()
    try:
        try:
            one.begin()
            one.disturb(rounds(seed, faults), minutes, most_faults)
            one.finish()
        except AbortedError as error:
            say(f"aborted: {error}")
        one.result.seconds = time.monotonic() - began_s
        if one.result.violations:
            one.result.kept = bed.keep()
    except BaseException:
        bed.close()
        raise
    if one.result.kept is None:
        bed.close()
    return one.result


class _Campaign:
    def __init__(self, bed: Bed, seed: int, say: Callable[[str], None]) -> None:
        self.result = Result(seed)
        self._bed = bed
        self._say = say
        self._watch = Watch(bed)
        self._crew = Crew(bed, self._watch, seed)
        self._scene = Scene(bed, self._crew, self._watch, violations=self.result.violations)
        self._token = ""
        self._backed_up_s = 0.0
        self._began_s = time.monotonic()

    # Its parts

    def begin(self) -> None:
        told = self._bed.up()
        if not told.is_good:
            self._violate(Kind.NO_RECOVERY, f"pollux up {told}")
            raise AbortedError("there is no cluster to disturb")
        self._token = self._bed.folder.token()
        self._watch.start()
        self._tell(f"the cluster is up after {told.seconds:.1f} s")

    def disturb(self, plan: Iterable[Round], minutes: float | None, most_faults: int | None) -> None:
        until_s = float("inf") if minutes is None else time.monotonic() + 60.0 * minutes
        for one in plan:
            self._idle(one.pause_s)
            self._back_up()
            for strike in one.strikes:
                self._strike(strike)
                if most_faults is not None and self.result.num_injected >= most_faults:
                    break
            self._settle(one)
            is_enough = most_faults is not None and self.result.num_injected >= most_faults
            if is_enough or time.monotonic() > until_s:
                break
        self._scene.wait_for_timers()
        self._recover()

    def finish(self) -> None:
        self._crew.finish()
        self._tell("no more faults: the jobs come to their ends")
        until_s = time.monotonic() + END_S
        while time.monotonic() < until_s and self._watch.still_s < RECOVERY_S + LOOK_S:
            self._crew.tend(may_grow=False)
            if self._crew.is_settled and all(self._watch.is_over(ticket.token) for ticket in self._crew.submitted):
                break
            time.sleep(LOOK_S)
        self._watch.look()
        self._watch.close()
        self._check()

    def _check(self) -> None:
        result, bed = self.result, self._bed
        result.longest_hang_s, result.longest_hang = self._watch.longest_hang_s, self._watch.longest_hang
        if result.longest_hang_s > RECOVERY_S:
            self._violate(Kind.HANG, f"{result.longest_hang} stood still for {result.longest_hang_s:.0f} s")
        truth = Truth(
            bed.record,
            has_witnesses=bool(bed.find(Role.WITNESS)),
            was_full="full-disk" in result.injected,
        )
        views: dict[str, JobView] = {}
        for ticket in self._crew.submitted:
            view, seen = self._watch.view(ticket.token), self._watch.end(ticket.token)
            if view is not None:
                views[view.id] = view
            known = view or seen
            result.jobs["lost" if known is None else str(known.phase)] += 1
            result.violations += check_job(ticket, view, seen, truth)
        result.violations += check_ids(self._crew.submitted)
        for sentence in self._watch.changed:
            self._violate(Kind.WRONG_OUTCOME, sentence)
        result.violations += check_jobs_left_nothing(bed, self._crew.submitted)
        self._end()
        result.violations += check_nothing_is_left(bed)
        result.violations += check_replay(bed, views)

    def _end(self) -> None:
        told = self._bed.pollux("down", "--timeout", f"{RECOVERY_S:g}")
        if not told.is_good:
            self._violate(Kind.NO_RECOVERY, f"pollux down {told}")
            for one in self._bed.find(Role.SERVICE):  # as it advises, lest all that is still there counts as well
                self._bed.send(one, 9)
            told = self._bed.pollux("down", "--timeout", f"{RECOVERY_S:g}")
        self._tell(f"pollux down took {told.seconds:.1f} s")

    # A round

    def _strike(self, strike: Strike) -> None:
        self._idle(strike.pause_s)
        self._scene.draw = random.Random(strike.seed)
        name = strike.fault.name
        try:
            text = strike.fault.inject(self._scene)
        except NotNow as reason:
            self.result.skipped[name] = str(reason)
            self._tell(f"{name}: left out, {reason}")
            return
        self.result.injected[name] += 1
        self._tell(f"{name}: {text}")

    def _settle(self, one: Round) -> None:
        """The service is up when this returns, and if the round says so, everything else, too."""
        if one.waits:
            self._scene.wait_for_timers()
        if not self._bed.folder.is_locked:
            self._idle(self._scene.draw.uniform(0.0, 1.5))
        self._start_service()
        if one.waits:
            self._recover()

    def _start_service(self) -> None:
        if self._bed.folder.is_locked:
            return
        self._bed.free_disk()  # nobody starts a cluster on a full disk
        told = self._bed.up()
        if not told.is_good and self._scene.may_refuse_log and str(self._bed.folder.database) in told.err:
            self._tell(f"pollux up refuses the log: {told.err.strip().splitlines()[-1]} {move_log_away(self._scene)}")
            told = self._bed.up()
        self._scene.may_refuse_log = False
        if told.is_good:
            self._tell(f"pollux up took {told.seconds:.1f} s")
        else:
            self._violate(Kind.NO_RECOVERY, f"pollux up {told}")
            self._rescue()

    def _recover(self) -> None:
        began_s = time.monotonic()
        missing = "anything"
        while missing:
            self._crew.tend()
            missing = self._missing()
            if time.monotonic() - began_s > RECOVERY_S:
                self._violate(Kind.NO_RECOVERY, f"not recovered after {RECOVERY_S:g} s: {missing}")
                self._rescue()
                return
            if missing:
                time.sleep(LOOK_S)
        self.result.recoveries_s.append(time.monotonic() - began_s)

    def _missing(self) -> str:
        """What is not as it should be; empty: the cluster is well."""
        folder = self._bed.folder
        if not folder.is_locked:
            return "the service has ended by itself"
        try:
            folder.token()
            if folder.running() is None:
                return "there is no service.json"
            with self._bed.client(5.0) as client:
                view = client.cluster()
        except PolluxError as error:
            return str(error)
        away = [node.id for node in view.nodes if node.state != "ready"]
        if view.is_recovering or away or len(view.nodes) < len(self._bed.nodes):
            return f"nodes {', '.join(away) or '…'} are not ready"
        return ""

    def _rescue(self) -> None:
        """Start from what is on the disk, so that what follows says something again."""
        self._tell("the cluster is ended by force, and started again")
        for one in self._bed.find():
            self._bed.send(one, 9)
        self._bed.free_disk()
        if not self._bed.folder.token_file.exists():
            self._bed.folder.token_file.write_text(self._token)
        told = self._bed.up()
        if not told.is_good:
            self._violate(Kind.NO_RECOVERY, f"pollux up after everything was killed {told}")
            raise AbortedError("the cluster cannot be started any more")

    # Small things

    def _back_up(self) -> None:
        if time.monotonic() - self._backed_up_s < BACKUP_EVERY_S or not self._bed.folder.is_locked:
            return
        self._backed_up_s = time.monotonic()
        path = self._bed.home / f"backup-{int(self._backed_up_s)}.db"
        if self._bed.pollux("backup", str(path)).is_good:
            self._scene.backups[:] = [*self._scene.backups, path][-BACKUPS:]

    def _idle(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while True:
            self._crew.tend()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(LOOK_S, left_s))

    def _violate(self, kind: Kind, sentence: str) -> None:
        self.result.violations.append(Violation(kind, sentence))
        self._tell(f"VIOLATION, {kind}: {sentence}")

    def _tell(self, text: str) -> None:
        self._say(f"[{time.monotonic() - self._began_s:6.1f} s] {text}")
