"""The replicas on this node: started through the keeper, heard over their links, signalled, and listed.

Nothing here knows what a replica is for: that is the business of the job's home. What a daemon must know after its own
restart is in replicas.json of each job; exit codes that came meanwhile are the keeper's to tell.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pollux.core import FrozenMap, JobId, NodeId
from pollux.errors import InvalidDocument, InvalidSpec, Permanent, PolluxError, StaleGeneration
from pollux.node import exits
from pollux.node.claims import new_claim, settle_claim, settle_last_claim
from pollux.node.exit_codes import LEFT_AS_ASKED
from pollux.node.folder import StateFolder, write
from pollux.node.hosted import Hosted, Told
from pollux.node.keeper_client import Child, LostKeeper, NoKeeper
from pollux.node.links import Links, hand
from pollux.node.processes import began_at, command_of, is_running, is_unreaped, parent_of, send_signal, start_ticks
from pollux.node.roster import Roster, StoreHere
from pollux.node.starting_keeper import KEEPER, WITNESS
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import Launch, ReplicaHere, ReplicaNews, Spawn, Tell

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.1
"""How often it is seen whether a new keeper is ready."""


class Keeper(Protocol):
    """What is asked of the keeper's client here."""

    async def spawn(
        self, tag: str, launch: Launch, environment: dict[str, str], log: Path, claim: Path | None = None
    ) -> int: ...
    async def host_store(self, job: JobId, host: str) -> tuple[int, int]: ...
    async def children(self) -> Sequence[Child]: ...
    async def forget(self, tag: str) -> None: ...
    async def forget_job(self, job: JobId) -> None: ...


