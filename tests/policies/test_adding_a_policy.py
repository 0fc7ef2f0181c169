"""What docs/adding-a-policy.md shows is true: the policy runs, keeps the contract, and its test passes."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding-a-policy.md"

_shown: dict[str, object] = {"__name__": __name__}
for _block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL):
    exec(compile(_block, DOCUMENT.name, "exec"), _shown)

TestSmallestFirst = _shown["TestSmallestFirst"]
test_a_large_job_is_not_passed_by_for_ever = _shown["test_a_large_job_is_not_passed_by_for_ever"]


def test_it_shows_every_function_of_packing_under_its_name():
    from pollux.policies import packing

    table = DOCUMENT.read_text(encoding="utf-8").split("### What `packing` does for you")[1].split("\n## ")[0]
    for name in re.findall(r"`(\w+)\(", "\n".join(line for line in table.splitlines() if line.startswith("| `"))):
        assert hasattr(packing, name) or hasattr(packing.Free, name), name
