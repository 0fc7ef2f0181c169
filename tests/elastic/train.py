"""A training script for tests: it writes down what each step has taken and left behind.

Its parameter `uses` counts with every step how often each sample has been applied to the weights: its gradient is 1/M
for each sample of the step, and its learning rate M. `job.state["steps"]` is the lineage of the weights: pass, start
and stop of every step that they have seen. With --out, each replica writes there what `tests/elastic/trial.py` reads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pollux.torch import Job

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--samples", type=int, default=640)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--passes", type=int, default=4)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--depth", type=int, default=1)
parser.add_argument("--step-s", type=float, default=0.0, help="sleep so long in each step")
parser.add_argument("--evaluate-s", type=float, default=0.0, help="sleep so long in each evaluation")
parser.add_argument("--checkpoint-every-s", type=float, default=1e9)
parser.add_argument("--adapt", action="store_true")
parser.add_argument("--norm", action="store_true", help="use batch normalisation")
parser.add_argument("--adam", action="store_true", help="AdamW for the weights; uses are not counted")
parser.add_argument("--scaler", action="store_true", help="use a GradScaler")
parser.add_argument("--data", choices=["map", "shards", "stream"], default="map")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--persistent", action="store_true", help="keep the workers from one pass to the next")
parser.add_argument("--most-per-gpu", type=int, help="run larger shares in several passes")
parser.add_argument("--first-loop", type=int, default=0, help="train so many epochs in a loop of their own before")
parser.add_argument(
    "--break-after", type=int, default=0, help="leave the loop over the loader after every so many steps of the job"
)
parser.add_argument("--stop-at", type=int, default=0, help="the first replica stops the job after so many steps")
parser.add_argument(
    "--stop-when-resized", action="store_true", help="it waits until it hears of other members, and then does so"
)
options = parser.parse_args()

FEATURES, CLASSES = 8, 4
NAME = os.environ.get("POLLUX_REPLICA", "alone")
IS_NEWCOMER = "POLLUX_NEWCOMER" in os.environ
Sample = tuple[torch.Tensor, int, int]


class Points(Dataset[Sample]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(options.samples, FEATURES, generator=generator)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return options.samples

    def __getitem__(self, index: int) -> Sample:
        return self.x[index], int(self.y[index]), index


class PointStream(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return map(points.__getitem__, range(len(points)))


class PointShards(PointStream):
    def sizes(self) -> list[int]:
        return [len(points) // 10] * 10

    def read(self, shard: int, start: int, stop: int) -> list[Sample]:
        first = shard * len(points) // 10
        return [points[first + offset] for offset in range(start, stop)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(FEATURES, options.width)]
        for _ in range(options.depth):
            layers += [nn.BatchNorm1d(options.width)] if options.norm else []
            layers += [nn.ReLU(), nn.Linear(options.width, options.width)]
        self.body = nn.Sequential(*layers, nn.Linear(options.width, CLASSES))
        self.uses = nn.Parameter(torch.zeros(options.samples, dtype=torch.float64), requires_grad=not options.adam)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.uses[index]


class Counter:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def digest(*tensors: torch.Tensor) -> str:
    joined = hashlib.sha256()
    for tensor in tensors:
        joined.update(tensor.detach().contiguous().numpy().tobytes())
    return joined.hexdigest()[:12]


def moments() -> list[torch.Tensor]:
    """What the optimizer keeps, in the order of its parameters."""
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    return [value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]


def write_step() -> None:
    """All of this is equal on all members, but `place`."""
    record = {
        "step": job.steps + 1,
        "place": [job.num_replicas, job._replicas.rank, job._replicas.shape.num_nodes],
        "weights": digest(*model.parameters()),
        "moments": digest(*moments()),
        "rate": schedule.get_last_lr()[0],
        "scale": scaler.get_scale(),
        "registered": counter.count,
        "lineage": hashlib.sha256(json.dumps(job.state["steps"]).encode()).hexdigest()[:12],
        "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))],  # noqa: NPY002
        "batch": job.batch_size,
        "factors": job.learning_rate_factors,
        "progress": job.progress,
    }
    print(json.dumps(record), file=records, flush=True)


def is_told(name: str) -> bool:
    """By a file that the test puts there."""
    return options.out is not None and (options.out / name).exists()


def pause(seconds: float) -> None:
    if seconds and not is_told("hurry"):
        time.sleep(seconds)


torch.manual_seed(5)
random.seed(5)
np.random.seed(5)  # noqa: NPY002
records = (options.out / f"{NAME}.jsonl" if options.out else Path(os.devnull)).open("a")
job = Job(
    adapt=options.adapt,
    measure_noise=options.adapt,
    guard=False,
    checkpoint_every_s=options.checkpoint_every_s,
    report_every_s=1.0,
    max_per_gpu_batch_size=options.most_per_gpu,
    samples_per_pass=options.samples,
    **({"max_batch_size": 4 * options.batch} if options.adapt else {}),
)
points = Points()
dataset: Any = {"map": points, "stream": PointStream(), "shards": PointShards()}[options.data]
model: Any = Net()
loader: Any = DataLoader(
    dataset,
    batch_size=options.batch,
    shuffle=True if options.data == "map" else None,
    num_workers=options.workers,
    persistent_workers=options.persistent,
)
groups: list[dict[str, Any]] = [{"params": list(model.body.parameters()), "lr": 0.05}]
if options.adam:
    optimizer: Any = torch.optim.AdamW(groups, lr=0.003)
else:
    groups[0] |= {"momentum": 0.9}
    optimizer = torch.optim.SGD([*groups, {"params": [model.uses], "lr": float(options.batch)}])
decay = [lambda step: 0.999**step, lambda _: 1.0]
schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, decay[: len(optimizer.param_groups)])
scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=16, enabled=options.scaler)
model, optimizer, loader, schedule, scaler = job.prepare(model, optimizer, loader, schedule, scaler)
held_out = job.shard(DataLoader(points, batch_size=64, num_workers=options.workers))
counter = job.register("counter", Counter())
job.state.setdefault("steps", [])


def train_one_pass() -> None:
    for x, y, index in loader:
        if IS_NEWCOMER and is_told("fail in a step"):
            raise OSError("told to fail in a step")
        optimizer.zero_grad()
        scores, uses = model(x, index)
        loss = nn.functional.cross_entropy(scores, y) + uses.mean().float()
        job.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        plan = job._made.stepper._plan
        if job._made.stepper.is_complete:
            job.state["steps"].append((plan.pass_index, plan.start, plan.stop))
            counter.count += 1
            schedule.step()
            write_step()
        job.average("loss").add(loss.detach(), len(y))
        if options.stop_when_resized and NAME == "1-1" and is_told("resize"):
            while not job._membership.is_pending:
                time.sleep(0.01)
            job.stop()
        if job.is_main and job.steps + 1 == options.stop_at:
            job.stop()
        pause(options.step_s)
        if options.break_after and (job.steps + 1) % options.break_after == 0:
            break


def evaluate() -> float:
    model.eval()
    with torch.no_grad():
        for x, y, index in held_out:
            job.average("accuracy").add((model(x, index)[0].argmax(1) == y).float().mean(), len(y))
            job.average("evaluated").add(1.0, len(y))
    model.train()
    if is_told("hold"):
        (options.out / f"{NAME}.held").touch()
        while is_told("hold"):
            time.sleep(0.01)
    pause(options.evaluate_s)
    accuracy = job.average("accuracy").compute()
    evaluated.append(job.average("evaluated").merged_state()["count"])
    job.average("accuracy").reset()
    job.average("evaluated").reset()
    return accuracy


while IS_NEWCOMER and is_told("wait"):
    time.sleep(0.02)
if IS_NEWCOMER and is_told("fail"):
    raise RuntimeError("this newcomer was told to fail")
accuracy, evaluated = 0.0, []
for _ in job.epochs(options.first_loop) if options.first_loop else ():
    train_one_pass()
for epoch in (job.epochs if IS_NEWCOMER and is_told("diverge") else job.passes)(options.passes):
    train_one_pass()
    accuracy = evaluate()
    if job.is_main:
        print(json.dumps({"epoch": epoch, "replicas": job.num_replicas, "accuracy": accuracy}), flush=True)

weights = torch.cat([parameter.detach().double().flatten() for parameter in model.body.parameters()])
result = {
    "replica": NAME,
    "main": job.is_main,
    "steps": job.state["steps"],
    "uses": (-model.uses.detach()).tolist(),
    "weights": weights[:: max(1, len(weights) // 500)].tolist(),
    "norm": float(weights.norm()),
    "buffers": {name: buffer.double().flatten().tolist() for name, buffer in model.named_buffers()},
    "rate": schedule.get_last_lr()[0],
    "loss": job.average("loss").compute(),
    "samples": job.average("loss").merged_state()["count"],
    "accuracy": accuracy,
    "evaluated": evaluated,
    "progress": job.progress,
}
if options.out:
    (options.out / f"{NAME}.json").write_text(json.dumps(result))
