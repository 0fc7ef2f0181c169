"""A job whose replicas are resized and killed at random, and what that broke, which should be nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pollux.core import (
    Allocation,
    Event,
    FrozenMap,
    JobFinished,
    JobId,
    NodeId,
    ReplicasReady,
)
from pollux.node.launching import LocalCluster
from pollux.wire.nodes import Launch, ReplicaHere, RunPhase, RunStatus

SCRIPT = Path(__file__).with_name("training") / "soak_script.py"
JOB = JobId("soak")
NODES = (NodeId("n0"), NodeId("n1"))
MOST_REPLICAS = 4
PATIENCE_S = 90.0
"""Long past what any change takes on a busy machine."""
KILLS_IN_CHANGES = 0.6
"""So many of the kills come while a resize is under way."""
SPARE_DESCRIPTORS = 6
"""A replica may have so many more files open than when it was last one of as many."""


@dataclass(slots=True)
class SoakResult:
    resizes: int = 0
    """That came true."""
    kills: int = 0
    """Of one replica, or of all of them at once."""
    kills_of_all: int = 0
    passes: int = 0
    """That the job has trained for."""
    violations: list[str] = field(default_factory=list)


class StuckError(Exception):
    """The job does not go on."""


def soak(
    resizes: int,
    kills: int,
    seed: int = 0,
    *,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> SoakResult:
    """Resize and kill so many times, then let the job finish. One of the kills hits all replicas.

    `folder`: for whatever the run writes; None: a temporary one.
    """
    base = Path(tempfile.mkdtemp(prefix="pollux-soak-", dir="/tmp")) if folder is None else folder
    result = SoakResult()
    # Whatever uses the system's folder for temporary files leaves its traces here.
    (base / "tmp").mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(base / "tmp")}
    try:
        with LocalCluster(base / "nodes", len(NODES), MOST_REPLICAS, environment=environment) as cluster:
            one = Soak(cluster, base, random.Random(seed), result, say)
            try:
                one.run(resizes, kills)
            except StuckError as stuck:
                result.violations.append(str(stuck))
                one.ask_where_it_hangs()
        result.violations += leftovers(base)
    finally:
        if folder is None:
            shutil.rmtree(base, ignore_errors=True)
    return result


class Soak:
    """One run, on a cluster of two nodes."""

    def __init__(
        self, cluster: LocalCluster, base: Path, draw: random.Random, result: SoakResult, say: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._base = base
        self._out = base / "out"
        self._out.mkdir()
        self._draw = draw
        self._result = result
        self._say = say
        self._num_starts = 0
        self._descriptors: dict[tuple[int, int], int] = {}

    def run(self, resizes: int, kills: int) -> None:
        result, draw = self._result, self._draw
        self._start(self._place(2))
        of_all = draw.randrange(kills) if kills else -1
        while (left := resizes - result.resizes) > 0 or result.kills < kills:
            kills_left = kills - result.kills
            kill = partial(self._kill, is_all=result.kills == of_all)
            place = self._place(draw.randint(1, MOST_REPLICAS))
            if draw.random() * (left + kills_left) >= kills_left:
                self._resize(place)
            elif left > 0 and draw.random() < KILLS_IN_CHANGES:
                self._resize(place, kill)
            else:
                kill()
                self._settle()
        self._finish()

    def ask_where_it_hangs(self) -> None:
        """Each replica writes it to its log."""
        for here in self._living():
            with suppress(ProcessLookupError):
                os.kill(here.pid, signal.SIGUSR1)

    # What is done to it

    def _start(self, place: Allocation) -> None:
        self._num_starts += 1
        variables = FrozenMap({"SOAK_START": str(self._num_starts)})
        checkpoints = str(self._base / "checkpoints")
        launch = Launch(JOB, str(SCRIPT), (str(self._out),), str(self._base), variables, checkpoints)
        generation = self._cluster.run(launch, place)
        event = self._expect(lambda: self._cluster.wait(JOB, generation, PATIENCE_S))
        if not isinstance(event, ReplicasReady):
            raise StuckError(f"the job does not start: {event}")

    def _resize(self, place: Allocation, kill: Callable[[], None] | None = None) -> None:
        before = self._status().allocation.num_gpus
        generation = self._cluster.resize(JOB, place)
        if kill is not None:
            time.sleep(0.8 * self._draw.random())
            kill()
        event = self._expect(lambda: self._cluster.wait(JOB, generation, PATIENCE_S))
        came_true = isinstance(event, ReplicasReady)
        self._result.resizes += came_true
        self._say(f"{before} to {place.num_gpus} replicas{'' if came_true else f': {event}'}")
        self._settle()

    def _kill(self, *, is_all: bool) -> None:
        living = self._living()
        # A replica that is not known to have ended may have: that is no kill.
        victims = living if is_all else [self._draw.choice(living)] if living else []
        hit = [here.replica for here in victims if _killed(here.pid)]
        self._result.kills += bool(hit)
        self._result.kills_of_all += is_all and bool(hit)
        self._say(f"killed {', '.join(hit)} of {len(living)}")
        self._wait_for(
            lambda: not {said.replica for said in self._status().replicas} & set(hit), "kills are not noticed"
        )

    def _settle(self) -> None:
        """Until it trains, started again if all of it is gone."""

        def is_settled() -> bool:
            status = self._status()
            if status.phase is RunPhase.ENDED:
                self._start(self._place(self._draw.randint(1, MOST_REPLICAS)))
                return False
            alive = {here.replica for here in self._living()}
            members = {said.replica for said in status.replicas}
            return status.phase is RunPhase.TRAINING and alive == members

        self._wait_for(is_settled, "the job does not train on")
        self._count_descriptors()
        time.sleep(0.3 * self._draw.random())

    def _finish(self) -> None:
        (self._out / "enough").touch()
        event = self._expect(lambda: self._cluster.wait_end(JOB, self._status().issued_generation, PATIENCE_S))
        if not isinstance(event, JobFinished):
            self._result.violations.append(f"the job did not finish: {event}")
        self._check_passes()

    # What is seen of it

    def _wait_for(self, is_so: Callable[[], bool], problem: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > until_s:
                raise StuckError(f"{problem}: {self._status()}")
            time.sleep(0.02)

    def _expect(self, wait: Callable[[], Event]) -> Event:
        try:
            return wait()
        except TimeoutError as error:
            raise StuckError(f"{error}: {self._status()}") from None

    def _status(self) -> RunStatus:
        status = self._cluster.status(JOB)
        assert status is not None
        return status

    def _living(self) -> list[ReplicaHere]:
        return [here for _, here in self._cluster.replicas(JOB).values() if here.exit_code is None and here.pid]

    def _place(self, count: int) -> Allocation:
        first = self._draw.randint(0, count)
        return Allocation.of({node: share for node, share in zip(NODES, (first, count - first), strict=True) if share})

    def _count_descriptors(self) -> None:
        living = self._living()
        for here in living:
            with suppress(OSError):
                count = len(os.listdir(f"/proc/{here.pid}/fd"))
                first = self._descriptors.setdefault((here.pid, len(living)), count)
                if count > first + SPARE_DESCRIPTORS:
                    self._result.violations.append(f"replica {here.replica} had {first} files open and has {count}")

    def _check_passes(self) -> None:
        violations = self._result.violations
        weights: dict[tuple[str, int], set[str]] = defaultdict(set)
        for path in sorted(self._out.glob("*.jsonl")):
            whole, _, _ = path.read_text().rpartition("\n")
            for line in whole.splitlines():
                start, epoch, least, most, out_of_order, digest = json.loads(line)
                weights[start, epoch].add(digest)
                if least != epoch + 1 or most != epoch + 1:
                    violations.append(
                        f"{path.stem}: after {epoch + 1} passes samples were used {least} to {most} times"
                    )
                if out_of_order:
                    violations.append(f"{path.stem}: {out_of_order} steps out of order by the end of pass {epoch}")
        for (_, epoch), found in weights.items():
            if len(found) > 1:
                violations.append(f"weights differ between replicas after pass {epoch}")
        self._result.passes = 1 + max((epoch for _, epoch in weights), default=-1)


def leftovers(folder: Path) -> Iterator[str]:
    """Processes that have to do with the folder, and what daemons and replicas should have taken away from it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            files = [os.readlink(path) for path in (process / "fd").iterdir()]
            if int(process.name) != os.getpid() and any(str(folder) in text for text in (command, *files)):
                yield f"process {process.name} is left: {command}"
    for path in folder.rglob("*"):
        is_cache = "torchinductor_" in str(path)  # torch's, one for all that a user runs
        if path.is_socket() or (folder / "tmp" in path.parents and not is_cache):
            yield f"{path.relative_to(folder)} is left"


def _killed(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
