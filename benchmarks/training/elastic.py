"""Changing the replicas of a job that trains on this machine, and what each change took."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks.training.replicas import ROOT
from pollux.core import FrozenMap, GenerationAbandoned, JobFailed, JobFinished, JobId, JobStopped, StopReason
from pollux.node.folder import last_lines
from pollux.node.launching import LocalCluster
from pollux.wire.nodes import Launch, ReplicaNews, RunNews, RunPhase
from pollux.wire.replicas import ReplicaPhase, ReplicaStatus

SCRIPT = Path(__file__).with_name("elastic_script.py")
MEASURED = ("told", "switch", "gather", "state", "group", "wrap")
"""What the script notes of a change; its first step is told by the daemon."""
PHASES = (*MEASURED, "first step")
PATIENCE_S = 180.0
"""Long past what any change takes on a busy machine."""
REST_S = (0.4, 0.9)
"""Between changes; random, so that requests come anywhere in a step."""


@dataclass(frozen=True, slots=True)
class Change:
    """When what happened in one change of replicas, in seconds since 1970."""

    generation: int
    requested_s: float
    ready_s: tuple[float, ...]
    """Each newcomer, in the order of readiness; none in a restart."""
    trained_s: tuple[float, ...]
    """Each member: when it finished its first step."""
    ended_s: Mapping[str, float] = field(default_factory=dict)
    """{phase: when the last replica was through with it}."""

    @property
    def pause_ms(self) -> float:
        """From when it could begin to the first step that all have finished; until then the others train on."""
        return 1e3 * (max(self.trained_s) - self._begun_s)

    @property
    def total_ms(self) -> float:
        """From the request."""
        return 1e3 * (max(self.trained_s) - self.requested_s)

    @property
    def ready_ms(self) -> list[float]:
        """How long each newcomer took to be ready."""
        return [1e3 * (ready_s - self.requested_s) for ready_s in self.ready_s]

    @property
    def _begun_s(self) -> float:
        return max(self.ready_s, default=self.requested_s)

    def phases_ms(self) -> dict[str, float]:
        """What the pause consists of: each phase from the end of the one before, on the replica that was last."""
        ends, parts = self._begun_s, {}
        for phase in PHASES:
            end = max(self.trained_s) if phase == PHASES[-1] else self.ended_s.get(phase, ends)
            parts[phase] = 1e3 * max(end - ends, 0.0)
            ends = max(ends, end)
        return parts


class Step(NamedTuple):
    """One optimizer step of one replica."""

    generation: int
    pass_index: int
    start: int
    stop: int
    ended_s: float

    @property
    def samples(self) -> tuple[int, int, int]:
        """Which part of which pass it has taken, over all replicas."""
        return self.pass_index, self.start, self.stop


class ElasticJob:
    """The script of this folder, run by a cluster on this machine for as long as this is entered."""

    def __init__(self, cluster: LocalCluster, size: str, folder: Path) -> None:
        """`folder`: for what it writes."""
        self.name = f"elastic-{size}"
        self._cluster = cluster
        self._diaries = folder / "diaries"
        self._diaries.mkdir(parents=True)
        self._script = folder / "train.py"
        shutil.copy(SCRIPT, self._script)
        self._edits = 0
        self._rng = random.Random(size)
        self._launch = Launch(
            JobId(self.name),
            str(self._script),
            (size, str(self._diaries)),
            str(folder),
            FrozenMap({"PYTHONPATH": str(ROOT)}),
            str(folder / "checkpoints"),
        )

    def __enter__(self) -> Self:
        generation = self._cluster.run(self._launch, 1)
        self._cluster.wait(self.name, generation, PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            generation = self._cluster.stop(self.name, StopReason.CANCELLED)
            self._cluster.wait_end(self.name, generation, PATIENCE_S)

    def resize(self, replicas: int) -> Change:
        """In place."""
        self._rest()
        return self._change(replicas)

    def restart(self, replicas: int) -> Change:
        """By checkpoint and restart, as after a change of the script."""
        self._rest()
        self._edits += 1
        self._script.write_text(f"{SCRIPT.read_text()}\n# edit {self._edits}\n")
        return self._change(replicas)

    def parameters(self) -> int:
        return next(int(line[1]) for line in self._lines() if line[0] == "parameters")

    def steps(self) -> list[Step]:
        """All that any replica has taken, those of each in their order."""
        return [Step(*line[1:]) for line in self._lines() if line[0] == "step"]

    def _rest(self) -> None:
        """Until those who left are gone and the others train, and a little longer."""
        until_s = time.monotonic() + PATIENCE_S
        while (status := self._cluster.status(self.name)) is None or status.phase is not RunPhase.TRAINING:
            if time.monotonic() > until_s:
                raise RuntimeError(f"{self.name} does not settle: {status}")
            time.sleep(0.05)
        time.sleep(self._rng.uniform(*REST_S))

    def _change(self, replicas: int) -> Change:
        """Ask for it, wait for it, and gather what is told of it."""
        ready: dict[str, float] = {}
        trained: dict[str, float] = {}
        with self._cluster.watch() as listener:
            until_s = time.monotonic() + PATIENCE_S
            requested_s = time.time()
            generation = self._cluster.resize(self.name, replicas)
            while len(trained) < replicas:
                news = listener.receive(1.0)
                if isinstance(news, ReplicaNews) and news.job == self.name and news.replica.status is not None:
                    _learn(news.replica.status, generation, ready, trained)
                elif isinstance(news, RunNews) and self._is_failure(news.event, generation):
                    raise RuntimeError(f"{self.name}: {news.event}. {self._last_words()}")
                if time.monotonic() > until_s:
                    raise RuntimeError(f"{self.name}: generation {generation} does not train. {self._last_words()}")
        ended: dict[str, float] = {}
        for kind, *line in self._lines():
            if kind == "phase" and line[1] >= requested_s:
                phase, at_s = line
                ended[phase] = max(at_s, ended.get(phase, 0.0))
        return Change(generation, requested_s, tuple(sorted(ready.values())), tuple(sorted(trained.values())), ended)

    def _is_failure(self, event: Any, generation: int) -> bool:
        is_end = isinstance(event, GenerationAbandoned | JobFailed | JobFinished | JobStopped)
        return is_end and event.job == self.name and event.generation >= generation

    def _lines(self) -> Iterable[Sequence[Any]]:
        for file in self._diaries.glob("*.jsonl"):
            for line in file.read_text().splitlines():
                yield json.loads(line)

    def _last_words(self) -> str:
        logs = {here.replica: last_lines(Path(here.log), 5) for _, here in self._cluster.replicas(self.name).values()}
        return " ".join(f"{replica} says: {words}" for replica, words in logs.items() if words)


def _learn(status: ReplicaStatus, generation: int, ready: dict[str, float], trained: dict[str, float]) -> None:
    if status.generation == generation and status.phase is ReplicaPhase.READY:
        ready[status.replica] = status.since_s
    if status.generation == generation and status.phase is ReplicaPhase.TRAINING:
        trained.setdefault(status.replica, status.since_s)


def steps_lost(steps: Iterable[Step]) -> int:
    """Of all steps that any replica has taken: those taken anew, or left out.

    A step that several generations have taken was lost with all but the last of them. Each step begins where the one
    before ended, and each pass at 0 when the one before is whole.
    """
    generations: dict[tuple[int, int, int], set[int]] = {}
    for step in steps:
        generations.setdefault(step.samples, set()).add(step.generation)
    taken = sorted(generations)
    whole = max((stop for _, _, stop in taken), default=0)
    anew = sum(len(numbers) - 1 for numbers in generations.values())
    expected, left_out = (0, 0), 0
    for pass_index, start, stop in taken:
        left_out += (pass_index, start) != expected
        expected = (pass_index + 1, 0) if stop == whole else (pass_index, stop)
    return anew + left_out


def step_ms(steps: Sequence[Step], generations: Collection[int]) -> float | None:
    """The median time of a step in these generations, but for the first of each; None for fewer than two."""
    times = [
        1e3 * (later.ended_s - step.ended_s)
        for step, later in pairwise(steps)
        if step.generation == later.generation and step.generation in generations and later.ended_s > step.ended_s
    ]
    return statistics.median(times) if len(times) > 1 else None
