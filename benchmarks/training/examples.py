"""Running the examples, each as a plain script and as its adaptive twin, and reading what came of it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.training.replicas import PATIENCE_S, ROOT, environment, last_line
from pollux.agent.journal import read_journal
from pollux.wire.entries import BatchChanged, GuardFired, JournalEntry

AT_ONCE = 2
"""A script and its twin, on two cores with one thread each."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run ended with."""

    metric: float
    cpu_s: float
    steps: int
    journal: Sequence[JournalEntry] = ()

    @property
    def guard_fired(self) -> int:
        return sum(isinstance(entry, GuardFired) and entry.kind == "stepped_back" for entry in self.journal)

    @property
    def suspicions(self) -> int:
        """How often the guard went back to M0 to compare."""
        return sum(isinstance(entry, GuardFired) and entry.kind == "suspected" for entry in self.journal)

    @property
    def batch_changes(self) -> int:
        return sum(isinstance(entry, BatchChanged) for entry in self.journal)

    @property
    def final_batch_size(self) -> int:
        return self.journal[-1].state.batch.batch_size

    @property
    def mean_batch_size(self) -> float:
        """Over optimizer steps; the last, shorter step of a pass counts as a whole one."""
        states = [entry.state for entry in self.journal]
        spans = itertools.pairwise(states)
        samples = sum((later.step - state.step) * state.batch.batch_size for state, later in spans)
        return samples / states[-1].step


def pairs(name: str, seeds: Sequence[int], arguments: Sequence[str] = ()) -> list[tuple[Outcome, Outcome]]:
    """(plain, adaptive) for each seed; the two of a seed run side by side, so that both find the same machine."""
    runs = [(script, seed) for seed in seeds for script in (name, f"{name}_adaptive")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda one: outcome(*one, arguments), runs))
    return list(zip(outcomes[::2], outcomes[1::2], strict=True))


def outcome(script: str, seed: int, arguments: Sequence[str] = ()) -> Outcome:
    """Run examples/`script`.py to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / f"{script}.py"), "--seed", str(seed), *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(POLLUX_CHECKPOINT_DIR=folder),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        file = Path(folder) / "journal.jsonl"
        journal = read_journal(file) if file.exists() else []
    said = last_line(done.stdout)
    # A twin counts passes over the model, of which a step may have several; its journal counts steps.
    steps = journal[-1].state.step if journal else said["steps"]
    return Outcome(said["value"], said["seconds"], steps, journal)
