"""A daemon without replicas, run as a process of its own: takes the options of `pollux node`, and does as it is told.

The first argument of a job's script says how it goes: `train` until it is stopped (`train:save`: it saves then;
`train:late`: it is killed), `finish`, `break` before its first
step, or `fail:K`, which fails K times after training and then finishes.
A resize to 7 replicas is given up, one to 6 starts the job anew.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from pollux.core import Allocation, GenerationAbandoned, JobFailed, JobFinished, JobStopped, ReplicasReady
from pollux.errors import PolluxError
from pollux.wire.frames import accept
from pollux.wire.nodes import (
    DescribeNode,
    Done,
    ListReplicas,
    ListRuns,
    NodeDescription,
    NodeRequest,
    Refused,
    ReplicaHere,
    ReplicaList,
    ReplicaNews,
    ResizeRun,
    RunJob,
    RunNews,
    RunPhase,
    Runs,
    RunStatus,
    StopRun,
    Watch,
)
from pollux.wire.replicas import ReplicaPhase, ReplicaStatus

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path)
parser.add_argument("--node")
parser.add_argument("--slots", type=int)
parser.add_argument("--token-file", type=Path)
parser.add_argument("--ephemeral", action="store_true")
parser.add_argument("--inherit-env", action="store_true")
parser.add_argument("--breaks", action="store_true")
options = parser.parse_args()
keeper = options.dir / "keeper.sock"


class Fake:
    def __init__(self):
        self.watchers = []
        self.events = []
        self.replicas = {}
        self.allocation = Allocation()
        self.phase = RunPhase.ENDED
        self.launch = None
        self.issued = self.generation = 0

    async def connected(self, reader, writer):
        try:
            peer = await accept(reader, writer, options.token_file.read_text().strip())
            while True:
                request = await peer.receive(NodeRequest)
                if isinstance(request, Watch):
                    peer.send(Done())
                    for event in self.events:
                        peer.send(RunNews(time.time(), event))
                    self.watchers.append(peer)
                else:
                    peer.send(self.answer(request))
        except (PolluxError, OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def answer(self, request):
        match request:
            case DescribeNode():
                return NodeDescription(options.node, os.getpid(), "0", options.slots)
            case ListRuns() if self.launch is None:
                return Runs(())
            case ListRuns():
                status = (self.launch.job, self.phase, self.generation, 0, self.issued, self.allocation, 5)
                return Runs((RunStatus(*status),))
            case ListReplicas():
                return ReplicaList(tuple(self.replicas.values()))
            case StopRun():
                if self.launch.arguments[0] == "train:save":
                    (Path(self.launch.checkpoint_dir) / "checkpoint-000001-step-5").mkdir()
                if self.launch.arguments[0] == "train:late":
                    for here in self.replicas.values():
                        late = dataclasses.replace(here, exit_code=-9)
                        self.tell(ReplicaNews(self.launch.job, options.node, late))
                self.phase = RunPhase.ENDED
                self.tell(RunNews(time.time(), JobStopped(request.job, request.generation)))
                return Done()
        if request.generation <= self.issued:
            return Refused("stale", is_stale=True, generation=self.issued)
        self.issued = request.generation
        is_anew = isinstance(request, ResizeRun) and request.allocation.num_gpus == 6
        if is_anew:
            self.phase = RunPhase.RESTARTING
        asyncio.get_running_loop().call_later(1.0 if is_anew else 0.05, self.change, request)
        if isinstance(request, RunJob):
            self.launch, self.phase = request.launch, RunPhase.STARTING
        return Done()

    def change(self, request):
        job, generation, allocation = request.job, request.generation, request.allocation
        if isinstance(request, ResizeRun) and allocation.num_gpus == 7:
            self.happened(GenerationAbandoned(job, generation, "replica 2-7 on node n0 ended with exit code 1"))
            return
        self.generation, self.allocation, self.phase = generation, allocation, RunPhase.TRAINING
        plan, _, count = self.launch.arguments[0].partition(":")
        for number in range(len(self.replicas), allocation.num_gpus):
            self.begin(f"{generation}-{number + 1}")
        if plan != "break":
            self.happened(ReplicasReady(job, generation))
        if plan == "break" or (plan == "fail" and generation <= int(count)):
            self.end()
            reason = f"replica {generation}-1 ended with exit code 3. Last lines of /x/{generation}-1.log: Boom: no"
            self.happened(JobFailed(job, generation, reason, 3))
        elif plan in ("finish", "fail"):
            self.end()
            self.happened(JobFinished(job, generation))

    def begin(self, replica):
        log = options.dir / "jobs" / self.launch.job / "logs" / f"{replica}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            print(f"{replica} begins", *self.launch.arguments, file=file)
        status = ReplicaStatus(
            self.launch.job, replica, 1, ReplicaPhase.TRAINING, self.generation, 0, 5, True, time.time()
        )
        self.replicas[replica] = ReplicaHere(replica, self.generation, 1, status, None, str(log))
        self.tell(ReplicaNews(self.launch.job, options.node, self.replicas[replica]))

    def end(self):
        self.phase = RunPhase.ENDED
        self.replicas.clear()

    def happened(self, event):
        self.events = [event]
        self.tell(RunNews(time.time(), event))

    def tell(self, news):
        for peer in self.watchers:
            with contextlib.suppress(PolluxError):  # it has gone
                peer.send(news)


async def main():
    fake, ended = Fake(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    (options.dir / "node.sock").unlink(missing_ok=True)
    await asyncio.start_unix_server(fake.connected, options.dir / "node.sock")
    listening = await asyncio.start_server(fake.connected, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    keeper.touch()
    node_file = {"node": options.node, "pid": os.getpid(), "host": "127.0.0.1", "port": port}
    (options.dir / "node.json").write_text(json.dumps(node_file))
    parent = os.getppid()
    while not ended.is_set() and os.getppid() == parent:
        try:
            async with asyncio.timeout(0.1):
                await ended.wait()
        except TimeoutError:
            pass
    for name in ("node.sock", "keeper.sock", "node.json"):
        (options.dir / name).unlink(missing_ok=True)


if options.breaks:
    sys.exit("fake: no such luck")
asyncio.run(main())
