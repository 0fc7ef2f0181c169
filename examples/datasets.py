"""The data of the examples: generated, or shipped with Python. Nothing is downloaded, and every run gets the same.

`digits` draws images, `source_text` reads the standard library, `baskets` invents users and what they liked, `surface`
takes noisy samples of a function.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

# Ten figures of straight strokes through these points of a 2 × 4 grid: (x, y), y grows downwards.
STROKES = [
    [(0, 0), (2, 0), (2, 4), (0, 4), (0, 0)],
    [(0, 1), (1, 0), (1, 4)],
    [(0, 0), (2, 0), (2, 2), (0, 4), (2, 4)],
    [(0, 0), (2, 0), (1, 2), (2, 3), (1, 4), (0, 4)],
    [(2, 4), (2, 0), (0, 3), (2, 3)],
    [(2, 0), (0, 0), (0, 2), (2, 2), (2, 4), (0, 4)],
    [(2, 0), (0, 2), (0, 4), (2, 4), (2, 2), (0, 2)],
    [(0, 0), (2, 0), (1, 4)],
    [(0, 0), (2, 0), (0, 4), (2, 4), (0, 0)],
    [(2, 2), (0, 2), (0, 0), (2, 0), (2, 2), (1, 4)],
]

PACKAGES = ("email", "json")


def digits(count: int, seed: int, size: int = 16, dots: int = 32) -> TensorDataset:
    """`count` grey images [1, size, size] of ten figures, distorted and noisy, with their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    strokes = torch.stack([_along(points, dots) for points in STROKES])[labels]  # [count, dots, 2], within ±1

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=random)

    # Every image has its own slant, stretch and place; a slow wave along the stroke makes it look drawn by hand.
    warp = torch.eye(2) * 0.6 + 0.13 * normal(2, 2)
    phase = torch.linspace(0, 3 * torch.pi, dots) + 3 * normal(1)
    wave = torch.stack([phase.sin(), phase.cos()], dim=-1)
    where = strokes @ warp + 0.15 * normal(1, 2) + 0.09 * normal(1, 2) * wave

    # A dot of ink is a Gaussian, which is a product of one in x and one in y: an image is one matrix product.
    pixels = torch.linspace(-1, 1, size)
    width = 0.08 + 0.02 * torch.rand(count, 1, 1, generator=random)
    ink = torch.exp(-(((where[..., None] - pixels) / width[..., None]) ** 2) / 2)  # [count, dots, 2, size]
    images = (ink[:, :, 1].transpose(1, 2) @ ink[:, :, 0]).clamp(max=1)
    images = images + 0.25 * normal(size, size)
    return TensorDataset(images[:, None], labels)


def _along(points: list[tuple[int, int]], dots: int) -> Tensor:
    """`dots` places at equal distances along the line through `points`, scaled to ±1. [dots, 2]"""
    line = np.array(points, dtype=np.float32)
    walked = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(line, axis=0), axis=1))])
    at = np.linspace(0, walked[-1], dots)
    x, y = np.interp(at, walked, line[:, 0]), np.interp(at, walked, line[:, 1])
    return torch.tensor(np.stack([x - 1, y / 2 - 1], axis=1), dtype=torch.float32)


def source_text(packages: tuple[str, ...] = PACKAGES) -> Tensor:
    """The source text of these packages of the standard library, one byte a number, in a fixed order."""
    library = Path(os.__file__).parent
    files = [path for package in packages for path in sorted((library / package).rglob("*.py"))]
    text = b"".join(path.read_bytes() for path in files)
    return torch.tensor([byte for byte in text if byte < 128])  # plain ASCII


class Baskets(Dataset):
    """One sample a basket: (user, items), some items that the user liked first, then others at random, drawn anew."""

    def __init__(self, users: Tensor, liked: Tensor, items: int, at_random: int) -> None:
        self.users, self.liked, self.items, self.at_random = users, liked, items, at_random

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.users[index], torch.cat([self.liked[index], torch.randint(self.items, (self.at_random,))])


def baskets(users: int, items: int, liked: int = 5, each: int = 20, seed: int = 1) -> tuple[Dataset, Dataset]:
    """What invented users liked: `each` baskets of every user, all to train on but the last.

    Of each basket for training: `liked` items that the user liked, then four times as many at random. Every item of the
    last basket makes one sample for the test: the liked item, then 99 that the user did not like.
    Users and items are hidden vectors, and the better two match, the likelier is a like.
    """
    random = torch.Generator().manual_seed(seed)
    taste, content = (torch.randn(count, 8, generator=random) for count in (users, items))
    # The highest sums of match and Gumbel noise are draws without replacement, with odds exp(match).
    gumbel = -torch.empty(users, items).exponential_(generator=random).log()
    ranking = (taste @ content.T + gumbel).argsort(descending=True)
    likes, others = ranking.split([liked * each, items - liked * each], dim=1)
    likes = likes.gather(1, torch.rand(likes.shape, generator=random).argsort()).view(users, each, liked)

    user = torch.arange(users)
    train = Baskets(user.repeat_interleave(each - 1), likes[:, :-1].flatten(0, 1), items, 4 * liked)
    user = user.repeat_interleave(liked)
    drawn = torch.rand(len(user), others.shape[1], generator=random).argsort()[:, :99]
    return train, TensorDataset(user, torch.cat([likes[:, -1].reshape(-1, 1), others[user].gather(1, drawn)], dim=1))


def surface(count: int, seed: int, inputs: int = 8, noise: float = 1.0) -> TensorDataset:
    """`count` points of a cube and the height of a bent surface there, of variance about one, plus Gaussian noise."""
    random = torch.Generator().manual_seed(seed)
    points = 2 * torch.rand(count, inputs, generator=random) - 1  # [count, inputs], within ±1
    before, after = points.roll(1, dims=1), points.roll(-1, dims=1)
    height = (3 * points * before + after).sin().sum(dim=1) * (2 / inputs) ** 0.5
    return TensorDataset(points, height + noise * torch.randn(count, generator=random))
