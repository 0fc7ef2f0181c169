"""A recommender: embeddings of users and items matched by a small network (neural collaborative filtering), and Adam.

    python examples/recommender.py

The users are invented, so nothing is downloaded. The last line is the result, as JSON; `seconds` is CPU time.
"""

import argparse
import json
import time

import torch
from datasets import baskets
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


class Recommender(nn.Module):
    """Scores items for a user: a product of embeddings plus a network on both."""

    def __init__(self, users: int, items: int, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.network = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))
        self.match = nn.Linear(width, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        """user [batch], items [batch, n] → scores [batch, n]"""
        user_match, user_deep = self.users(user)[:, None].chunk(2, dim=-1)
        item_match, item_deep = self.items(items).chunk(2, dim=-1)
        deep = torch.cat([user_deep.expand_as(item_deep), item_deep], dim=-1)
        return (self.match(user_match * item_match) + self.network(deep)).squeeze(-1)


def loss_of(model: nn.Module, user: Tensor, items: Tensor) -> Tensor:
    """Cross-entropy of "liked or not": the first five items of a basket are liked."""
    scores = model(user, items)
    is_liked = torch.zeros_like(scores)
    is_liked[:, :5] = 1
    return binary_cross_entropy_with_logits(scores, is_liked)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Hit rate@10: how often, in percent, the held-out item is among the ten best of a hundred."""
    model.eval()
    scores = torch.cat([model(user, items) for user, items in loader])
    model.train()
    better = (scores[:, 1:] >= scores[:, :1]).sum(dim=1)
    return 100 * (better < 10).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a recommender.")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the samples")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--users", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    train_set, test_set = baskets(args.users, items=1000)
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=500)
    model = Recommender(args.users, items=1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.4)

    start, steps = time.process_time(), 0
    for epoch in range(args.epochs):
        for user, items in train_loader:
            optimizer.zero_grad()
            loss = loss_of(model, user, items)
            loss.backward()
            optimizer.step()
            steps += 1
        scheduler.step()
        print(f"epoch {epoch + 1:2d}: hit rate@10 {evaluate(model, test_loader):.2f} %")

    seconds = time.process_time() - start
    hit_rate = evaluate(model, test_loader)
    print(json.dumps({"metric": "hit_rate_at_10", "value": hit_rate, "seconds": seconds, "steps": steps}))


if __name__ == "__main__":
    main()
