"""The service process: puts everything together, listens, and runs until it is told to end.

SIGTERM ends the service alone: jobs train on, and the next service on the folder finds them. SIGINT, and
`pollux down`, have jobs save and stop, and end the daemons as well.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn

from pollux import __version__
from pollux.errors import Permanent, PolluxError
from pollux.node.accounts import account_of
from pollux.providers.local import LocalProvider
from pollux.service import structured_log
from pollux.service.options import ServiceOptions
from pollux.service.place import ClusterFolder, ServiceFile
from pollux.service.rest import create_app
from pollux.service.service import Service
from pollux.service.store import SqliteLog

log = logging.getLogger(__name__)

BACKLOG = 128


def main(options: ServiceOptions) -> int:
    """Serve until the end: the exit code. What keeps it from starting is said on standard error, in one sentence.

    The lock goes with the process: who waits for it, as `pollux down` does, waits until nothing is left.
    """
    place = ClusterFolder(options.folder)
    try:
        place.make()
        place.lock()
        place.admit(account_of(options.job_user) if options.job_user else None)
    except PolluxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        structured_log.setup(place.log, logging.INFO, [place.token()])
        asyncio.run(_serve(options, place))
    except (PolluxError, OSError) as error:
        log.error("%s", error)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception:
        log.exception("A bug ends the service. Jobs train on.")
        raise
    return 0


async def _serve(options: ServiceOptions, place: ClusterFolder) -> None:
    listener = _listen(options.host, options.port)
    with listener, SqliteLog(place.database) as store:
        provider = LocalProvider(
            place.path,
            place.token_file,
            options.nodes,
            options.slots,
            options=options.node_options,
            gpu_type=options.gpu_type,
            labels=options.node_labels,
            replica_env=options.replica_env,
            job_env=options.job_env,
            job_user=options.job_user,
        )
        service = Service(options, place, provider, store)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, partial(service.end, stop_jobs=False))
        loop.add_signal_handler(signal.SIGINT, partial(service.end, stop_jobs=True))
        app = create_app(service, place.token())
        server = _Server(uvicorn.Config(app, log_config=None, lifespan="off", access_log=False, server_header=False))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
        place.write_service_file(ServiceFile(os.getpid(), url, __version__, time.time()))
        log.info("Pollux %s listens at %s, pid %d.", __version__, url, os.getpid())
        running = asyncio.create_task(service.run())
        try:
            await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                log.error("The REST API has ended by itself, and with it the service. Jobs train on.")
                service.end(stop_jobs=False)
            await running
        finally:
            server.should_exit = True
            await asyncio.wait([serving], timeout=5.0)
            place.remove_service_file()
    log.info("The service has ended.")


class _Server(uvicorn.Server):
    """Leaves signals to us: what they mean depends on the jobs."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        problem = (
            "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        )
        raise Permanent(f"Port {port} of {host} {problem}. Give another one, or --port 0 for any.") from None
    listener.set_inheritable(False)
    return listener
