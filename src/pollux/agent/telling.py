"""What a job says of itself: journal entries, log lines and reports, from the first replica."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pollux.agent.adapting import Adapter
from pollux.agent.batching import BatchConfig
from pollux.agent.dealing import Dealer, StepPlan
from pollux.agent.environment import Environment
from pollux.agent.guard import Verdict
from pollux.agent.journal import Journal
from pollux.agent.replicas import Replicas
from pollux.agent.reporter import Reporter
from pollux.agent.tuner import Tuned
from pollux.core import FrozenMap, JobId, Progress
from pollux.wire.client import ReportClient
from pollux.wire.entries import (
    BatchChanged,
    BatchSetting,
    CheckpointSaved,
    GuardFired,
    OutOfMemory,
    ReplicasChanged,
    RunState,
    TrainingFinished,
    TrainingResumed,
    TrainingStarted,
    TrainingStopped,
)
from pollux.wire.messages import AgentReport, finite

log = logging.getLogger(__name__)

LAST_REPORT_S = 2.0
"""How long the end of a job waits for its last report."""


class Teller:
    """Journal and reporter of a job. Every replica has one; only the first one's says anything."""

    def __init__(
        self,
        environment: Environment,
        replicas: Replicas,
        adapter: Adapter,
        dealer: Dealer,
        folder: Path | None,
        tensorboard: Path | None,
        seed: int | None,
        post: Callable[[AgentReport], None] | None = None,
        clock: Callable[[], float] = time.time,
        fingerprint: str | None = None,
    ) -> None:
        """`post`: how reports go out if the environment names no address for them. `fingerprint`: of its kind."""
        self._environment = environment
        self._replicas = replicas
        self._adapter = adapter
        self._dealer = dealer
        self._seed = seed
        self._clock = clock
        self._fingerprint = fingerprint
        self._checkpoint: Path | None = None
        self._post = post
        self._folder = folder
        self._tensorboard = tensorboard
        self._speaks = False
        self._reporter = Reporter(None)
        self._journal = Journal(None)

    def assign_role(self) -> None:
        """The first replica speaks."""
        self._speak(self._replicas.is_main)

    def speak_last(self) -> None:
        """On a replica that leaves, and has to say what became of the state: nobody else can."""
        self._speak(True)

    def _speak(self, speaks: bool) -> None:
        if self._speaks == speaks:
            return
        self.close()
        self._speaks = speaks
        if not speaks:
            self._reporter, self._journal = Reporter(None), Journal(None)
            return
        url, post = self._environment.report_url, self._post
        self._reporter = Reporter(ReportClient(url, self._environment.token).post if url is not None else post)
        path = self._folder / "journal.jsonl" if self._folder is not None else None
        self._journal = Journal(path, self._tensorboard, tell=self._reporter.note, clock=self._clock)

    def state(self) -> RunState:
        """Where the run stands between two steps."""
        cursor, config = self._dealer.committed, self._dealer.config
        return RunState(
            step=cursor.step,
            progress=Progress(self._adapter.progress, self._adapter.total_progress),
            replicas=self._replicas.size,
            batch=_setting(config),
            learning_rate_factors=self._adapter.factors_of(config.batch_size),
            data_pass=cursor.pass_index,
            data_offset=cursor.offset,
        )

    def started(self) -> None:
        self._journal.write(TrainingStarted(self._clock(), self.state(), self._seed))

    def resumed(self, checkpoint: Path) -> None:
        state = self.state()
        if self._replicas.is_main:
            log.info("resumed from %s: step %d, progress %.1f", checkpoint, state.step, state.progress.done)
        self._journal.write(TrainingResumed(self._clock(), state, str(checkpoint), self._seed))

    def beat(self) -> None:
        """Once a beat: learning rates that moved."""
        if self._replicas.is_main:
            self._journal.learning_rate(self.state())

    def batch_changed(self, before: BatchConfig, after: BatchConfig, reason: str, tuned: Tuned | None) -> None:
        if not self._replicas.is_main:
            return
        why = tuned.reason if tuned is not None else reason
        log.info("batch size %d → %d: %s", before.batch_size, after.batch_size, why)
        self._journal.write(BatchChanged(self._clock(), self.state(), _setting(before), why))

    def out_of_memory(self, plan: StepPlan, before: BatchConfig) -> None:
        if not self._replicas.is_main:
            return
        bound = self._adapter.limits.max_per_gpu_batch_size
        tried = plan.per_gpu_batch_size
        log.warning("out of memory with %d samples in a pass: at most %d from now on", tried, bound)
        self._journal.write(OutOfMemory(self._clock(), self.state(), tried, bound))
        if self._dealer.config != before:
            self.batch_changed(before, self._dealer.config, "smaller passes fit into memory", None)

    def replicas_changed(self, before: int, is_repair: bool) -> None:
        if not self._replicas.is_main:
            return
        reason = "lost" if is_repair else "resized"
        log.info("%d → %d replicas (%s)", before, self._replicas.size, reason)
        self._journal.write(ReplicasChanged(self._clock(), self.state(), before, reason))

    def verdict(self, verdict: Verdict) -> None:
        if not self._replicas.is_main:
            return
        log.log(logging.WARNING if verdict.kind == "stepped_back" else logging.INFO, "%s", verdict.message)
        figures = {"largest_scale": verdict.largest_scale, "claimed": verdict.claimed, "seen": verdict.seen}
        known = {name: value for name, value in figures.items() if finite(value) is not None}
        self._journal.write(GuardFired(self._clock(), self.state(), verdict.message, FrozenMap(known), verdict.kind))

    def report(self, tuned: Tuned | None) -> None:
        """A report interval is over, or the job."""
        if not self._replicas.is_main:
            return
        adapter = self._adapter
        noise = adapter.noise_scale if adapter.gradient() else None
        report = AgentReport(
            job=JobId(self._environment.job),
            generation=self._replicas.generation,
            sent_at_s=self._clock(),
            state=self.state(),
            profile=adapter.profile(),
            model=replace(tuned.model, fingerprint=self._fingerprint) if tuned is not None else None,
            loss=finite(adapter.told_loss),
            throughput=tuned.throughput if tuned is not None else None,
            efficiency=tuned.efficiency if tuned is not None else None,
            goodput=tuned.goodput if tuned is not None else None,
            noise_scale=finite(noise),
        )
        self._reporter.send(report)
        self._journal.report(report)

    def checkpoint(self, path: Path | None) -> None:
        """A checkpoint reached the disk."""
        if path is not None and path != self._checkpoint:
            self._checkpoint = path
            self._journal.write(CheckpointSaved(self._clock(), self.state(), str(path)))

    def finished(self, reason: str) -> None:
        self._journal.write(TrainingFinished(self._clock(), self.state(), reason))
        self.report(self._adapter.tuned)

    def stopped(self, reason: str) -> None:
        self._journal.write(TrainingStopped(self._clock(), self.state(), reason))
        self.report(self._adapter.tuned)

    def close(self) -> None:
        self._journal.close()
        self._reporter.close(LAST_REPORT_S)


def _setting(config: BatchConfig) -> BatchSetting:
    return BatchSetting(config.batch_size, config.per_gpu_batch_size, config.accumulation_steps)
