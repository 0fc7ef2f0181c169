"""An emulated job: a tiny model takes real steps at the pace, with the progress and the noise of another application.

    pollux up --emulate --nodes 2 --slots 4
    pollux run --emulate cifar10:0.2
    POLLUX_COMPRESS=20 torchrun --nproc-per-node 2 examples/emulated.py cifar10:0.02

The name is one of Pollux's built-in applications, with the length of the training run if it is not the usual one. The
last line is the result, as JSON.
"""

import argparse
import json
import logging
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from pollux import applications
from pollux.torch import Job

ROWS, COLUMNS = 4096, 16


class Stream(Dataset):
    """As many samples as the application has; a few rows come again and again."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, COLUMNS, generator=generator)
        self.y = torch.tanh(self.x[:, :1]) + 0.5 * torch.randn(ROWS, 1, generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices) % ROWS
        return self.x[rows], self.y[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train at the pace of a built-in application.")
    parser.add_argument("application", help="such as cifar10, or cifar10:0.2 for a fifth of a training run")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    application = applications.load(args.application)
    first = application.limits.initial_batch_size
    job = Job(emulate=args.application, sample_randomness=False)

    data = Stream(round(application.total_progress / application.epochs * first))
    loader = DataLoader(data, batch_size=first, collate_fn=lambda batch: batch)
    model = nn.Sequential(nn.Linear(COLUMNS, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = job.prepare(model, optimizer, loader)

    start = time.monotonic()
    for _ in job.epochs(application.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            job.backward(mse_loss(model(x), y))
            optimizer.step()

    if job.is_main:
        result = {
            "metric": "progress",
            "value": min(1.0, job.progress / application.total_progress),
            "seconds": time.monotonic() - start,
            "steps": job.steps,
            "pacing_slip": job.emulation.stopwatch.slip,
            "profile_metric": {"name": application.metric.name, "value": job.emulation.metric(job.progress)},
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
