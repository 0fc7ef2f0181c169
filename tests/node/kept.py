"""Nodes with a real keeper that has loaded next to nothing, and plain commands to run on them."""

import os

from pollux.core import Allocation, FrozenMap, JobId
from pollux.node.inherited import inherited
from pollux.node.keeper_client import KeeperClient
from pollux.wire.nodes import Launch, RunJob

from .daemons import Node


class Kept(Node):
    """A node with a keeper of its own, which its daemons find again."""

    def start(self):
        self.keeper = KeeperClient(inherited(os.environ, self.options.job_env))
        return super().start()

    def end(self):
        self.start_again()
        self.stop(end_all=True)

    def start_again(self):
        self.stop()
        return self.start()


def command(*words, job="j", gpus=1, directory="/tmp", checkpoint_dir="", **environment):
    given = FrozenMap(environment)
    return Launch(JobId(job), words[0], tuple(words[1:]), directory, given, checkpoint_dir, is_plain=True, gpus=gpus)


def on(**gpus):
    return Allocation.of(gpus)


def run(node, *words, generation=1, **more):
    """Start it; its replica is called 1-1."""
    launch = command(*words, **more)
    node.ask(RunJob(launch.job, generation, launch, on(a=1)))
