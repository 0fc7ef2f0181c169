"""The import rules of docs/architecture.md, read off the syntax trees of src/pollux.

The table covers rooms that do not exist yet. A room may always import itself, the standard library and `errors`.
Imports inside functions count like all others, except in `cli`, which is meant to load the rest late.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"

PURE = ("core", "goodput", "applications", "policies", "scheduler", "forecast")
WORDLESS = ("core", "goodput", "policies", "scheduler")  # must not know whether their world is real
ENGINES = ("local", "ray", "slurm", "kubernetes")
BELOW_FACES = {*PURE, "wire", "simulator", "node", "providers", "service", "agent"}


@dataclass(frozen=True)
class Room:
    """What a room may import: other rooms, third-party packages, and both again inside functions only."""

    rooms: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    late_rooms: set[str] = field(default_factory=set)
    late_packages: set[str] = field(default_factory=set)


# A module belongs to the entry with the longest matching name: `providers.ray.client` to `providers.ray`.
ROOMS = {
    "": Room(),  # pollux/__init__.py
    "errors": Room(),
    "core": Room(),
    "goodput": Room({"core"}, {"numpy", "scipy", "numba"}),
    "applications": Room({"core", "goodput"}, {"numpy"}),
    "policies": Room({"core", "goodput"}, {"numpy", "scipy", "numba", "highspy"}),
    "scheduler": Room({"core", "policies"}),
    "forecast": Room({"core", "goodput", "policies", "scheduler"}, {"numpy"}),
    "wire": Room({"core"}, {"httpx"}),
    "simulator": Room(set(PURE), {"numpy", "scipy"}),
    "simulator.report": Room({*PURE, "simulator"}, {"numpy", "matplotlib"}),
    "node": Room({"core", "wire"}),
    "providers": Room({"core", "wire"}, late_rooms={"node"}),
    "providers.ray": Room({"core", "wire", "providers"}, {"ray"}, late_rooms={"node"}),
    "providers.kubernetes": Room({"core", "wire", "providers"}, {"kubernetes"}, late_rooms={"node"}),
    "service": Room({*PURE, "wire", "node", "providers"}, {"numpy", "starlette", "uvicorn", "httpx", "yaml"}),
    "agent": Room({"core", "goodput", "applications", "wire"}, {"numpy", "torch"}),
    "torch": Room({"agent"}),  # the public face of agent
    "cli": Room({"core", "wire"}, {"typer", "rich"}, BELOW_FACES | {"dashboard"}, {"numpy", "httpx", "yaml"}),
    "cli.plots": Room({"core", "goodput", "applications", "cli"}, {"numpy", "matplotlib"}),
    "dashboard": Room({"core", "wire"}),
    "testing": Room({*BELOW_FACES, "cli"}, {"numpy", "pytest", "hypothesis"}),
    # What jobs run: by its path, so that it finds what is beside it by its bare name.
    "testing.chaos.scripts": Room({*BELOW_FACES, "cli", "torch"}, {"torch", "nonsense"}),
}

# The libraries that must be loaded in one place only; sqlite3 is one of them although Python ships it.
HOMES = {
    "torch": {"agent", "testing.chaos.scripts"},
    "ray": {"providers.ray"},
    "kubernetes": {"providers.kubernetes"},
    "starlette": {"service"},
    "uvicorn": {"service"},
    "sqlite3": {"service"},
    "matplotlib": {"cli.plots", "simulator.report"},
}

# These hold whatever the table above says.
FORBIDDEN = {
    ("service", "simulator"),
    ("simulator", "service"),
    ("service", "agent"),
    ("agent", "scheduler"),
    ("agent", "policies"),
    ("policies", "forecast"),
    ("policies", "simulator"),
}

# Clocks, randomness, the environment, files and the terminal: they enter a pure room through arguments or not at all.
IMPURE = ("time", "random", "secrets", "os.environ", "os.environb", "os.getenv", "os.urandom", "os.open", "io.open")
IMPURE += ("uuid.uuid1", "uuid.uuid4", "logging.basicConfig")
IMPURE += tuple(f"datetime.{what}" for what in ("datetime.now", "datetime.utcnow", "datetime.today", "date.today"))
IO = {"open", "print", "input"}
FILE_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}
READS_CODE = {"pollux.goodput.compiled"}
"""Reads the source of what it compiles, to see whether that has changed."""
SAFE_RANDOM = {"Generator", "BitGenerator", "SeedSequence", "PCG64", "Philox", "SFC64"}


@dataclass(frozen=True)
class Import:
    """One imported module or name, by its full dotted name."""

    target: str
    line: int
    is_late: bool


def imports_of(module: str, tree: ast.Module, *, is_package: bool) -> Iterator[Import]:
    """Every import of a module. `from . import a` is resolved; `from x import y` gives x.y, a module or a name."""

    def visit(node: ast.AST, is_late: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names):
                for alias in names:
                    yield Import(alias.name, node.lineno, is_late)
            case ast.ImportFrom(name, names, level):
                parents = module.split(".") if is_package else module.split(".")[:-1]
                base = [*parents[: len(parents) - level + 1], *([name] if name else [])] if level else [name or ""]
                for alias in names:
                    yield Import(".".join([*base, alias.name]), node.lineno, is_late)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                is_late = True
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), body=body, orelse=rest):
                for child in body:
                    yield from visit(child, True)
                for child in rest:
                    yield from visit(child, is_late)
                return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_late)

    yield from visit(tree, False)


def room_of(module: str) -> str:
    """The longest entry of the table that a module of pollux falls under; its top folder where there is none."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in ROOMS:
            return name
    return parts[0] if parts else ""


