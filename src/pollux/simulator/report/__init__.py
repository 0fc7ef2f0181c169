"""Reports of simulations: one HTML page that needs nothing but itself, with its figures as PNG and its data as JSON.

`write_report` does all of it. A study brings sections of its own (`Section`, `Picture`, `Table`, `line_figure`), or
writes a page of nothing else with `write_page`. Needs matplotlib, which is the extra `plot`.
"""

from pollux.simulator.report.history_figures import coadaptation_figure, gpus_figure
from pollux.simulator.report.line_figures import cluster_figures, jct_figure, line_figure, rho_figure
from pollux.simulator.report.page import Cell, Markup, Picture, Section, Table, render
from pollux.simulator.report.style import require_matplotlib
from pollux.simulator.report.writing import write_page, write_report

__all__ = [
    "Cell",
    "Markup",
    "Picture",
    "Section",
    "Table",
    "cluster_figures",
    "coadaptation_figure",
    "gpus_figure",
    "jct_figure",
    "line_figure",
    "render",
    "require_matplotlib",
    "rho_figure",
    "write_page",
    "write_report",
]
