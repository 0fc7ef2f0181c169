"""Figures of matplotlib as bytes: PNG for slides, SVG that is part of a page and takes its colours and its font."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pollux.simulator.report.style import VARIABLES, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 144
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
"""A date would make equal reports differ."""


def png(figure: Figure) -> bytes:
    return _saved(figure, "png", {"Software": None}, ground="white")


def inline(figure: Figure, name: str, alt: str) -> str:
    """An `<svg>` element. Its ids begin with `name`, because all figures of a page share one space of ids."""
    text = _saved(figure, "svg", _NO_METADATA).decode()
    text = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<svg\b[^>]*>", lambda match: _opening(match.group(), alt), text, count=1)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", text)
    text = re.sub(r"#[0-9a-f]{6}\b", _variable, text)
    return re.sub(r"\n\s*", "\n", text).strip()


def _saved(figure: Figure, kind: str, metadata: Mapping[str, None], ground: str = "none") -> bytes:
    stream = io.BytesIO()
    with styled(), warnings.catch_warnings():
        # A name in letters that matplotlib's font lacks: boxes in the PNG, the browser's own font on the page.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        if (engine := figure.get_layout_engine()) is not None:
            engine.execute(figure)
            figure.set_layout_engine("none")  # once for all formats: it takes longer than drawing
        figure.savefig(stream, format=kind, dpi=DPI, metadata=metadata, facecolor=ground)
    return stream.getvalue()


def _opening(tag: str, alt: str) -> str:
    view_box = re.search(r'viewBox="[^"]*"', tag)
    assert view_box is not None
    return f'<svg {view_box.group()} role="img" aria-label="{alt}">'


def _variable(match: re.Match[str]) -> str:
    name = VARIABLES.get(match.group())
    return f"var(--{name})" if name else match.group()
