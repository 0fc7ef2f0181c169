"""A training script whose replicas come and go: `elastic_script.py SIZE FOLDER`, as a user would write it.

Each replica writes to FOLDER/<replica>.jsonl as it goes, in lines of their own:
["parameters", count], ["step", generation, pass, first sample, last sample + 1, end] and ["phase", name, end], where
ends are in seconds since 1970, and phases are those of a change of replicas, in the order of PHASES.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.training.rows import Rows, loader
from pollux.agent.link import Link
from pollux.agent.membership import Membership
from pollux.agent.model import ReplicatedModel
from pollux.agent.rendezvous import Rendezvous
from pollux.agent.training import Training
from pollux.torch import Job

SIZES = {"1m": (256, 870), "10m": (1024, 2750)}
"""Features and hidden units: 0.99 and 10.4 million parameters."""
CLASSES = 10
SAMPLES = 8192
BATCH = 128
"""Of all replicas together; one alone takes about 15 ms for it with the small model."""
LEARNING_RATE = 1e-6

PHASES: dict[str, tuple[type, str]] = {
    "told": (Link, "_follow"),
    "switch": (Training, "_let_go"),
    "gather": (Rendezvous, "gather"),
    "state": (Membership, "_take"),
    "group": (Rendezvous, "make_group"),
    "wrap": (ReplicatedModel, "connect"),
}
"""The method that ends each of them."""


class Diary:
    """Written line by line, so that it is whole however the replica ends."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *line: object) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def note_ends(self, phase: str, owner: type, name: str) -> None:
        """Have each call of the method noted when it returns."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.write("phase", phase, time.time())
            return result

        setattr(owner, name, noted)


def main(size: str, folder: Path) -> None:
    diary = Diary(folder / f"{os.environ.get('POLLUX_REPLICA', 'alone')}.jsonl")
    for phase, (owner, name) in PHASES.items():
        diary.note_ends(phase, owner, name)
    features, hidden = SIZES[size]
    torch.manual_seed(1)
    rows = Rows(torch.randn(SAMPLES, features), torch.randint(0, CLASSES, (SAMPLES,)))
    job = Job(max_batch_size=BATCH)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(features, hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, CLASSES),
    )
    diary.write("parameters", sum(parameter.numel() for parameter in model.parameters()))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    batches = loader(rows, batch_size=BATCH, shuffle=True)
    model, optimizer, batches = job.prepare(model, optimizer, batches)
    stepper = job._made.stepper
    for _ in job.passes(1_000_000):
        for x, y in batches:
            optimizer.zero_grad()
            job.backward(cross_entropy(model(x), y))
            optimizer.step()
            if stepper.is_complete:
                plan = stepper._plan
                assert plan is not None
                diary.write("step", job._replicas.generation, plan.pass_index, plan.start, plan.stop, time.time())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
