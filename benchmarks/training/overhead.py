"""One replica of a run that trains the same model plainly and by Pollux, in turns: `overhead SIZE ROUNDS`.

Each loop is a generator that takes one optimizer step at a time. A round gives every loop a block of as many steps, in
random order, and CPU time is taken around each block: what slows the machine down for longer than a round slows all.
The prepared loop has everything on; only its batch size is held, so that all do the same work.

Printed by replica 0, with CPU seconds summed over the replicas:
{"parameters", "steps": [a block's, by round], "cpu_s": {loop: [by round]}, "is_measured": [by round], "every"}
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import time
from collections.abc import Iterator

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks.training.rows import Rows, loader
from pollux.torch import Job

SIZES = {"1m": (256, 870), "10m": (1024, 2750)}
"""Features and hidden units: 0.99 and 10.4 million parameters."""
BLOCKS = {"1m": (6, 10), "10m": (2, 4)}
"""Fewest and most steps of a block; their number varies so that no rhythm of the agent falls in with it."""
CLASSES = 10
SAMPLES = 8192
BATCH = 128
"""Of one replica."""
WARM_UP = 272
"""Steps after which the agent has its first 32 noise samples, and measures as rarely as its budget asks."""
FIT_EVERY_S = 5.0
"""Of the prepared loop's own training; the default is 30 s."""
LEARNING_RATE = 1e-6
"""So small that all loops go on computing with the same numbers, however many steps each has taken."""


class Prepared:
    """The loop with Pollux."""

    def __init__(self, rows: Rows, size: str, replicas: int, report_every_s: float) -> None:
        batch_size = BATCH * replicas
        self.job = Job(max_batch_size=batch_size, report_every_s=report_every_s)
        self._model, self._optimizer = _model(size)
        self._loader = loader(rows, batch_size=batch_size, shuffle=True)
        self._model, self._optimizer, self._loader = self.job.prepare(self._model, self._optimizer, self._loader)
        self._made = self.job._made

    def steps(self) -> Iterator[None]:
        job, done = self.job, 0
        for _ in job.passes(1_000_000):
            for x, y in self._loader:
                if job.steps > done:
                    done = job.steps
                    yield
                self._optimizer.zero_grad()
                job.backward(cross_entropy(self._model(x), y))
                self._optimizer.step()

    @property
    def last_measured(self) -> int:
        return self._made.adapter._last_measured_step

    @property
    def every(self) -> int:
        return self._made.dealer.measuring.every

    def resume(self) -> None:
        """Other loops have run since the last step: the time that took is none of this one's."""
        self._made.loop._stopwatch.interrupt()
        self._made.adapter.interrupted()

    def fit(self) -> None:
        """The first fit imports what it needs, once in the life of a job."""
        if self._made.tuner is not None:
            self._made.tuner.submit(self._made.adapter.measured())
        self.wait_for_fit()

    def wait_for_fit(self) -> None:
        """So that a fit counts in the block that asked for it."""
        while self._made.tuner is not None and self._made.tuner._is_busy:
            time.sleep(0.0005)


def _model(size: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    features, hidden = SIZES[size]
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Linear(features, hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, CLASSES),
    )
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def plain(rows: Rows, size: str, *, ddp: bool) -> Iterator[None]:
    """The loop without Pollux."""
    model, optimizer = _model(size)
    if ddp:
        model = DistributedDataParallel(model)
    sampler: DistributedSampler[object] = DistributedSampler(rows)
    batches = loader(rows, batch_size=BATCH, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("rounds", type=int)
    arguments = parser.parse_args()
    size = arguments.size
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    replicas = distributed.get_world_size()
    torch.manual_seed(0)
    rows = Rows(torch.randn(SAMPLES, SIZES[size][0]), torch.randint(0, CLASSES, (SAMPLES,)))

    loops = {"plain": plain(rows, size, ddp=True), "again": plain(rows, size, ddp=True)}
    if replicas == 1:
        loops["bare"] = plain(rows, size, ddp=False)
    prepared = Prepared(rows, size, replicas, report_every_s=FIT_EVERY_S * (len(loops) + 1))
    loops["prepared"] = prepared.steps()
    _warm_up(loops, prepared, BLOCKS[size][1])

    steps, is_measured = [], []
    cpu_s: dict[str, list[float]] = {name: [] for name in loops}
    rng = random.Random(1)  # the same on all replicas
    gc.collect()
    gc.freeze()
    for _ in range(arguments.rounds):
        steps.append(rng.randint(*BLOCKS[size]))
        before = prepared.last_measured
        for name in rng.sample(list(loops), len(loops)):
            cpu_s[name].append(_block(loops[name], steps[-1], prepared if name == "prepared" else None))
        is_measured.append(prepared.last_measured > before)

    sums = torch.tensor(list(cpu_s.values()), dtype=torch.float64)
    distributed.all_reduce(sums)
    if distributed.get_rank() == 0:
        found = {
            "parameters": sum(parameter.numel() for parameter in _model(size)[0].parameters()),
            "steps": steps,
            "cpu_s": dict(zip(cpu_s, sums.tolist(), strict=True)),
            "is_measured": is_measured,
            "every": prepared.every,
        }
        print(json.dumps(found))
    for steps_of_one in loops.values():
        steps_of_one.close()  # type: ignore[attr-defined]
    prepared.job.close()
    distributed.destroy_process_group()


def _warm_up(loops: dict[str, Iterator[None]], prepared: Prepared, block: int) -> None:
    for name, loop in loops.items():
        for _ in range(WARM_UP if name == "prepared" else 2 * block):
            next(loop)
    prepared.fit()


def _block(loop: Iterator[None], steps: int, prepared: Prepared | None) -> float:
    """CPU seconds of all threads of this replica."""
    distributed.barrier()
    start = time.process_time()
    if prepared is not None:
        prepared.resume()
    for _ in range(steps):
        next(loop)
    if prepared is not None:
        prepared.wait_for_fit()
    return time.process_time() - start


if __name__ == "__main__":
    main()
