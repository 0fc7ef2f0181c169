"""Colours, and figures that all look alike. The only place of the report that imports matplotlib.

A page shows figures on light and on dark ground, so the colours below are names as much as colours: `svg.py` swaps each
of them for a variable of `page.css`, which has a value for either ground. PNGs show them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pollux.errors import MissingDependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, GROUND = "#1c232b", "#5f6b78", "#d3d8de", "#fefefe"
SERIES = ("#0b6bb5", "#d55e00", "#00835f", "#b0508f", "#a07800", "#5b6470", "#8c2d2d", "#4b3fa0")
"""One for each policy, in the order of their appearance. Told apart with every common colour blindness."""
APPLICATIONS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#e08a3c")
VARIABLES: Mapping[str, str] = {
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    GROUND: "ground",
    **{colour: f"series-{index}" for index, colour in enumerate(SERIES)},
    **{colour: f"application-{index}" for index, colour in enumerate(APPLICATIONS)},
}
"""The variable of `page.css` that stands for each colour."""

WIDE, SMALL = (10.0, 4.2), (5.4, 3.1)
"""Inches: figures that take the width of the page, and those of which two stand side by side."""
_RC: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.prop_cycle": f"cycler('color', {list(SERIES)})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": "none",
    "font.size": 9,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.borderpad": 0.0,
    "legend.columnspacing": 1.4,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "pollux",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def require_matplotlib() -> None:
    """Say what is missing before any work is done."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependency("matplotlib", "a report", "plot") from error


@contextmanager
def styled() -> Iterator[None]:
    """What is drawn or saved inside looks as ours do; nobody else's settings are touched."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def new_figure(size: tuple[float, float], rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with so many panels below each other that share the x axis. Call it inside `styled`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, list(grid[:, 0])


def legend(figure: Figure, axes: Axes, most_columns: int = 6) -> None:
    """Below the panels, where it hides no line; one line alone needs none."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, labels, loc="outside lower left", ncols=min(len(handles), most_columns))


def plain_log_ticks(axes: Axes, which: str, places: Sequence[float] = ()) -> None:
    """A logarithmic x or y axis with plain numbers: at these places, else at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    if places:
        axis.set_major_locator(FixedLocator(places))
    else:
        if high < 4 * low:  # else there might be no such number between them
            low, high = low / 2, high * 2
            axes.set(**{f"{which}lim": (low, high)})
        axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0) if high / low < 1e4 else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axis.set_minor_locator(NullLocator())


def whole_ticks(axes: Axes) -> None:
    """For what is counted: no half GPUs."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def colours(names: Iterable[str], palette: tuple[str, ...] = SERIES) -> dict[str, str]:
    """A colour for each distinct name, in their order; more names than colours begin anew."""
    return {name: palette[index % len(palette)] for index, name in enumerate(dict.fromkeys(names))}


def shades(colour: str, count: int) -> list[str]:
    """Neighbours that can be told apart and still are of one colour."""
    from matplotlib.colors import to_hex, to_rgb

    mixes = ((0.0, 1.0), (0.30, 1.0), (0.14, 0.0), (0.46, 1.0))
    mixed = []
    for index in range(count):
        share, towards = mixes[index % len(mixes)]
        red, green, blue = ((1 - share) * part + share * towards for part in to_rgb(colour))
        mixed.append(to_hex((red, green, blue)))
    return mixed


def plain(text: str) -> str:
    """A name as matplotlib shows it letter by letter: it takes `$` for mathematics, and hides what begins with `_`."""
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text
