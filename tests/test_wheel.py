"""The built wheel, installed away from the checkout: what users get. Needs no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from pollux import __version__

ROOT = Path(__file__).resolve().parents[1]

# Packages that a room of their own may miss; the layer test sees to it that no other room asks for them.
OPTIONAL = ("torch", "ray", "kubernetes", "starlette", "uvicorn", "httpx", "yaml")

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Installed:
    """A wheel and the folder that it was installed into, with an empty working directory beside it."""

    wheel: Path
    folder: Path
    elsewhere: Path

    def run(self, *command: str | Path) -> str:
        """Standard output of a command that sees the installed package before any other."""
        kept = {name: value for name, value in os.environ.items() if name not in ("POLLUX_DATA", "POLLUX_DEBUG")}
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.elsewhere,
            env={**kept, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("wheel")
    _must(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", base / "dist", ROOT)
    (wheel,) = (base / "dist").glob("*.whl")
    _must(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", base / "site", wheel
    )
    (base / "elsewhere").mkdir()
    return Installed(wheel, base / "site", base / "elsewhere")


def _must(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_imports_from_where_it_was_installed(installed: Installed) -> None:
    location = installed.run(sys.executable, "-c", "import pollux; print(pollux.__file__)").strip()
    assert Path(location) == installed.folder / "pollux" / "__init__.py"


def test_its_script_knows_its_version(installed: Installed) -> None:
    assert installed.run(installed.folder / "bin" / "pollux", "--version") == f"pollux {__version__}\n"


def test_its_doctor_is_content(installed: Installed) -> None:
    answer = json.loads(installed.run(installed.folder / "bin" / "pollux", "doctor", "--json"))
    assert answer["ok"] is True


def test_every_module_of_it_imports(installed: Installed) -> None:
    script = (
        "import importlib, pkgutil, pollux\n"
        "for module in pkgutil.walk_packages(pollux.__path__, 'pollux.', onerror=lambda name: None):\n"
        "    try:\n"
        "        importlib.import_module(module.name)\n"
        "    except ImportError as missing:\n"
        f"        if (missing.name or '').split('.')[0] not in {OPTIONAL!r}: raise\n"
    )
    installed.run(sys.executable, "-W", "error", "-c", script)


def test_it_holds_the_whole_package_and_nothing_else(installed: Installed) -> None:
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "pollux").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    expected |= {f"pollux/examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert "pollux/py.typed" in expected
    with zipfile.ZipFile(installed.wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = {name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
    assert packed == expected
    assert "licenses/LICENSE" in metadata
