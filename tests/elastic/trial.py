"""One job on a cluster of a test: started, resized, waited for, and what its replicas wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pollux.core import Allocation, Event, FrozenMap, JobFinished, JobId, NodeId, ReplicasReady, StopReason
from pollux.node.launching import LocalCluster
from pollux.wire.nodes import Launch, RunPhase, RunStatus

TRAIN = Path(__file__).with_name("train.py")
PATIENCE_S = 90.0
"""Long past what any step of these tests needs."""


def on(**replicas: int) -> Allocation:
    """`on(n0=2, n1=1)`: where replicas are to be."""
    return Allocation.of({NodeId(node): count for node, count in replicas.items()})


def until(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"did not come about within {patience_s:g} s: {what}")
        time.sleep(0.02)


class Trial:
    """`tests/elastic/train.py`, or another script, as a job. Replicas write into `out`, which they get as --out.

    <replica>.jsonl   a line for each step that the replica has finished
    <replica>.json    what it had at the end
    hurry             while it is there, steps take no time, whatever `--step-s` says
    wait              while it is there, newcomers wait before they come to their loop
    fail              newcomers fail before they come to their loop
    diverge           newcomers come to another loop than the others
    resize            with --stop-when-resized, the first replica waits until it hears of other members
    hold              while it is there, replicas stay in their evaluation, and say so by <replica>.held
    """

    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        name: str,
        *arguments: object,
        script: Path = TRAIN,
        saves: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.job = JobId(name)
        self.out = folder / name
        self.out.mkdir(parents=True, exist_ok=True)
        self.checkpoints = self.out / "checkpoints"
        self.generation = 0
        self.launch = Launch(
            self.job,
            str(script),
            ("--out", str(self.out), *map(str, arguments)),
            str(self.out),
            FrozenMap(dict(environment or {})),
            str(self.checkpoints) if saves else "",
        )

    # Driven

    def start(self, where: int | Allocation = 1, *, waits: bool = True) -> Trial:
        self.generation = self.cluster.run(self.launch, where)
        if waits:
            self.expect_ready(self.wait())
        return self

    def resize(self, where: int | Allocation, *, waits: bool = True) -> Trial:
        """With `waits`, until the new members train; without, see `wait`."""
        self.generation = self.cluster.resize(self.job, where)
        if waits:
            self.expect_ready(self.wait())
        return self

    def wait(self, generation: int | None = None) -> Event:
        """What became of the generation that was asked for last."""
        return self.cluster.wait(self.job, generation or self.generation, PATIENCE_S)

    def wait_step(self, step: int) -> Trial:
        """Until a replica has finished so many steps."""
        until(lambda: self.steps >= step, f"step {step}: {self.logs()}")
        return self

    def tell(self, name: str) -> Trial:
        """Put a file there that the script looks for; `take_back` removes it."""
        (self.out / name).touch()
        return self

    def take_back(self, name: str) -> Trial:
        (self.out / name).unlink()
        return self

    def finish(self, *, hurries: bool = True) -> dict[str, dict[str, Any]]:
        """Wait for the job's good end; the results of its last members, by replica."""
        if hurries:
            self.tell("hurry")
        event = self.cluster.wait_end(self.job, timeout_s=PATIENCE_S)
        assert isinstance(event, JobFinished), f"{event}\n{self.logs()}"
        return self.results()

    def end(self) -> None:
        """Whatever it does."""
        if (status := self.status()) is not None and status.phase is not RunPhase.ENDED:
            self.cluster.wait_end(self.job, self.cluster.stop(self.job, StopReason.CANCELLED), PATIENCE_S)

    def expect_ready(self, event: Event) -> None:
        assert isinstance(event, ReplicasReady), f"{event}\n{self.logs()}"

    # Seen

    def status(self) -> RunStatus | None:
        return self.cluster.status(self.job)

    @property
    def steps(self) -> int:
        """The last ones only: this is asked again and again while the replicas train on the same cores."""
        texts = [path.read_text().rpartition("\n")[0] for path in self.out.glob("*.jsonl")]
        return max((json.loads(text.rpartition("\n")[2])["step"] for text in texts if text), default=0)

    def pids(self) -> dict[str, int]:
        """Of the replicas that live."""
        found = self.cluster.replicas(self.job)
        return {name: here.pid for name, (_, here) in found.items() if here.exit_code is None}

    def results(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))}

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """By replica; a line that is being written is left out."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(self.out.glob("*.jsonl")):
            whole, _, _ = path.read_text().rpartition("\n")
            found[path.stem] = [json.loads(line) for line in whole.splitlines()]
        return found

    def log(self, replica: str) -> str:
        _, here = self.cluster.replicas(self.job)[replica]
        return Path(here.log).read_text(errors="replace")

    def logs(self, characters: int = 1500) -> str:
        """The ends of all logs, to tell a failed test by."""
        folders = sorted(self.cluster.folder.glob(f"n*/jobs/{self.job}/logs/*.log"))
        parts = [(path, path.read_text(errors="replace")[-characters:]) for path in folders]
        return "\n".join(f"--- {path.parts[-4]} {path.name}\n{text}" for path, text in parts)
