"""A fingerprint changes with the code that a script runs, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.core import JobId
from pollux.errors import InvalidSpec
from pollux.node.fingerprint import fingerprint
from pollux.wire.nodes import Launch

FILES = {
    "train.py": "import model\nfrom data import reader\nimport numpy\ndef late():\n    import rarely\n",
    "model.py": "import layers.dense\n",
    "layers/__init__.py": "",
    "layers/dense.py": "from .parts import bias\nfrom .. import odd\n",
    "layers/parts/__init__.py": "",
    "layers/parts/bias.py": "import model\n",
    "data/reader.py": "",
    "rarely.py": "not python at all (\n",
    "odd.py": "",
    "beside.py": "",
    "notes.txt": "",
}


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Launch(JobId("job"), str(tmp_path / "train.py"))


def test_the_same_code_has_the_same_fingerprint(launch: Launch) -> None:
    first = fingerprint(launch)
    assert first == fingerprint(launch) == fingerprint(Launch(JobId("other"), launch.script, ("--more",)))
    assert len(first) == 64


@pytest.mark.parametrize("name", sorted(set(FILES) - {"beside.py", "notes.txt"}))
def test_a_change_of_any_module_that_the_script_runs_changes_it(launch: Launch, name: str) -> None:
    before = fingerprint(launch)
    path = Path(launch.script).parent / name
    path.write_text(f"{path.read_text()}# changed\n")
    assert fingerprint(launch) != before


@pytest.mark.parametrize("name", ["beside.py", "notes.txt"])
def test_files_that_the_script_does_not_import_do_not_count(launch: Launch, name: str) -> None:
    before = fingerprint(launch)
    (Path(launch.script).parent / name).write_text("changed")
    assert fingerprint(launch) == before


def test_a_module_that_appears_or_moves_changes_it(launch: Launch) -> None:
    folder = Path(launch.script).parent
    before = fingerprint(launch)
    (folder / "numpy.py").write_text("")
    with_numpy = fingerprint(launch)
    (folder / "numpy.py").rename(folder / "data" / "__init__.py")
    assert len({before, with_numpy, fingerprint(launch)}) == 3


def test_a_change_back_brings_the_old_one_back(launch: Launch) -> None:
    model = Path(launch.script).parent / "model.py"
    before, text = fingerprint(launch), model.read_text()
    model.write_text("import odd\n")
    assert fingerprint(launch) != before
    model.write_text(text)
    assert fingerprint(launch) == before


def test_the_folder_of_a_linked_script_is_that_of_the_script_itself(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "run.py"
    link.symlink_to(launch.script)
    assert fingerprint(Launch(JobId("job"), str(link))) == fingerprint(launch)


def test_a_script_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="absent"):
        fingerprint(Launch(JobId("job"), str(tmp_path / "absent.py")))
