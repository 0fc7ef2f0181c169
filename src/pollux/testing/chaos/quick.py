"""`pollux` with short patience: `python quick.py up …`, by its path. All else is as users have it.

No option of `pollux up` says how long replicas may be silent, nodes away, or jobs pause between two tries: nobody needs
to choose that. A campaign that waited for all of it would be one of waiting.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from pollux.cli import up
from pollux.cli.cluster_options import options_of
from pollux.cli.main import main

if TYPE_CHECKING:
    from pollux.service.options import ServiceOptions

HANG_AFTER_S = 5.0
RETRY_PAUSE_S = 0.2
NODE_OPTIONS = (
    *("--hang-after", f"{HANG_AFTER_S:g}", "--heartbeat", "0.5", "--node-timeout", "10"),
    *("--stuck-timeout", "20", "--ready-timeout", "40"),
)
PATIENCE = {
    "node_options": NODE_OPTIONS,
    "node_grace_s": 15.0,
    "retry_pause_s": RETRY_PAUSE_S,
    "recovery_s": 30.0,
    "save_every": 50,  # so that even a log that lost its beginning can be replayed from two saved states
}


def impatient(options: ServiceOptions) -> ServiceOptions:
    return replace(options, **PATIENCE)  # type: ignore[arg-type]


if __name__ == "__main__":
    up.options_of = lambda folder, config: impatient(options_of(folder, config))  # type: ignore[attr-defined]
    up.COMMAND = (sys.executable, "-P", __file__, "up", "--foreground")
    main()
