"""The language model with Pollux: besides the five lines, each replica evaluates its share, and one of them prints.

    python examples/language_model_adaptive.py
    torchrun --nproc-per-node 2 examples/language_model_adaptive.py

The schedule's steps, one an iteration here, are counted in progress: after a large batch it takes several.
"""

import argparse
import json
import math
import time

import torch
from datasets import source_text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from pollux.torch import Average, Job

CONTEXT = 32
"""Bytes that the model sees at once."""


class Transformer(nn.Module):
    """Predicts the next byte at every place of a window from the bytes before it.

    A convolution over the last four bytes takes the place of position embeddings. It learns at once what else takes
    heads of attention a while, and how long that while is depends on the seed.
    """

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(128, width)
        nn.init.normal_(self.bytes.weight, std=0.3)
        self.nearby = nn.Conv1d(width, width, kernel_size=4)
        block = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        before = pad(self.bytes(text).transpose(1, 2), (3, 0))
        hidden = self.nearby(before).transpose(1, 2)
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean over all places of the negative log-likelihood of the next byte."""
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def warm_up_then_cosine(done: float) -> float:
    """The factor of the learning rate when this share of the training is done."""
    return min(20 * done + 0.01, 0.5 + 0.5 * math.cos(math.pi * min(done, 1)))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, average: Average) -> float:
    """The mean loss over the loader, in nats a byte."""
    model.eval()
    average.reset()
    for (windows,) in loader:
        average.add(loss_of(model, windows), count=len(windows))
    model.train()
    return average.compute()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a language model on Python source text.")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the samples")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=None, help="windows of text to use")
    parser.add_argument("--width", type=int, default=64, help="numbers that stand for a byte, a multiple of four")
    parser.add_argument("--layers", type=int, default=2, help="blocks of attention")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    job = Job(seed=args.seed, report_every_s=2)

    # Every tenth window is held out.
    windows = source_text().unfold(0, CONTEXT + 1, CONTEXT + 1)[: args.samples]
    held_out = torch.arange(len(windows)) % 10 == 0
    train_loader = DataLoader(TensorDataset(windows[~held_out]), batch_size=8, shuffle=True)
    test_loader = job.shard(DataLoader(TensorDataset(windows[held_out]), batch_size=64))
    model = Transformer(args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    total = args.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda step: warm_up_then_cosine(step / total))
    model, optimizer, train_loader, scheduler = job.prepare(model, optimizer, train_loader, scheduler)

    start, steps = time.process_time(), 0
    for epoch in job.epochs(args.epochs):
        for (windows,) in train_loader:
            optimizer.zero_grad()
            loss = loss_of(model, windows)
            job.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            steps += 1
        job.state["loss"] = evaluate(model, test_loader, job.average("validation loss"))
        if job.is_main:
            print(f"epoch {epoch + 1:2d}: validation loss {job.state['loss']:.4f}")

    seconds = time.process_time() - start
    if job.is_main:
        print(json.dumps({"metric": "validation_loss", "value": job.state["loss"], "seconds": seconds, "steps": steps}))


if __name__ == "__main__":
    main()
