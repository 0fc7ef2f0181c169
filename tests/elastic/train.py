"""A training script for tests: it keeps, as part of its state, which samples each step has taken.

Prints one line of JSON at its end. The parameter `uses` counts with every step how often each sample has been applied
to the weights: its gradient is 1/M for each sample of the step, and its learning rate M.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pollux.torch import Job

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=640)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--passes", type=int, default=4)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--depth", type=int, default=1)
parser.add_argument("--step-s", type=float, default=0.0, help="sleep so long in each step")
parser.add_argument("--adapt", action="store_true")
parser.add_argument("--norm", action="store_true", help="use batch normalisation")
parser.add_argument("--evaluate-s", type=float, default=0.0, help="sleep so long in each evaluation")
parser.add_argument("--other-loop", action="store_true", help="newcomers come to another loop than the others")
parser.add_argument("--out", default="")
parser.add_argument("--checkpoint-every-s", type=float, default=1e9)
options = parser.parse_args()

FEATURES, CLASSES = 8, 4


class Points(Dataset[tuple[torch.Tensor, int, int]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(options.samples, FEATURES, generator=generator)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return options.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return self.x[index], int(self.y[index]), index


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(FEATURES, options.width)]
        for _ in range(options.depth):
            layers += [nn.BatchNorm1d(options.width)] if options.norm else []
            layers += [nn.ReLU(), nn.Linear(options.width, options.width)]
        self.body = nn.Sequential(*layers, nn.Linear(options.width, CLASSES))
        self.uses = nn.Parameter(torch.zeros(options.samples, dtype=torch.float64))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.uses[index]


torch.manual_seed(5)
job = Job(
    adapt=options.adapt,
    measure_noise=options.adapt,
    guard=False,
    checkpoint_every_s=options.checkpoint_every_s,
    report_every_s=1.0,
    **({"max_batch_size": 4 * options.batch} if options.adapt else {}),
)
model: nn.Module = Net()
loader: DataLoader[tuple[torch.Tensor, int, int]] = DataLoader(Points(), batch_size=options.batch, shuffle=True)
optimizer = torch.optim.SGD(
    [
        {"params": model.body.parameters(), "lr": 0.05, "momentum": 0.9},
        {"params": [model.uses], "lr": float(options.batch), "momentum": 0.0},
    ]
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.999**step, lambda _: 1.0])
model, optimizer, loader, schedule = job.prepare(model, optimizer, loader, schedule)
held_out = job.shard(DataLoader(Points(), batch_size=64))
job.state.setdefault("steps", [])
accuracy = 0.0
loop = job.epochs if options.other_loop and os.environ.get("POLLUX_NEWCOMER") else job.passes
for epoch in loop(options.passes):
    model.train()
    for x, y, index in loader:
        optimizer.zero_grad()
        scores, uses = model(x, index)
        loss = nn.functional.cross_entropy(scores, y) + uses.mean().float()
        job.backward(loss)
        optimizer.step()
        stepper = job._made.stepper
        if stepper.is_complete:
            plan = stepper._plan
            job.state["steps"].append((plan.pass_index, plan.start, plan.stop))
            schedule.step()
        job.average("loss").add(loss.detach(), len(y))
        if options.step_s:
            time.sleep(options.step_s)
    model.eval()
    with torch.no_grad():
        for x, y, index in held_out:
            job.average("accuracy").add((model(x, index)[0].argmax(1) == y).float().mean(), len(y))
    time.sleep(options.evaluate_s)
    accuracy = job.average("accuracy").compute()
    job.average("accuracy").reset()
    if job.is_main:
        print(json.dumps({"epoch": epoch, "replicas": job.num_replicas, "accuracy": accuracy}), flush=True)

weights = torch.cat([parameter.detach().double().flatten() for parameter in model.body.parameters()])
result = {
    "replica": os.environ.get("POLLUX_REPLICA", ""),
    "main": job.is_main,
    "steps": job.state["steps"],
    "uses": (-model.uses.detach()).tolist(),
    "weights": weights[:: max(1, len(weights) // 500)].tolist(),
    "norm": float(weights.norm()),
    "rate": optimizer.param_groups[0]["lr"],
    "loss": job.average("loss").compute(),
    "accuracy": accuracy,
    "progress": job.progress,
}
if options.out:
    path = os.path.join(options.out, f"{result['replica'] or 'alone'}.json")
    with open(path, "w") as file:
        json.dump(result, file)
