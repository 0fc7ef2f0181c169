"""A training script for tests of the whole system: it adapts, and writes down what each step has taken.

It sleeps as long as a step would take on a device of its own: two cores do not become four devices. It trains until
the test puts the file `finish` into its folder, and at least two passes. Each replica writes into that folder what
`tests/live/course.py` reads; `job.state["steps"]` is the lineage of the weights: pass, start and stop of every step
that they have seen. The last line that it prints is its accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pollux.torch import Job

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, default=3200)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--step-s", type=float, default=0.02, help="sleep so long in each step")
parser.add_argument("--sample-s", type=float, default=0.002, help="and so long for each sample of this replica")
parser.add_argument("--checkpoint-every-s", type=float, default=1e9)
options = parser.parse_args()

FEATURES, CLASSES = 16, 4
NEVER = 10_000
NAME = os.environ.get("POLLUX_REPLICA", "alone")
options.out.mkdir(parents=True, exist_ok=True)
records = (options.out / f"{NAME}.jsonl").open("a")

torch.set_num_threads(1)
torch.manual_seed(5)
job = Job(report_every_s=1, max_batch_size=16 * options.batch, checkpoint_every_s=options.checkpoint_every_s)
generator = torch.Generator().manual_seed(1)
x = torch.randn(options.samples, FEATURES, generator=generator)
y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
# Labels that are wrong at times, so that gradients are noisy and larger batches worth while.
noisy = torch.where(
    torch.rand(len(y), generator=generator) < 0.2, torch.randint(CLASSES, y.shape, generator=generator), y
)
model: Any = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
loader: Any = DataLoader(TensorDataset(x, noisy), batch_size=options.batch, shuffle=True)
model, optimizer, loader = job.prepare(model, optimizer, loader)
job.state.setdefault("steps", [])


def is_to_finish() -> bool:
    return (options.out / "finish").exists()


def write_step() -> None:
    record = {
        "step": job.steps + 1,
        "replicas": job.num_replicas,
        "batch": job.batch_size,
        "factor": job.learning_rate_factors[0],
        "pid": os.getpid(),
    }
    print(json.dumps(record), file=records, flush=True)


for _ in job.passes(NEVER):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        job.backward(loss)
        optimizer.step()
        job.average("loss").add(loss.detach(), len(labels))
        if not is_to_finish():
            time.sleep(options.step_s + options.sample_s * len(labels))
        if job._made.stepper.is_complete:
            plan = job._made.stepper._plan
            job.state["steps"].append((plan.pass_index, plan.start, plan.stop))
            write_step()
            if job.is_main:
                print(f"step {job.steps + 1}", flush=True)
                if plan.pass_index >= 2 and is_to_finish():
                    job.stop()

with torch.no_grad():
    accuracy = float((model(x).argmax(1) == y).float().mean())
result = {"steps": job.state["steps"], "samples": job.average("loss").merged_state()["count"]}  # all take part
if job.is_main:
    (options.out / "result.json").write_text(json.dumps(result))
print(json.dumps({"metric": "accuracy", "value": accuracy}), flush=True)
