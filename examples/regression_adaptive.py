"""A regression: a multilayer perceptron learns a bent surface from noisy samples, with SGD and Pollux.

    python examples/regression_adaptive.py
    torchrun --nproc-per-node 2 examples/regression_adaptive.py

The samples are generated, so nothing is downloaded. Only the main replica prints, each replica tests its share, and the
count of steps is the job's own, so that it does not matter when a replica joins. The last line is the result, as JSON;
`seconds` is CPU time of the main replica.
"""

import argparse
import json
import time

import torch
from datasets import surface
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from pollux.torch import Average, Job


class Perceptron(nn.Module):
    """Hidden layers of equal width with shortcuts around them, about 20,000 parameters."""

    def __init__(self, inputs: int, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.hidden:
            x = x + layer(x.relu())
        return self.last(x.relu()).squeeze(-1)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, mean: Average) -> float:
    """The mean squared error over the loader, of which every replica sees its share."""
    model.eval()
    mean.reset()
    for x, y in loader:
        mean.add(mse_loss(model(x), y), len(y))
    model.train()
    return mean.compute()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a perceptron to fit a noisy surface.")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the samples")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=40_000, help="points to train on")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    job = Job(seed=args.seed, report_every_s=2)

    train_loader = DataLoader(surface(args.samples, seed=1), batch_size=16, shuffle=True)
    test_loader = job.shard(DataLoader(surface(args.samples // 8, seed=2, noise=0.0), batch_size=500))
    model = Perceptron(inputs=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)
    model, optimizer, train_loader, scheduler = job.prepare(model, optimizer, train_loader, scheduler)

    start = time.process_time()
    for epoch in job.epochs(args.epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            job.backward(mse_loss(model(x), y))
            optimizer.step()
        scheduler.step()
        job.state["error"] = evaluate(model, test_loader, job.average("test error"))
        if job.is_main:
            print(f"epoch {epoch + 1:2d}: mean squared error {job.state['error']:.4f}")

    seconds = time.process_time() - start
    if job.is_main:
        result = {"metric": "mean_squared_error", "value": job.state["error"], "seconds": seconds, "steps": job.steps}
        print(json.dumps(result))


if __name__ == "__main__":
    main()
