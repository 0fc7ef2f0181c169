"""The rendezvous store of a job: a process of its own, so that no daemon and no replica takes it along at its end."""

from __future__ import annotations

import json
import os
import signal
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(host: str, report: int) -> None:
    """Serve on that address, say {"port": …} on the descriptor and close it; return after SIGTERM or SIGINT."""
    endings = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # before the store's threads start, which inherit it
    with socket.create_server((host, 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        # A store that binds by itself listens on every address of the machine.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    os.write(report, json.dumps({"port": port}).encode("ascii") + b"\n")
    os.close(report)
    signal.sigwait(endings)
    del store
