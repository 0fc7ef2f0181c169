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
from contextlib import contextmanager, suppress
from functools import partial

import uvicorn
from starlette.applications import Starlette

from pollux import __version__
from pollux.errors import Permanent, PolluxError
from pollux.node.accounts import account_of
from pollux.providers.local import LocalProvider
from pollux.service import salvage, structured_log
from pollux.service.options import ServiceOptions
from pollux.service.patience import Patience, protocol
from pollux.service.place import ClusterConfig, ClusterFolder, ServiceFile
from pollux.service.rest import create_app
from pollux.service.service import Service

log = logging.getLogger(__name__)

BACKLOG = 128
PATIENCE = Patience()
KEEP_EVERY_S = 1.0
"""How often it is seen whether the service can still be found."""


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
        _say(error)
        return 1
    try:
        structured_log.setup(place.log, logging.INFO, [place.token()])
        if place.regained_from is not None:
            log.warning("%s was lost, and is taken from %s.", place.token_file, place.regained_from)
        asyncio.run(_serve(options, place))
    except (PolluxError, OSError) as error:
        log.error("%s", error)
        _say(error)
        return 1
    except Exception:
        log.exception("A bug ends the service. Jobs train on.")
        raise
    return 0


def _say(error: Exception) -> None:
    with suppress(OSError):  # the file that it goes to may be on a full disk
        print(f"error: {error}", file=sys.stderr, flush=True)


async def _serve(options: ServiceOptions, place: ClusterFolder) -> None:
    listener = _listen(options.host, options.port)
    with listener, salvage.opened(place.database) as store:
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
        server = _Server(http_config(create_app(service, place.token(), PATIENCE), PATIENCE))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
        finding = asyncio.create_task(
            _stay_found(place, ServiceFile(os.getpid(), url, __version__, time.time()), place.config())
        )
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
            finding.cancel()
            await asyncio.wait([finding])
            place.remove_service_file()
    log.info("The service has ended.")


def http_config(app: Starlette, patience: Patience) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol(patience),
        ws="none",
        log_config=None,
        lifespan="off",
        access_log=False,
        server_header=False,
        timeout_keep_alive=patience.idle_s,
    )


async def _stay_found(place: ClusterFolder, file: ServiceFile, config: ClusterConfig | None) -> None:
    """Say where the service listens, and see to it that this stays said, for as long as it runs."""
    is_first, told = True, ""
    while True:
        problem = ""
        try:
            written = place.keep(file, config)
            if written and not is_first:
                log.warning("In %s, %s was gone or changed, and is written again.", place.path, ", ".join(written))
            is_first = False
        except OSError as error:  # a full disk: it may have room soon
            problem = f"{error.strerror or error}"
            if problem != told:
                log.error("Commands may not find this service: %s cannot be written to (%s).", place.path, problem)
        told = problem
        await asyncio.sleep(KEEP_EVERY_S)


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
