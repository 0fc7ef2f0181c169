"""What readers of files are asked alike: that they refuse a file, and with which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pollux.errors import InvalidDocument


def refusing(read: Callable[..., object], kind: str, stem: str) -> Callable[..., str]:
    """As `read`, but for files that must be refused as a `kind` under their name: it returns the message."""

    def refused(*arguments: object) -> str:
        with pytest.raises(InvalidDocument) as caught:
            read(*arguments)
        assert caught.value.field == kind
        assert Path(str(caught.value.value)).stem == stem
        return str(caught.value)

    return refused
