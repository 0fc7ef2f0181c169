"""Plans are made in a process of their own, so that a long search keeps nobody waiting.

The worker (`python -m pollux.service.planning POLICY OPTIONS`) reads `MakePlan` documents and answers each with a
`PlanMade`; it ends when its input does, so that it never outlives a service that was killed. The profile registry may
be large and seldom changes: before each request the worker is told what has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from pollux.core import (
    Cluster,
    FrozenMap,
    Job,
    JobId,
    JobSpec,
    KindProfile,
    MakePlan,
    PlanMade,
    Snapshot,
    dumps,
    from_json,
    loads,
    to_json,
)
from pollux.errors import PolicyFailed, PolluxError

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class KindNews:
    """How the profile registry differs from what the worker knows of it."""

    changed: FrozenMap[str, KindProfile] = field(default_factory=FrozenMap)
    gone: tuple[str, ...] = ()

    @classmethod
    def between(cls, told: FrozenMap[str, KindProfile], now: FrozenMap[str, KindProfile]) -> KindNews:
        if told is now:
            return cls()
        changed = {kind: profile for kind, profile in now.items() if told.get(kind) is not profile}
        return cls(FrozenMap(changed), tuple(kind for kind in told if kind not in now))

    def applied(self, known: FrozenMap[str, KindProfile]) -> FrozenMap[str, KindProfile]:
        if not self.changed and not self.gone:
            return known
        kept = {kind: profile for kind, profile in known.items() if kind not in self.gone}
        return FrozenMap({**kept, **self.changed})


class Planner:
    """Asks the worker, which is started again when it has died."""

    def __init__(self, policy: str, options: Mapping[str, object], timeout_s: float) -> None:
        self._policy = policy
        self._command = [sys.executable, "-P", "-m", "pollux.service.planning", policy, json.dumps(dict(options))]
        self._timeout_s = timeout_s
        self._worker: asyncio.subprocess.Process | None = None
        self._told: FrozenMap[str, KindProfile] = FrozenMap()
        """What the worker knows of the profile registry."""

    async def warm_up(self) -> None:
        """Have everything loaded and compiled before the first job waits for it."""
        job = Job(JobSpec(JobId("warm-up")), 0.0)
        snapshot = Snapshot(0.0, 0, Cluster.uniform(1, 1), FrozenMap({job.id: job}))
        try:
            await self.plan(MakePlan(0, snapshot, 0))
        except PolluxError as error:
            log.error("The policy failed its first try: %s", error)

    async def plan(self, request: MakePlan) -> PlanMade:
        """`PolicyFailed` if there is no plan: the policy raised, its process died, or it took too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._ask(request)
        except TimeoutError:
            await self.close()
            problem = f"it took more than {self._timeout_s:g} s"
            raise PolicyFailed(self._policy, f"planning round {request.round}", problem) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise PolicyFailed(self._policy, f"planning round {request.round}", f"its process died ({error})") from None
        except asyncio.CancelledError:
            await self.close()  # half an answer may be on its way
            raise
        if not answer.startswith(b"{"):
            raise PolicyFailed(self._policy, f"planning round {request.round}", answer.decode())
        return loads(answer, PlanMade)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()

    async def _ask(self, request: MakePlan) -> bytes:
        if self._worker is None or self._worker.returncode is not None:
            self._told = FrozenMap()
            self._worker = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
            )
        stdin, stdout = self._worker.stdin, self._worker.stdout
        assert stdin is not None
        assert stdout is not None
        snapshot = request.snapshot
        news, self._told = KindNews.between(self._told, snapshot.kinds), snapshot.kinds
        for document in (to_json(news), dumps(replace(request, snapshot=replace(snapshot, kinds=FrozenMap())))):
            body = document.encode()
            stdin.write(_LENGTH.pack(len(body)) + body)
        await stdin.drain()
        (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        return await stdout.readexactly(length)


def work(policy_name: str, options: Mapping[str, object], stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer requests until there are none."""
    from pollux.policies import registry

    policy = registry.make(policy_name, options)
    kinds: FrozenMap[str, KindProfile] = FrozenMap()
    while (news := _read(stdin)) and (body := _read(stdin)):
        kinds = from_json(news, KindNews).applied(kinds)
        request = loads(body, MakePlan)
        snapshot = replace(request.snapshot, kinds=kinds)
        began_s = time.process_time()
        try:
            plan = policy.plan(snapshot, request.seed)
            plan.check(snapshot)
            cpu_ms = 1000 * (time.process_time() - began_s)
            answer = dumps(PlanMade(request.round, plan, cpu_ms=cpu_ms, stats=FrozenMap(policy.stats())))
        except Exception as error:  # a policy may be anybody's: its bug must not end the service
            logging.exception("Round %d", request.round)
            answer = f"{type(error).__name__}: {error}"
        told = answer.encode()
        stdout.write(_LENGTH.pack(len(told)) + told)
        stdout.flush()


def _read(stdin: BinaryIO) -> bytes:
    """The next document; nothing if there is none."""
    head = stdin.read(_LENGTH.size)
    return stdin.read(*_LENGTH.unpack(head)) if head else b""


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a policy prints must not get between the answers
    work(sys.argv[1], json.loads(sys.argv[2]), sys.stdin.buffer, answers)
