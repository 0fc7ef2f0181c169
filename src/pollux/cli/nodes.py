"""`pollux nodes`, `drain` and `undrain`: the machines of the cluster."""

from __future__ import annotations

from rich.text import Text

from pollux.cli import emulated, output
from pollux.cli.finding import DirOption, NodesArgument, find
from pollux.cli.words import count
from pollux.wire.answers import to_plain
from pollux.wire.api import ClusterView

STYLES = {"ready": "green", "drained": "yellow", "away": "red"}


def nodes(path: DirOption = None, as_json: output.JsonOption = False) -> None:
    """Show the nodes: what each offers, what is free, who is there."""
    with find(path) as client:
        view = client.cluster()
    _show(view, as_json)


def drain(names: NodesArgument, path: DirOption = None, as_json: output.JsonOption = False) -> None:
    """Give no more jobs to a node; those on it move away with the next round, and nothing of them is lost."""
    with find(path) as client:
        for name in names:
            view = client.drain(name)
    _show(view, as_json)


def undrain(names: NodesArgument, path: DirOption = None, as_json: output.JsonOption = False) -> None:
    """Use a node again that was drained."""
    with find(path) as client:
        for name in names:
            view = client.undrain(name)
    _show(view, as_json)


def _show(view: ClusterView, as_json: bool) -> None:
    if as_json:
        output.print_json(to_plain(view))
        return
    rows = [
        (
            node.id,
            Text(node.state, style=STYLES.get(node.state, "")),
            node.gpus,
            node.free_gpus,
            node.gpu_type,
            " ".join(f"{job}×{gpus}" for job, gpus in sorted(node.jobs.items())) or "–",
            node.address or "–",
        )
        for node in view.nodes
    ]
    output.table(["node", "state", "GPUs", "free", "type", "jobs", "address"], rows)
    output.note(f"{count(view.gpus, 'GPU')}, {view.free_gpus} free; policy {view.policy}, round {view.round}.")
    emulated.tell(view.nodes)
