"""Processes that are killed, and processes that stand still for a while."""

from __future__ import annotations

from collections.abc import Callable

from pollux.testing.chaos.fault import BRIEFLY_S, FOR_LONG_S, NotNow, Scene, fault
from pollux.testing.chaos.processes import Process, Role

SINGLE = (Role.PLANNER, Role.DAEMON, Role.KEEPER, Role.WITNESS, Role.STORE, Role.REPLICA)


def _declare(role: Role) -> None:
    """Kill one of that role, stop it briefly, stop it for long."""

    def kill(scene: Scene) -> str:
        return scene.kill([scene.one(role)])

    kill.__doc__ = f"kill -9 of a {role}."
    fault(f"kill-{role}")(kill)
    _declare_stops(str(role), f"a {role}", lambda scene: [scene.one(role)])


def _declare_stops(name: str, what: str, victims: Callable[[Scene], list[Process]]) -> None:
    for how, span, text in (
        ("briefly", BRIEFLY_S, "for a moment"),
        ("long", FOR_LONG_S, "for longer than a replica may be silent"),
    ):

        def stop(scene: Scene, span: tuple[float, float] = span) -> str:
            return scene.stop(victims(scene), scene.draw.uniform(*span))

        stop.__doc__ = f"SIGSTOP of {what} {text}, then SIGCONT."
        fault(f"stop-{name}-{how}")(stop)


@fault("kill-service", ends_service=True)
def kill_service(scene: Scene) -> str:
    """kill -9 of the service."""
    return scene.kill_service()


_declare_stops("service", "the service", lambda scene: scene.some(Role.SERVICE))
for _role in SINGLE:
    _declare(_role)


@fault("kill-keeper-and-witness")
def kill_keeper_and_witness(scene: Scene) -> str:
    """kill -9 of a keeper and of its witness at once: nobody is left who could know exit codes."""
    node = scene.one(Role.WITNESS).node
    return scene.kill([*scene.some(Role.WITNESS, node), *scene.some(Role.KEEPER, node)])


@fault("kill-job")
def kill_job(scene: Scene) -> str:
    """kill -9 of all replicas of a job at once."""
    job = scene.one(Role.REPLICA).job
    return scene.kill([one for one in scene.some(Role.REPLICA) if one.job == job])


@fault("kill-node")
def kill_node(scene: Scene) -> str:
    """kill -9 of everything on a node at once, as if its machine went down and another came in its place."""
    return f"node {(node := _node(scene))}: {scene.kill(scene.of_node(node))}"


_declare_stops("node", "everything on a node", lambda scene: scene.of_node(_node(scene)))


@fault("kill-everything", ends_all=True)
def kill_everything(scene: Scene) -> str:
    """kill -9 of the service, of all nodes and of all that runs on them."""
    count = 0
    while found := scene.bed.find():  # what is just being started has to go as well
        count += sum(scene.bed.send(one, 9) for one in found)
        scene.wait_until_gone(found)
    return f"killed all {count} processes"


@fault("power-cut", ends_all=True)
def power_cut(scene: Scene) -> str:
    """The machine goes down and comes back: everything is killed, and the nodes find another boot id."""
    text = kill_everything(scene)
    for node in scene.bed.nodes:
        path = scene.bed.node_folder(node) / "boot_id"
        if path.exists():
            path.write_text("of the machine before")
    return f"{text}, and the machine was started again"


def _node(scene: Scene) -> str:
    nodes = [node for node in scene.bed.nodes if scene.bed.find(Role.DAEMON, node)]
    if not nodes:
        raise NotNow("no node is there")
    return scene.draw.choice(nodes)
