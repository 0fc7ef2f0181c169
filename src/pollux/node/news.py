"""What several daemons tell, as one stream: for launchers, commands and tests, which have no event loop."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType

from pollux.core import Event, JobId, NodeId
from pollux.errors import PolluxError, Temporary
from pollux.wire.frames import Channel, ask
from pollux.wire.nodes import (
    Done,
    ListReplicas,
    NodeNews,
    ReplicaHere,
    ReplicaList,
    ReplicaNews,
    RunNews,
    Watch,
)
from pollux.wire.replicas import ReplicaStatus

log = logging.getLogger(__name__)

FIRST_S = 10.0
RECONNECT_S = 0.05
REFUSED_S = 1.0


class News:
    """Listens to each daemon in a thread, and again after it was restarted.

    It begins when all of them are heard, or some seconds have passed. Every event of a job is told once, also to those
    who begin to listen later. Of a replica only changes are told, not its steps.
    """

    def __init__(self, addresses: Mapping[NodeId, str], token: str) -> None:
        self._token = token
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._listeners: set[Listener] = set()
        self._events: dict[Event, RunNews] = {}
        self._replicas: dict[tuple[NodeId, JobId, str], tuple[object, ...]] = {}
        self._channels: dict[NodeId, Channel] = {}
        self._unheard = set(addresses)
        self._all_heard = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, args=item, name=f"news of {item[0]}", daemon=True)
            for item in addresses.items()
        ]
        for thread in self._threads:
            thread.start()
        if self._threads:
            self._all_heard.wait(FIRST_S)

    def listen(self) -> Listener:
        """All events so far, then whatever comes."""
        with self._lock:
            listener = Listener(self)
            for news in self._events.values():
                listener.put(news)
            self._listeners.add(listener)
        return listener

    def wait_for(self, is_wanted: Callable[[Event], bool], timeout_s: float) -> Event:
        """The first event that is wanted, of those so far and those to come; else `TimeoutError`."""
        until_s, last = time.monotonic() + timeout_s, "none"
        with self.listen() as listener:
            while (left_s := until_s - time.monotonic()) > 0:
                news = listener.receive(left_s)
                if isinstance(news, RunNews):
                    if is_wanted(news.event):
                        return news.event
                    last = str(news.event)
        raise TimeoutError(f"what was waited for did not happen within {timeout_s:g} s; the last event: {last}")

    def close(self) -> None:
        """Ends all threads and listeners. May be called again."""
        self._closed.set()
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            listeners = list(self._listeners)
        for thread in self._threads:
            thread.join()
        for listener in listeners:
            listener.put(None)

    def drop(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def _listen(self, node: NodeId, address: str) -> None:
        while not self._closed.is_set():
            pause_s = RECONNECT_S
            try:
                with Channel.connect(address, self._token) as channel:
                    self._hear(node, address, channel)
            except Temporary:
                pass
            except PolluxError as error:
                log.warning("The daemon of node %s is not understood: %s", node, error)
                pause_s = REFUSED_S
            self._closed.wait(pause_s)

    def _hear(self, node: NodeId, address: str, channel: Channel) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._channels[node] = channel
        channel.send(Watch(replicas=True))
        with suppress(TimeoutError):
            channel.receive(Done, 30.0)
            self._mark_heard(node)
            self._catch_up(node, address)
            while not self._closed.is_set():
                self._take(channel.receive(NodeNews))

    def _mark_heard(self, node: NodeId) -> None:
        with self._lock:
            self._unheard.discard(node)
            if not self._unheard:
                self._all_heard.set()

    def _catch_up(self, node: NodeId, address: str) -> None:
        """Replicas may have ended while nobody listened."""
        with self._lock:
            jobs = {job for where, job, _ in self._replicas if where == node}
        for job in jobs:
            listed = ask(address, self._token, ListReplicas(job))
            if isinstance(listed, ReplicaList):
                for here in listed.replicas:
                    self._take(ReplicaNews(job, node, here))

    def _take(self, news: NodeNews) -> None:
        with self._lock:
            match news:
                case RunNews(event=event):
                    if event in self._events:
                        return
                    self._events[event] = news
                case ReplicaNews(job=job, node=node, replica=here):
                    key, seen = (node, job, here.replica), _essence(here)
                    if self._replicas.get(key) == seen:
                        return
                    self._replicas[key] = seen
            for listener in self._listeners:
                listener.put(news)


class Listener(Iterator[NodeNews]):
    """An iterator that waits for the next news, and ends when its source is closed."""

    def __init__(self, news: News) -> None:
        """Use `News.listen`."""
        self._news = news
        self._queue: queue.SimpleQueue[NodeNews | None] = queue.SimpleQueue()

    def put(self, news: NodeNews | None) -> None:
        self._queue.put(news)

    def receive(self, timeout_s: float) -> NodeNews | None:
        """None: nothing came in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def __next__(self) -> NodeNews:
        news = self._queue.get()
        if news is None:
            self._queue.put(None)
            raise StopIteration
        return news

    def close(self) -> None:
        self._news.drop(self)

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _essence(here: ReplicaHere) -> tuple[object, ...]:
    """All but what changes with every step."""
    said = here.status
    state = None if said is None else _standing(said)
    return here.pid, here.exit_code, here.has_unknown_end, here.log, state


def _standing(said: ReplicaStatus) -> tuple[object, ...]:
    return said.phase, said.generation, said.membership, said.has_state, said.has_finished, said.since_s
