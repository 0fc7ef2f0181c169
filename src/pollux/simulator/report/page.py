"""A page of sections: text, figures and tables as one HTML file that needs nothing but itself.

Knows nothing about simulations. All text is escaped here; what is markup already says so by being a `Markup`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from pollux.simulator.report import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a browser may load: nothing from anywhere. Also a promise to whoever opens a page of somebody else's."""

PICTURES = "pollux-pictures"
"""What a page calls the list of its pictures, for whoever writes the next one into its folder."""
_NUMBER = ' class="n"'


class Markup(str):
    """HTML that is safe to show as it is."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with what a reader who cannot see it is told."""

    name: str
    """Of its PNG, without the ending: small letters, digits and hyphens, unique on the page."""
    figure: Figure
    alt: str
    caption: str = ""
    is_small: bool = False
    """Stands beside others where there is room."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What a table shows at one place, and what it is sorted by if not by its text."""

    text: str
    key: float | str | None = None
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings that sort them when clicked. Numbers and `Cell`s with a number stand to the right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell | str | float | None]]
    title: str = ""
    is_folded: bool = False
    """Shown only when its title is clicked."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str | Sequence[str] = ()
    """One paragraph, or several; `Markup` is taken as it is."""
    figures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()


def render(title: str, sections: Sequence[Section]) -> str:
    """The whole page. Equal arguments give equal bytes."""
    assets = files("pollux.simulator.report")
    style, script = (assets.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    named = [(_id(section.title, index), section) for index, section in enumerate(sections)]
    links = "".join(f'<a href="#{name}">{escape(section.title)}</a>' for name, section in named)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta name="{PICTURES}" content="{escape(_pictures(sections))}">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            f"<header><h1>{escape(title)}</h1><nav>{links}</nav></header>\n<main>",
            *(_section(section, name) for name, section in named),
            f"</main>\n<script>\n{script}</script>\n</body>\n</html>\n",
        ]
    )


def pictures_of(page: str) -> list[str]:
    """The names of the pictures of a page that was rendered here; of any other page, none."""
    found = re.search(f'<meta name="{PICTURES}" content="([^"]*)">', page.partition("</head>")[0])
    return [name for name in found.group(1).split() if re.fullmatch("[a-z0-9-]+", name)] if found else []


def _pictures(sections: Sequence[Section]) -> str:
    return " ".join(picture.name for section in sections for picture in section.figures)


def _id(title: str, index: int) -> str:
    return f"{index}-{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}"


def _section(section: Section, name: str) -> str:
    small = "".join(map(_picture, (picture for picture in section.figures if picture.is_small)))
    wide = "".join(map(_picture, (picture for picture in section.figures if not picture.is_small)))
    return "\n".join(
        [
            f'<section id="{name}"><h2>{escape(section.title)}</h2>',
            _paragraphs(section.text),
            wide,
            f'<div class="pair">{small}</div>' if small else "",
            *map(_table, section.tables),
            "</section>",
        ]
    )


def _paragraphs(text: str | Sequence[str]) -> str:
    paragraphs = [text] if isinstance(text, str) else text
    return "".join(part if isinstance(part, Markup) else f"<p>{escape(part)}</p>" for part in paragraphs if part)


def _picture(picture: Picture) -> str:
    drawing = svg.inline(picture.figure, picture.name, escape(picture.alt))
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    # A wide one can be chosen, by a tap or a key: on a narrow screen that shows it in full size (page.css).
    focus = "" if picture.is_small else ' tabindex="0"'
    return f"<figure{focus}>{drawing}{caption}</figure>\n"


def _table(table: Table) -> str:
    rows = [[_as_cell(value) for value in row] for row in table.rows]
    is_number = [any(isinstance(row[column].key, int | float) for row in rows) for column in range(len(table.headings))]
    head = "".join(
        f'<th scope="col"{_NUMBER if right else ""}><button type="button">{escape(heading)}</button></th>'
        for heading, right in zip(table.headings, is_number, strict=True)
    )
    body = "\n".join(f"<tr>{''.join(map(_cell, row, is_number))}</tr>" for row in rows)
    grid = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    if table.is_folded:
        return f"<details><summary>{escape(table.title)}</summary>{grid}</details>"
    return f"<h3>{escape(table.title)}</h3>{grid}" if table.title else grid


def _as_cell(value: Cell | str | float | None) -> Cell:
    match value:
        case Cell():
            return value
        case str():
            return Cell(value)
        case None:
            return Cell("–")
        case int():
            return Cell(f"{value:,}", value)
    return Cell(f"{value:,.4g}", value)


def _cell(cell: Cell, is_number: bool) -> str:
    text = cell.text if isinstance(cell.text, Markup) else escape(cell.text)
    text = f"<b>{text}</b>" if cell.is_best else text
    key = f"{cell.key:.9g}" if isinstance(cell.key, int | float) else cell.key
    sorted_by = "" if key is None else f' data-key="{escape(key)}"'
    return f"<td{_NUMBER if is_number else ''}{sorted_by}>{text}</td>"
