"""An elastic training job that says in a file of its own what it really does: `train.py --witness DIR …`.

The parameter `uses` counts how often each sample was applied to the weights: its gradient is 1/M for each sample of a
step of M, and its learning rate M. `job.state["at"]` follows pass and position of the steps that the weights have seen.
Each replica writes `DIR/<pid>-<ns>.jsonl`: that it has started, its steps, and, when the training is done, how many
samples were used another number of times than there were passes. DIR/finish makes it hurry. With --nonsense it also
talks to its daemon out of turn: see `nonsense.py`.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from nonsense import listen_in, talk_nonsense  # type: ignore[import-not-found]  # beside this script
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from pollux.node.processes import began_at
from pollux.torch import Job

FEATURES, CLASSES, BATCH = 8, 4, 16


class Points(Dataset[tuple[torch.Tensor, int, int]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return self.x[index], int(self.y[index]), index


class Net(nn.Module):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.uses = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.uses[index]


parser = argparse.ArgumentParser()
parser.add_argument("--witness", type=Path, required=True)
parser.add_argument("--samples", type=int, default=480, help="a multiple of the batch size")
parser.add_argument("--passes", type=int, default=3)
parser.add_argument("--step-s", type=float, default=0.1, help="sleep so long in each step")
parser.add_argument("--nonsense", type=float, default=0.0, help="talk nonsense to the daemon for so many seconds")
given = parser.parse_args()
given.witness.mkdir(parents=True, exist_ok=True)
records = (given.witness / f"{os.getpid()}-{time.time_ns()}.jsonl").open("a")


def write(what: str, **more: object) -> None:
    print(json.dumps({"what": what, "at": time.time(), **more}), file=records, flush=True)


# Registered before all that Pollux registers, so that it comes after it: nothing but the exit itself is left then.
atexit.register(write, "ended")
write("started", pid=os.getpid(), began=began_at(os.getpid()), replica=os.environ.get("POLLUX_REPLICA", ""))
if given.nonsense:
    overheard = listen_in()
    threading.Thread(target=talk_nonsense, args=(overheard, given.nonsense, write), daemon=True).start()

torch.manual_seed(5)
job = Job(adapt=False, measure_noise=False, guard=False, checkpoint_every_s=1.0, report_every_s=1.0)
bare = Net(given.samples)
groups = [
    {"params": list(bare.body.parameters()), "lr": 0.01, "momentum": 0.9},
    {"params": [bare.uses], "lr": float(BATCH)},
]
model: Any
model, optimizer, loader = job.prepare(
    bare, torch.optim.SGD(groups), DataLoader(Points(given.samples), batch_size=BATCH, shuffle=True)
)
job.state.setdefault("at", (0, 0))
job.state.setdefault("out_of_order", 0)
for _ in job.passes(given.passes):
    for x, y, index in loader:
        optimizer.zero_grad()
        scores, uses = model(x, index)
        job.backward(cross_entropy(scores, y) + uses.mean().float())
        optimizer.step()
        stepper = job._made.stepper
        if stepper.is_complete:
            plan: Any = stepper._plan
            job.state["out_of_order"] += tuple(job.state["at"]) != (plan.pass_index, plan.start)
            job.state["at"] = (plan.pass_index + 1, 0) if plan.ends_pass else (plan.pass_index, plan.stop)
            write("step", step=job.steps + 1)
        if not (given.witness / "finish").exists():
            time.sleep(given.step_s)

if job.is_main:
    wrong = (-model.uses.detach() - given.passes).abs().round(decimals=6)
    write(
        "finished",
        code=0,
        samples_wrong=float(wrong.sum()),
        out_of_order=job.state["out_of_order"],
        passes=job.state["at"][0],
    )