def import_problems(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What a module imports and must not."""
    room, found = room_of(module), []
    if room not in ROOMS:
        return [f"{module}: the room {room!r} is not in the table of tests/test_layers.py"]
    for imported in imports_of(module, ast.parse(source), is_package=is_package):
        top = imported.target.split(".")[0]
        if problem := _room_problem(module, room, imported) if top == "pollux" else _package_problem(room, imported):
            found.append(f"{module}:{imported.line}: {problem}")
    return found


def _room_problem(module: str, room: str, imported: Import) -> str | None:
    if imported.target in ("pollux", "pollux.__version__"):
        return None  # the package itself holds nothing but its version
    other = room_of(imported.target)
    top, other_top = room.split(".")[0], other.split(".")[0]
    if (top, other_top) in FORBIDDEN:
        return f"{top} must never import {other_top}"
    if top == other_top == "providers":
        mine, theirs = ([*name.split("."), "", ""][2] for name in (module, imported.target))
        crosses = theirs in ENGINES and mine != theirs
        is_shared_and_late = mine not in ENGINES and imported.is_late  # a registry may load one by name
        return f"provider {mine} imports provider {theirs}" if crosses and not is_shared_and_late else None
    allowed = ROOMS[room].rooms | (ROOMS[room].late_rooms if imported.is_late else set())
    if other_top in {top, "errors"} or other_top in allowed:
        return None
    when = " at import time" if other_top in ROOMS[room].late_rooms else ""
    return f"{room or 'pollux'} must not import {other}{when}"


def _package_problem(room: str, imported: Import) -> str | None:
    package = imported.target.split(".")[0]
    if package in HOMES and room not in HOMES[package]:
        return f"{package} belongs in {' or '.join(sorted(HOMES[package]))} only"
    if package in sys.stdlib_module_names:
        return None
    if package in ROOMS[room].packages or (imported.is_late and package in ROOMS[room].late_packages):
        return None
    when = " at import time" if package in ROOMS[room].late_packages else ""
    return f"{room or 'pollux'} must not import the package {package}{when}"


def purity_problems(module: str, source: str) -> list[str]:
    """Where a pure module reads a clock, a global random source, the environment, a file or the terminal."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: _known_as(alias) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    seeded = {id(call.func) for call in calls if call.args or call.keywords}
    found = {call.lineno: call.func.id for call in calls if isinstance(call.func, ast.Name) and call.func.id in IO}

    reads_files = room_of(module) == "applications" or module in READS_CODE
    for node in ast.walk(tree):
        dotted = _dotted(node, names)
        if dotted and any(dotted == bad or dotted.startswith(f"{bad}.") for bad in IMPURE):
            found.setdefault(node.lineno, dotted)
        elif dotted and dotted.startswith("numpy.random."):
            what = dotted.split(".")[2]
            if what not in SAFE_RANDOM and not (what == "default_rng" and id(node) in seeded):
                found.setdefault(node.lineno, f"{dotted} without a seed")
        elif isinstance(node, ast.Attribute) and node.attr in FILE_METHODS and not reads_files:
            found.setdefault(node.lineno, f".{node.attr}")
    return [f"{module}:{line}: {what} in a pure room" for line, what in sorted(found.items())]


def _known_as(alias: ast.alias) -> str:
    return alias.name if alias.asname else alias.name.split(".")[0]


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """`np.random.rand` → numpy.random.rand, with the names that the module imported; None for other expressions."""
    match node:
        case ast.Name(id, ast.Load()):
            return names.get(id)
        case ast.Attribute(value, attr):
            base = _dotted(value, names)
            return f"{base}.{attr}" if base else None
    return None


def modules() -> dict[str, Path]:
    """Every module of src/pollux by its dotted name."""
    found = {}
    for path in sorted((SRC / "pollux").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_every_module_imports_only_what_its_room_may() -> None:
    problems = [
        problem
        for module, path in modules().items()
        for problem in import_problems(module, path.read_text("utf-8"), is_package=path.name == "__init__.py")
    ]
    assert not problems, "\n".join(problems)


def test_pure_rooms_read_no_clock_no_chance_no_environment_no_file() -> None:
    problems = [
        problem
        for module, path in modules().items()
        if room_of(module).split(".")[0] in PURE
        for problem in purity_problems(module, path.read_text("utf-8"))
    ]
    assert not problems, "\n".join(problems)


def test_the_middle_does_not_know_the_word_simulate() -> None:
    told = [
        f"{module}:{number}: {line.strip()}"
        for module, path in modules().items()
        if room_of(module).split(".")[0] in WORDLESS
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if "simulat" in line.lower()
    ]
    assert not told, "\n".join(told)


@pytest.mark.parametrize("module", ["pollux", "pollux.errors", "pollux.core"])
def test_importing_it_loads_no_third_party_module(module: str) -> None:
    script = (
        "import sys; before = set(sys.modules)\n"
        f"import {module}\n"
        "tops = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*(tops - sys.stdlib_module_names - {'pollux'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


class TestTheTable:
    def test_has_no_cycle(self) -> None:
        graph = {
            name: {other for other in room.rooms if other.split(".")[0] != name.split(".")[0]}
            for name, room in ROOMS.items()
        }
        TopologicalSorter(graph).prepare()

    def test_allows_no_forbidden_pair(self) -> None:
        allowed = {
            (name.split(".")[0], other) for name, room in ROOMS.items() for other in room.rooms | room.late_rooms
        }
        assert not allowed & FORBIDDEN

    def test_gives_each_heavy_library_to_its_home_only(self) -> None:
        for name, room in ROOMS.items():
            for package in (room.packages | room.late_packages) & HOMES.keys():
                assert name in HOMES[package]


class TestTheChecker:
    """Each planted violation is found; each legal line is let through."""

    @pytest.mark.parametrize(
        ("module", "line"),
        [
            ("pollux", "import numpy"),
            ("pollux.errors", "from pollux.core import ids"),
            ("pollux.core.job", "import numpy as np"),
            ("pollux.core.job", "from pollux.goodput import fit"),
            ("pollux.core.job", "from ..goodput import fit"),
            ("pollux.core.job", "from .. import goodput"),
            ("pollux.core.job", "def f():\n    import numpy"),
            ("pollux.goodput.fit", "import torch"),
            ("pollux.goodput.fit", "from pollux.policies.base import Policy"),
            ("pollux.goodput.fit", "if TYPE_CHECKING:\n    from pollux.policies.base import Policy"),
            ("pollux.policies.base", "from pollux import forecast"),
            ("pollux.policies.base", "def f():\n    from pollux.forecast import eta"),
            ("pollux.scheduler.state", "import pollux.simulator.world"),
            ("pollux.service.driver", "from pollux.simulator import world"),
            ("pollux.service.driver", "def f():\n    import pollux.simulator"),
            ("pollux.service.driver", "import pollux.agent"),
            ("pollux.service.driver", "import torch"),
            ("pollux.simulator.world", "import pollux.service"),
            ("pollux.simulator.world", "import matplotlib.pyplot as plt"),
            ("pollux.agent.loop", "from pollux.scheduler import state"),
            ("pollux.agent.loop", "from pollux.policies import fifo"),
            ("pollux.providers.local", "from pollux.providers import ray"),
            ("pollux.providers.slurm.pilot", "from ..local import start"),
            ("pollux.providers.registry", "from pollux.providers import local"),
            ("pollux.providers.local", "import ray"),
            ("pollux.providers.ray", "import kubernetes"),
            ("pollux.node.daemon", "import sqlite3"),
            ("pollux.node.daemon", "import starlette"),
            ("pollux.cli.profile", "import numpy"),
            ("pollux.cli.profile", "from pollux.goodput import fit"),
            ("pollux.cli.profile", "def f():\n    import matplotlib"),
            ("pollux.cli.profile", "def f():\n    import torch"),
            ("pollux.attic.old", "import json"),
        ],
    )
    def test_finds_a_forbidden_import(self, module: str, line: str) -> None:
        assert len(import_problems(module, line)) == 1

    @pytest.mark.parametrize(
        ("module", "line"),
        [
            ("pollux.core.job", "import dataclasses, json\nfrom pollux.errors import InvalidSpec\nfrom . import ids"),
            ("pollux.goodput.fit", "import numpy as np\nfrom scipy.optimize import minimize\nfrom ..core import model"),
            ("pollux.scheduler.state", "from pollux.policies.base import Policy"),
            ("pollux.simulator.report", "import matplotlib"),
            ("pollux.providers.ray", "import ray\nfrom pollux.providers.base import Provider"),
            ("pollux.providers.registry", "def f():\n    from pollux.providers import local"),
            ("pollux.service.store", "import sqlite3"),
            ("pollux.agent.loop", "import torch"),
            ("pollux.torch", "from pollux.agent import prepare"),
            ("pollux.cli.main", "import typer\nfrom pollux import __version__\nfrom pollux.cli import output"),
            ("pollux.cli.profile", "def f():\n    import numpy\n    from pollux.goodput import fit"),
            ("pollux.cli.profile", "if TYPE_CHECKING:\n    from pollux.goodput import Fit"),
            ("pollux.cli.plots", "import matplotlib\nfrom pollux.goodput import fit"),
        ],
    )
    def test_lets_a_legal_import_through(self, module: str, line: str) -> None:
        assert import_problems(module, line) == []

    def test_resolves_relative_imports_of_a_package(self) -> None:
        assert import_problems("pollux.core", "from .job import Job", is_package=True) == []
        assert import_problems("pollux.core", "from ..goodput import fit", is_package=True) != []

    @pytest.mark.parametrize(
        "line",
        [
            "import time\nx = time.time()",
            "from time import monotonic\nx = monotonic()",
            "from time import perf_counter as tick\nx = tick()",
            "import random\nx = random.random()",
            "from random import Random\nx = Random()",
            "import numpy as np\nx = np.random.rand(3)",
            "import numpy\nnumpy.random.seed(0)",
            "from numpy import random\nx = random.normal()",
            "from numpy.random import rand\nx = rand(3)",
            "import numpy as np\nrng = np.random.default_rng()",
            "import numpy as np\nmake = np.random.default_rng",
            "import os\nx = os.environ['HOME']",
            "from os import environ\nx = environ.get('HOME')",
            "import os\nx = os.getenv('HOME')",
            "x = open('f')",
            "print('x')",
            "from datetime import datetime\nx = datetime.now()",
            "import datetime\nx = datetime.datetime.now()",
            "from pathlib import Path\nx = Path('f').read_text()",
            "import logging\nlogging.basicConfig()",
        ],
    )
    def test_finds_impurity(self, line: str) -> None:
        assert len(purity_problems("pollux.policies.fifo", line)) == 1

    @pytest.mark.parametrize(
        "line",
        [
            "import numpy as np\ndef f(rng: np.random.Generator): return rng.random()",
            "import numpy as np\nrng = np.random.default_rng(3)",
            "import datetime\nx = datetime.timedelta(seconds=1)",
            "import logging\nlog = logging.getLogger(__name__)",
            "def f(time): return time + 1",
            "valve.open()",
            "def f(input): return input + 1",
        ],
    )
    def test_lets_purity_through(self, line: str) -> None:
        assert purity_problems("pollux.policies.fifo", line) == []

    def test_applications_may_read_their_packaged_data(self) -> None:
        line = "from importlib.resources import files\nx = files('pollux').joinpath('a.json').read_text()"
        assert purity_problems("pollux.applications", line) == []
        assert purity_problems("pollux.goodput.fit", line) != []
