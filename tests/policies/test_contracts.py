"""Every policy keeps the contract."""

from __future__ import annotations

from pollux.policies import Policy, make
from pollux.testing.policies import PolicyContract


class TestFifo(PolicyContract):
    work_conserving = False

    def make(self) -> Policy:
        return make("fifo")


class TestFifoWithBackfill(PolicyContract):
    def make(self) -> Policy:
        return make("fifo-backfill")


class TestSrtf(PolicyContract):
    def make(self) -> Policy:
        return make("srtf")


class TestSrsf(PolicyContract):
    def make(self) -> Policy:
        return make("srtf", {"by": "service"})


class TestSjf(PolicyContract):
    def make(self) -> Policy:
        return make("srtf", {"preempt": False})


class TestTiresias(PolicyContract):
    def make(self) -> Policy:
        return make("tiresias")


class TestOptimus(PolicyContract):
    def make(self) -> Policy:
        return make("optimus")