class Hosting:
    """What follows from a call is told to `on_news`, and never from within the call."""

    def __init__(
        self,
        folder: StateFolder,
        node: NodeId,
        keeper: Keeper,
        on_news: Callable[[ReplicaNews], None],
        on_report: Callable[[AgentReport], None],
        on_store_lost: Callable[[JobId], None],
        *,
        slots: int,
        devices: tuple[str, ...] = (),
        gpu_type: str = "",
        extra: FrozenMap[str, str] | None = None,
        inherited: FrozenMap[str, str] | None = None,
        host: str,
        reached_at: str,
        heartbeat_s: float = 1.0,
        hang_after_s: float = 15.0,
        keeper_timeout_s: float = 300.0,
    ) -> None:
        """`gpu_type`, `extra`, `inherited`: see `Told`. `keeper_timeout_s`: how long to wait for another keeper when
        the one before is gone."""
        self._folder = folder
        self._node = node
        self._keeper = keeper
        self._on_news = on_news
        self._on_store_lost = on_store_lost
        self._slots = slots
        self._host = host
        self._reached_at = reached_at
        self._hang_after_s = hang_after_s
        self._keeper_timeout_s = keeper_timeout_s
        more = extra or FrozenMap(), inherited or FrozenMap()
        self._told = Told(folder.address, folder.token, heartbeat_s, devices, gpu_type, *more)
        self._roster = Roster(folder)
        self.links = Links(self._roster, self._heard, on_report)
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgetting: dict[JobId, asyncio.Task[None]] = {}
        self._starting_stores: dict[JobId, int] = {}
        """For which generation."""
        self._num_lost_keepers = 0

    # What the home asks for

    def spawn(self, request: Spawn) -> None:
        """Start what is not there already. How that ends is news: a replica that cannot be started has ended."""
        job, launch = request.job, request.launch
        if launch.job != job:
            raise InvalidSpec("launch.job", launch.job, f"is not the job {job!r} of the request", "Name one job")
        here = self._roster.of(job)
        newest = max((one.generation for one in here), default=0)
        if request.generation < newest:
            raise StaleGeneration(job, request.generation, newest)
        fresh = [seat for seat in request.seats if self._roster.find(job, seat.replica) is None]
        logs = {seat.replica: self._folder.replica_log(job, seat.replica) for seat in fresh}  # refuses odd names
        if not fresh:
            return
        self._roster.note(job, request.generation)
        self._keep_experience(job, request.experience)
        num_here = sum(one.is_alive and not one.is_forgotten for one in here) + len(fresh)
        slots = self._roster.free_slots(self._slots)
        for seat in fresh:
            held, path = tuple(islice(slots, launch.gpus)), logs[seat.replica]
            hosted = Hosted(job, seat.replica, request.generation, held, path, time.monotonic(), launch.is_plain)
            self._roster.add(hosted)
            if launch.is_plain:
                variables = self._told.plain_variables(launch, held)
            else:
                variables = self._told.variables(launch, seat, request.generation, held[0], num_here, request.store)
                variables["POLLUX_EXPERIENCE"] = str(self._folder.experience_file(job))
            self._begin(self._start(hosted, launch, variables))
        self._roster.save(job)

    def tell(self, request: Tell) -> None:
        """Hand the instruction to the replica, now if its link is up, and whenever it comes back."""
        job, replica, instruction = request.job, request.replica, request.instruction
        hosted = self._roster.find(job, replica)
        if hosted is None:
            raise Permanent(f"{job}/{replica} is not on this node: the instruction reaches nobody.")
        self._keep_experience(job, request.experience)
        hosted.note(instruction)
        hand(hosted, instruction)

    def kill(self, job: JobId, replica: str, number: int) -> None:
        """15 goes to the replica alone, 9 to its whole session; both to all of a plain command. Nothing happens to one
        that has ended, or to one that was told to leave and is told so again."""
        if number not in (signal.SIGTERM, signal.SIGKILL):
            raise InvalidSpec("signal", number, "is not sent to replicas", "Give 15 or 9")
        hosted = self._roster.find(job, replica)
        if hosted is None or not hosted.is_alive or (number == signal.SIGTERM and hosted.is_leaving):
            return
        log.info("%s gets signal %d.", hosted.tag, number)
        if hosted.pid:
            hosted.send(number)
        else:
            hosted.pending_signal = min(number, hosted.pending_signal or number)  # 9 beats 15
        # Only now: a daemon that is killed in between gives its 15 again, which is better than never.
        hosted.is_leaving = True
        self._roster.save(job)

    async def host_store(self, job: JobId, generation: int = 0) -> str:
        """Where other nodes reach the job's rendezvous store, which is started if there is none.

        It is there for that generation and those after it: no `forget` of an earlier one ends it.
        """
        self._folder.job(job)  # refuses odd names
        await self._forgotten(job)
        self._starting_stores[job] = max(generation, self._starting_stores.get(job, 0))
        try:
            store = self._roster.stores.get(job)
            if store is None or not store.is_running:  # it may have outlived the keeper that it is from
                pid, port = await self._when_kept(lambda: self._keeper.host_store(job, self._host))
                store = self._roster.stores[job] = StoreHere(pid, began_at(pid), port)
        finally:
            self._starting_stores.pop(job, None)
        self._roster.note(job, generation)
        self._roster.save(job)
        return f"{self._reached_at}:{store.port}"

    def forget(self, job: JobId, generation: int) -> None:
        """End what is left of the job here, up to that generation; how it ends is news. Its logs stay.

        If anything is here of a later one, the job has another home by now, which still needs the store.
        """
        for hosted in self._roster.of(job):
            if hosted.generation > generation:
                continue
            if not hosted.is_alive:
                self._roster.remove(hosted)
                continue
            log.info("%s is left of a job that is over, and is ended.", hosted.tag)
            hosted.is_forgotten = True
            hosted.pending_signal = signal.SIGKILL
            hosted.send(signal.SIGKILL)
            if hosted.link is not None:
                hosted.link.close()
        if max(self._roster.newest(job), self._starting_stores.get(job, 0)) <= generation:
            self._drop_store(job)
            self._keep_experience(job, "")
        self._roster.save(job)

    def replicas(self, job: JobId) -> tuple[ReplicaHere, ...]:
        """Those that live here, and the last that ended."""
        return tuple(hosted.here for hosted in self._roster.of(job))

    def running(self, job: JobId) -> frozenset[str]:
        """The names of those that live here."""
        return frozenset(hosted.replica for hosted in self._roster.of(job) if hosted.is_alive)

    def has_job(self, job: JobId) -> bool:
        """Whether anything is known of the job here: it is not over then."""
        return bool(self._roster.of(job)) or job in self._roster.stores

    # What happens to replicas

    def ended(self, tag: str, pid: int, exit_code: int) -> None:
        """The keeper's word that one of its children has ended."""
        job, _, replica = tag.rpartition("/")
        hosted = self._roster.find(JobId(job), replica)
        if hosted is None:
            self._begin(self._forget(tag))
        elif hosted.pid in (0, pid):
            hosted.pid = pid
            if hosted.link is None:
                self._end(hosted, exit_code)
            else:
                self._begin(self._hear_out_and_end(hosted, exit_code))

    # What the daemon does by itself

    async def recover(self, *, is_after_reboot: bool = False) -> None:
        """Find the replicas of the daemon before; there are none if the machine was restarted since."""
        if is_after_reboot:
            for job in self._folder.jobs():
                self._roster.drop(job)
            return
        children = {child.tag: child for child in await self._keeper.children()}
        for job in self._folder.jobs():
            try:
                replicas = self._roster.load(job)
            except InvalidDocument as error:
                log.error("What job %s has on this node cannot be read, and is ended: %s", job, error)
                for child in children.values():
                    if child.tag.startswith(f"{job}/") and child.exit_code is None:
                        send_signal(child.pid, signal.SIGKILL)
                self._drop_store(job)
                self._roster.drop(job)
                continue
            for hosted in replicas:
                self._recover(hosted, children.get(hosted.tag))
            if replicas:
                log.info("Job %s: %d replicas live here.", job, sum(one.is_alive for one in self._roster.of(job)))
        exits.remove_others(self._folder.path, {one.pid for one in self._roster.alive()})

    def _recover(self, hosted: Hosted, child: Child | None) -> None:
        if not hosted.is_alive:
            self._begin(self._forget(hosted.tag))
        elif child is not None and not child.pid:
            self._roster.remove(hosted)  # the keeper is still at it: whoever wants it asks again
        elif child is not None:
            hosted.begin(child.pid)
            if child.exit_code is not None:
                self._end(hosted, child.exit_code)
        elif hosted.pid:
            hosted.is_orphan = True
            if not self._bury_orphan(hosted):
                hosted.begin(hosted.pid)
        elif process := settle_last_claim(hosted.log):
            hosted.is_orphan = True  # it began, and the daemon was gone before it was told
            hosted.pid, hosted.began = process
            if not self._bury_orphan(hosted):
                hosted.begin(hosted.pid)
        else:
            self._roster.remove(hosted)  # it was about to be started: whoever wants it asks again
        if hosted.is_forgotten and hosted.is_alive:
            hosted.send(signal.SIGKILL)

    def orphan(self) -> None:
        """The keeper is gone, and with it whoever could tell how its children end."""
        self._num_lost_keepers += 1
        for hosted in self._roster.alive():
            hosted.is_orphan = bool(hosted.pid)

    def store_ended(self, job: JobId, pid: int) -> None:
        """The keeper's word on a store."""
        store = self._roster.stores.get(job)
        if store is not None and store.pid == pid:
            del self._roster.stores[job]
            self._on_store_lost(job)

    async def watch_silence(self) -> None:
        """Kill replicas that have fallen silent, and save what could not be saved. Runs for ever."""
        pause_s = min(1.0, self._hang_after_s / 5)
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(pause_s)
            overslept_s = time.monotonic() - before_s - pause_s
            self._roster.save_again()
            for job, store in list(self._roster.stores.items()):
                if not store.is_running:
                    self.store_ended(job, store.pid)
            for hosted in self._roster.alive():
                if overslept_s > pause_s:
                    hosted.heard_at_s += overslept_s  # nobody was heard while this daemon was not awake
                if hosted.is_orphan and self._bury_orphan(hosted):
                    continue
                silent_s = time.monotonic() - hosted.heard_at_s
                if hosted.has_spoken and silent_s > self._hang_after_s and not hosted.is_hung:
                    log.warning("%s has been silent for %.1f s and is killed.", hosted.tag, silent_s)
                    hosted.is_hung = True
                    send_signal(hosted.pid, signal.SIGKILL)

    async def end_all(self, grace_s: float) -> None:
        """Let all replicas save and leave; after `grace_s` seconds they are killed."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            for hosted in self._roster.alive():
                self.kill(hosted.job, hosted.replica, number)
            until_s = time.monotonic() + wait_s
            while self._roster.alive() and time.monotonic() < until_s:
                await asyncio.sleep(0.02)
                for hosted in self._roster.alive():
                    if hosted.is_orphan:
                        self._bury_orphan(hosted)

    def close(self) -> None:
        """Stop what is under way here. Replicas live on."""
        for task in self._tasks:
            task.cancel()
        for hosted in self._roster.alive():
            if hosted.link is not None:
                hosted.link.abort()

    @property
    def num_alive(self) -> int:
        return len(self._roster.alive())

    @property
    def is_idle(self) -> bool:
        """Nothing lives here: no replica, and no store, which may serve replicas elsewhere."""
        return not self._roster.alive() and not self._roster.stores

    # Inside

    def _keep_experience(self, job: JobId, told: str | None) -> None:
        """Where its first replica looks for it; None says nothing. A job does without if it cannot be written."""
        path = self._folder.experience_file(job)
        try:
            if told:
                write(path, told, owner=self._folder.job_uid)
            elif told is not None:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("What others of its kind have measured cannot be told to job %s: %s", job, error)

    async def _start(self, hosted: Hosted, launch: Launch, variables: dict[str, str]) -> None:
        await self._forgotten(hosted.job)
        try:
            self._folder.make_job(hosted.job)
            pid = await self._when_kept(
                lambda: self._spawn(hosted, launch, variables), is_unwanted=lambda: bool(hosted.pending_signal)
            )
        except NoKeeper as error:
            log.warning("%s is not started: %s", hosted.tag, error.args[0])
            self._end(hosted, -hosted.pending_signal or None)
            return
        except (PolluxError, OSError) as error:
            log.error("%s cannot be started: %s", hosted.tag, error)
            hosted.last_words = f"It cannot be started: {error}"
            self._end(hosted, None)
            return
        if not hosted.is_alive:
            return
        hosted.begin(pid)
        slots = " ".join(map(str, hosted.slots))
        log.info("%s of generation %d began with pid %d in slot %s.", hosted.tag, hosted.generation, pid, slots)
        if hosted.pending_signal:
            hosted.send(hosted.pending_signal)
        if self._roster.find(hosted.job, hosted.replica) is hosted:
            self._roster.save(hosted.job)
            self._tell_news(hosted)

    async def _spawn(self, hosted: Hosted, launch: Launch, variables: dict[str, str]) -> int:
        """Its pid. Lost with the keeper before anybody knew, it is found, or was not started and never will be."""
        # A replica of another user cannot make its mark among our files. If it is lost, it reports, and is ended.
        is_marked = hosted.is_plain or self._folder.job_uid is None
        claim, num_lost = new_claim(hosted.log) if is_marked else None, self._num_lost_keepers
        try:
            pid = await self._keeper.spawn(hosted.tag, launch, variables, hosted.log, claim)
            hosted.is_orphan = num_lost != self._num_lost_keepers  # the keeper had just the time to answer
            return pid
        except LostKeeper as error:
            if claim is None:
                raise
            if (process := settle_claim(claim)) is None:
                raise NoKeeper(error.args[0], error.retry_after_s) from error
        log.warning("%s began as its keeper was lost, with pid %d.", hosted.tag, process[0])
        hosted.is_orphan = True
        return process[0]

    async def _when_kept(self, ask: Callable[[], Awaitable[T]], is_unwanted: Callable[[], bool] = lambda: False) -> T:
        """Ask the keeper; while it is being replaced, wait for the next one. `NoKeeper` if none comes in time."""
        until_s = time.monotonic() + self._keeper_timeout_s
        while True:
            try:
                return await ask()
            except NoKeeper:
                if is_unwanted() or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(LOOK_S)

    def _heard(self, hosted: Hosted) -> None:
        has_finished = hosted.status is not None and hosted.status.has_finished
        if not hosted.has_spoken or hosted.has_finished != has_finished:
            hosted.has_spoken, hosted.has_finished = True, has_finished
            self._roster.save(hosted.job)
        self._tell_news(hosted)

    async def _hear_out_and_end(self, hosted: Hosted, exit_code: int) -> None:
        await self.links.hear_out(hosted)
        self._end(hosted, exit_code)

    def _end(self, hosted: Hosted, exit_code: int | None, *, may_have_finished: bool = False) -> None:
        """`exit_code` None: nobody knows it, or the replica never began."""
        if not hosted.is_alive:
            return
        if exit_code is None:
            hosted.note_unknown_end(may_have_finished=may_have_finished)
        else:
            hosted.note_end(exit_code)
        if start_ticks(hosted.pid) in (0, hosted.began):  # else its number is a stranger's by now
            send_signal(hosted.pid, signal.SIGKILL, whole_session_only=True)
        how = ", and nobody knows how" if exit_code is None else f" with {exit_code}"
        log.info("%s ended%s%s.", hosted.tag, how, ": it was hung" if hosted.is_hung else "")
        if hosted.link is not None:
            hosted.link.close()
        if self._roster.find(hosted.job, hosted.replica) is hosted:
            if hosted.is_forgotten:
                self._roster.remove(hosted)
            self._roster.save(hosted.job)
            self._tell_news(hosted)
        self._begin(self._forget(hosted.tag))

    async def _forget(self, tag: str) -> None:
        with suppress(PolluxError):
            await self._keeper.forget(tag)

    def _drop_store(self, job: JobId) -> None:
        """And all else that the keeper has of the job, but for replicas that have not ended yet."""
        store = self._roster.stores.get(job)
        self._roster.drop_store(job)
        self._forgetting[job] = self._begin(self._forget_job(job, store))

    async def _forget_job(self, job: JobId, store: StoreHere | None) -> None:
        if store is not None and store.is_running:
            send_signal(store.pid, signal.SIGTERM)
        try:
            await self._keeper.forget_job(job)
        except PolluxError as error:
            log.warning("What is left of job %s was not ended: %s", job, error)
        finally:
            if self._forgetting.get(job) is asyncio.current_task():
                del self._forgetting[job]

    async def _forgotten(self, job: JobId) -> None:
        """Wait until nothing is left of the job's last run: its end must not hit what begins now."""
        if task := self._forgetting.get(job):
            await asyncio.wait([task])

    def _bury_orphan(self, hosted: Hosted) -> bool:
        """Whether it has ended. Its keeper's witness, or the keeper before it was killed, wrote down how.

        A plain command ends with its shim, and a script writes its own end down: where there is nothing, it was killed.
        Scripts of another user cannot write there: one that had finished its training may have done all its work. A
        replica that was asked to leave, or handed its state over, has done so.
        """
        if is_running(hosted.pid, hosted.began):
            return False
        if hosted.link is not None:
            self._begin(self.links.hear_out(hosted))
            return False
        exit_code = exits.read(self._folder.path, hosted.pid, hosted.began)
        if exit_code is None and is_unreaped(hosted.pid, hosted.began) and _is_witnessed(hosted.pid):
            return False  # it is about to be written down
        if exit_code is None and hosted.is_leaving:
            exit_code = LEFT_AS_ASKED
        elif exit_code is None and not hosted.has_finished and hosted.is_giving_way:
            exit_code = 0
        self._end(hosted, exit_code, may_have_finished=hosted.has_finished and self._folder.job_uid is not None)
        exits.remove(self._folder.path, hosted.pid, hosted.began)
        return True

    def _tell_news(self, hosted: Hosted) -> None:
        news = ReplicaNews(hosted.job, self._node, hosted.here, hosted.is_hung and not hosted.is_alive)
        asyncio.get_running_loop().call_soon(self._on_news, news)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_witnessed(pid: int) -> bool:
    """Whether the parent of a process that has ended, a witness or a shim, will write its exit code down."""
    return not {WITNESS, KEEPER}.isdisjoint(command_of(parent_of(pid)))
