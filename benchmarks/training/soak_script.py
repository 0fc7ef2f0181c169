"""Training that is disturbed: `soak_script.py FOLDER`. Goes on, pass after pass, until FOLDER/enough is there.

The parameter `uses` counts how often each sample was applied to the weights: its gradient is 1/M for each sample of a
step of M, and its learning rate M. After each pass every replica appends to FOLDER/<replica>.jsonl
[start of the job, pass, least uses, most uses, steps out of order, digest of the weights].
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from pollux.torch import Job

FEATURES, CLASSES, SAMPLES, BATCH = 16, 4, 1280, 32
PASSES = 10**6
FOLDER = Path(sys.argv[1])


class Points(Dataset[tuple[torch.Tensor, int, int]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return self.x[index], int(self.y[index]), index


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, CLASSES))
        self.uses = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.uses[index]


def digest() -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


faulthandler.register(signal.SIGUSR1, all_threads=True)  # says in the log where a replica hangs
torch.manual_seed(5)
job = Job(adapt=False, measure_noise=False, guard=False, checkpoint_every_s=1.0)
bare = Net()
optimizer = torch.optim.SGD(
    [
        {"params": list(bare.body.parameters()), "lr": 0.01, "momentum": 0.9},
        {"params": [bare.uses], "lr": float(BATCH)},
    ]
)
model, optimizer, loader = job.prepare(bare, optimizer, DataLoader(Points(), batch_size=BATCH, shuffle=True))
held_out = job.shard(DataLoader(Points(), batch_size=64))
job.state.setdefault("at", (0, 0))
job.state.setdefault("out_of_order", 0)
file = (FOLDER / f"{os.environ['POLLUX_REPLICA']}.jsonl").open("a")
for epoch in job.passes(PASSES):
    model.train()
    for x, y, index in loader:
        optimizer.zero_grad()
        scores, uses = model(x, index)
        job.backward(cross_entropy(scores, y) + uses.mean().float())
        optimizer.step()
        stepper = job._made.stepper
        if stepper.is_complete:
            plan = stepper._plan
            job.state["out_of_order"] += tuple(job.state["at"]) != (plan.pass_index, plan.start)
            job.state["at"] = (plan.pass_index + 1, 0) if plan.ends_pass else (plan.pass_index, plan.stop)
    model.eval()
    with torch.no_grad():
        for x, y, index in held_out:
            job.average("accuracy").add((model(x, index)[0].argmax(1) == y).float().mean(), len(y))
    job.average("accuracy").compute()
    job.average("accuracy").reset()
    counts = -model.uses.detach()
    least, most = round(float(counts.min()), 6), round(float(counts.max()), 6)
    line = [os.environ["SOAK_START"], epoch, least, most, job.state["out_of_order"], digest()]
    print(json.dumps(line), file=file, flush=True)
    if (FOLDER / "enough").exists():
        job.stop()
