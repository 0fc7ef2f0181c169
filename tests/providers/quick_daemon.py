"""`pollux node` with a keeper that does not load torch, which takes seconds. All else is real."""

import argparse
import sys
from pathlib import Path

from pollux.core import FrozenMap, NodeId
from pollux.node.daemon import DaemonOptions, serve

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path)
parser.add_argument("--node")
parser.add_argument("--slots", type=int)
parser.add_argument("--token-file", type=Path)
parser.add_argument("--gpu-type", default="")
parser.add_argument("--env", action="append", default=[])
parser.add_argument("--job-env", action="append", default=[])
parser.add_argument("--breaks", action="store_true")
given = parser.parse_args()
if given.breaks:
    sys.exit("no such luck")
variables = FrozenMap(text.split("=", 1) for text in given.env)
options = DaemonOptions(preload=(), gpu_type=given.gpu_type, replica_env=variables, job_env=tuple(given.job_env))
sys.exit(serve(given.dir, NodeId(given.node), slots=given.slots, options=options, token_file=given.token_file))
