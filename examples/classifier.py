"""An image classifier: a small convolutional network, SGD with momentum, and a learning rate that follows a cosine.

    python examples/classifier.py

The images are generated, so nothing is downloaded. The last line is the result, as JSON; `seconds` is CPU time.
"""

import argparse
import json
import time

import torch
from datasets import digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader


class ConvNet(nn.Module):
    """Two convolutions and two linear layers, about 40,000 parameters."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if batch_norm else nn.Identity
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 4, stride=2, padding=1), norm(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 4, stride=2, padding=1), norm(32), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU()),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """The share of images that the model names correctly, in percent."""
    model.eval()
    right = [(model(images).argmax(dim=1) == labels).float() for images, labels in loader]
    model.train()
    return 100 * torch.cat(right).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an image classifier.")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the samples")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=20_000, help="images to train on")
    parser.add_argument("--batch-norm", action="store_true", help="with batch normalisation")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    train_loader = DataLoader(digits(args.samples, seed=1), batch_size=16, shuffle=True)
    test_loader = DataLoader(digits(args.samples // 2, seed=2), batch_size=500)
    model = ConvNet(args.batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)

    start, steps = time.process_time(), 0
    for epoch in range(args.epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            steps += 1
        scheduler.step()
        print(f"epoch {epoch + 1:2d}: accuracy {evaluate(model, test_loader):.2f} %")

    seconds = time.process_time() - start
    accuracy = evaluate(model, test_loader)
    print(json.dumps({"metric": "accuracy", "value": accuracy, "seconds": seconds, "steps": steps}))


if __name__ == "__main__":
    main()
