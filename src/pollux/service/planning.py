"""Plans are made in a process of their own, so that a long search keeps nobody waiting.

The worker (`python -m pollux.service.planning POLICY OPTIONS`) reads `MakePlan` documents and answers each with a
`PlanMade`; it ends when its input does, so that it never outlives a service that was killed.
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
from typing import BinaryIO

from pollux.core import (
    Cluster,
    FrozenMap,
    Job,
    JobId,
    JobSpec,
    MakePlan,
    PlanMade,
    Snapshot,
    dumps,
    loads,
)
from pollux.errors import PolicyFailed, PolluxError

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("!Q")


class Planner:
    """Asks the worker, which is started again when it has died."""

    def __init__(self, policy: str, options: Mapping[str, object], timeout_s: float) -> None:
        self._policy = policy
        self._command = [sys.executable, "-P", "-m", "pollux.service.planning", policy, json.dumps(dict(options))]
        self._timeout_s = timeout_s
        self._worker: asyncio.subprocess.Process | None = None

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
                answer = await self._ask(dumps(request).encode())
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

    async def _ask(self, request: bytes) -> bytes:
        if self._worker is None or self._worker.returncode is not None:
            self._worker = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
            )
        stdin, stdout = self._worker.stdin, self._worker.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(_LENGTH.pack(len(request)) + request)
        await stdin.drain()
        (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        return await stdout.readexactly(length)


def work(policy_name: str, options: Mapping[str, object], stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer requests until there are none."""
    from pollux.policies import registry

    policy = registry.make(policy_name, options)
    while head := stdin.read(_LENGTH.size):
        (length,) = _LENGTH.unpack(head)
        request = loads(stdin.read(length), MakePlan)
        began_s = time.process_time()
        try:
            plan = policy.plan(request.snapshot, request.seed)
            plan.check(request.snapshot)
            cpu_ms = 1000 * (time.process_time() - began_s)
            answer = dumps(PlanMade(request.round, plan, cpu_ms=cpu_ms, stats=FrozenMap(policy.stats())))
        except Exception as error:  # a policy may be anybody's: its bug must not end the service
            logging.exception("Round %d", request.round)
            answer = f"{type(error).__name__}: {error}"
        body = answer.encode()
        stdout.write(_LENGTH.pack(len(body)) + body)
        stdout.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a policy prints must not get between the answers
    work(sys.argv[1], json.loads(sys.argv[2]), sys.stdin.buffer, answers)
