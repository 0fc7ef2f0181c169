"""Random lives of a job on three nodes, with every delay, loss and restart that may happen, checked all along.

`POLLUX_EXAMPLES=20000 pytest tests/node/test_run_properties.py` searches longer.
"""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import Allocation, StopReason

from .run_world import World

EXAMPLES = int(os.environ.get("POLLUX_EXAMPLES", "300"))

# How often each happens, relative to the others.
MOVES = {
    "news": 8,
    "order": 8,
    "replica": 10,
    "gather": 4,
    "step": 5,
    "wait a little": 3,
    "wait long": 1,
    "kill": 2,
    "fail": 1,
    "break group": 1,
    "resize": 2,
    "restart by resize": 1,
    "ask again": 1,
    "stop": 1,
    "start": 1,
    "cut link": 1,
    "crash node": 1,
    "link": 3,
    "restart home": 2,
    "restart home with another store": 1,
    "rest": 2,
}
RARE = ("fail", "break group", "cut link", "crash node", "link", "restart home", "restart home with another store")
moves = st.lists(
    st.tuples(st.sampled_from([name for name, weight in MOVES.items() for _ in range(weight)]), st.integers(0, 2**16)),
    max_size=80,
)
allocations = st.dictionaries(st.sampled_from("abc"), st.integers(1, 2), min_size=1).map(Allocation.of)
# While a job saves and leaves, which it has a minute for.
late_moves = st.lists(
    st.tuples(
        st.sampled_from([*("news", "order", "replica", "replica", "step", "kill", "gather", "rest"), *RARE]),
        st.integers(0, 2**16),
    ),
    max_size=20,
)


def make_move(world: World, move: str, pick: int) -> None:
    """One thing that can happen now, chosen by `pick`; nothing if there is none."""
    nodes = list(world.nodes.values())
    node = nodes[pick % len(nodes)]
    processes = world.processes()
    process = processes[pick % len(processes)] if processes else None
    match move:
        case "news" if waiting := [n for n in nodes if n.news]:
            world.deliver_news(waiting[pick % len(waiting)])
        case "order" if waiting := [n for n in nodes if n.orders]:
            world.deliver_order(waiting[pick % len(waiting)])
        case "replica" if process:
            world.move(process, pick // len(processes))
        case "gather":
            world.gather()
        case "step" if able := [group for group in world.groups() if group.can_step]:
            world.step(able[pick % len(able)])
        case "wait a little":
            world.advance(pick % 20 / 10)
        case "wait long":
            world.advance((10.0, 31.0, 61.0, 301.0)[pick % 4])
        case "kill" if process:
            world.end(process, -9)
        case "fail" if process:
            world.end(process, 1)
        case "break group" if groups := world.groups():
            groups[pick % len(groups)].is_broken = True
        case "resize" | "restart by resize":
            counts = {name: pick // 3**i % 3 for i, name in enumerate(world.nodes)}
            if any(counts.values()):
                world.resize(Allocation.of(counts), move == "resize")
        case "ask again":
            world.ask_again()
        case "stop":
            world.stop(list(StopReason)[pick % 4])
        case "start" if world.run.is_over or pick % 8 == 0:
            world.start(Allocation.of({"abc"[pick % 3]: 1 + pick % 2, "abc"[pick // 3 % 3]: 1}))
        case "cut link":
            world.unlink(node)
        case "crash node":
            world.crash_node(node)
        case "link":
            world.link(node)
        case "restart home" | "restart home with another store":
            world.restart_home(move != "restart home")
        case "rest":
            for _ in range(pick % 12):
                world.act()


@settings(max_examples=EXAMPLES)
@given(allocation=allocations, num_steps=st.sampled_from([1, 4, 20, 10**6, 10**6]), is_warm=st.booleans(), script=moves)
def test_a_run_survives_whatever_happens(
    allocation: Allocation, num_steps: int, is_warm: bool, script: list[tuple[str, int]]
) -> None:
    world = World(num_steps)
    world.start(allocation)
    for _ in range(10 if is_warm else 0):
        world.act()
    for move, pick in script:
        make_move(world, move, pick)
    world.settle()


@settings(max_examples=EXAMPLES)
@given(
    allocation=allocations,
    target=st.none() | allocations,
    num_acts=st.integers(0, 5),
    num_moves=st.integers(0, 20),
    is_stopped=st.booleans(),
    script=late_moves,
)
def test_what_can_be_saved_is_saved(
    allocation: Allocation,
    target: Allocation | None,
    num_acts: int,
    num_moves: int,
    is_stopped: bool,
    script: list[tuple[str, int]],
) -> None:
    """A stop comes, or all members are lost, as a job trains or is resized; and that is not all."""
    world = World(10**6)
    world.start(allocation)
    world.settle()
    if target is not None:
        world.resize(target, in_place=True)
    for _ in range(num_acts):
        world.act()
    for pick in range(num_moves):
        make_move(world, ("order", "replica", "news", "gather")[pick % 4], pick // 4)
    if is_stopped:
        world.stop(StopReason.PREEMPTED)
    else:
        members = {member.name for member in world.disk.members}
        for process in [process for process in world.processes() if process.name in members]:
            world.end(process, -9)
    for move, pick in script:
        make_move(world, move, pick)
    world.settle_saved()
    assert world.run.is_over
