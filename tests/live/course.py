"""What the replicas of `train.py` wrote of their job: which steps there were, and which samples each of them took."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from pollux.service.place import ClusterFolder

BATCH, SAMPLES = 16, 3200
"""What the script begins with, and what a pass has."""
TARGET = 0.8
"""Accuracy; it begins at a quarter."""


class Course:
    def __init__(self, job: str, out: Path) -> None:
        self.job = job
        self.out = out

    def finish(self) -> None:
        """Let it come to its end, and without sleeping."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "finish").touch()

    def records(self) -> list[dict[str, Any]]:
        """Of all replicas, in the order of steps; a line that is being written is left out."""
        found: list[dict[str, Any]] = []
        for path in self.out.glob("*.jsonl"):
            whole, _, _ = path.read_text().rpartition("\n")
            found += (json.loads(line) | {"replica": path.stem} for line in whole.splitlines())
        return sorted(found, key=lambda record: (record["step"], record["replica"]))

    @property
    def last_step(self) -> int:
        """A replica's last line says it: this is asked again and again while the replicas train on the same cores."""
        texts = [path.read_text().rpartition("\n")[0] for path in self.out.glob("*.jsonl")]
        return max((json.loads(text.rpartition("\n")[2])["step"] for text in texts if text), default=0)

    @property
    def pids(self) -> set[int]:
        """Of the replicas that made the last step which all of them have written down."""
        steps = [list(lines) for _, lines in itertools.groupby(self.records(), key=lambda line: line["step"])]
        whole = [lines for lines in steps if len(lines) == lines[0]["replicas"]]
        return {line["pid"] for line in whole[-1]}

    @property
    def sizes(self) -> list[int]:
        """Numbers of replicas, in the order of steps, each once in a row."""
        return [size for size, _ in itertools.groupby(record["replicas"] for record in self.records())]

    @property
    def largest_batch(self) -> int:
        return max((record["batch"] for record in self.records()), default=0)

    def assert_each_step_once(self) -> None:
        """From the first to the last, by as many replicas as there were, all with the same batch and learning rate."""
        steps = {step: list(lines) for step, lines in itertools.groupby(self.records(), key=lambda line: line["step"])}
        assert list(steps) == list(range(1, len(steps) + 1))
        for step, lines in steps.items():
            assert len(lines) == lines[0]["replicas"], f"step {step}: {lines}"
            assert len({(line["replicas"], line["batch"], line["factor"]) for line in lines}) == 1, lines

    def assert_learning_rate_follows(self) -> None:
        """Between not at all and in proportion, as AdaScale has it."""
        for record in self.records():
            growth = record["batch"] / BATCH
            assert min(1.0, growth) <= record["factor"] <= max(1.0, growth), record
            assert record["factor"] > 1.0 or growth <= 1.0, record

    def assert_used_once_a_pass(self) -> None:
        """By the lineage of the final weights, and by the average over all that was trained on."""
        result = json.loads((self.out / "result.json").read_text())
        at = (0, 0)
        for number, start, stop in result["steps"]:
            assert (number, start) == at
            at = (number, stop) if stop < SAMPLES else (number + 1, 0)
        assert result["samples"] == at[0] * SAMPLES + at[1]

    def accuracy(self, folder: ClusterFolder) -> float:
        """As the job printed it in its last line, on every replica that was there at the end."""
        logs = [path.read_text() for path in folder.nodes.glob(f"n*/jobs/{self.job}/logs/*.log")]
        lines = [log.splitlines()[-1] for log in logs if log]
        found = {json.loads(line)["value"] for line in lines if '"accuracy"' in line}
        assert len(found) == 1, lines
        return float(found.pop())
