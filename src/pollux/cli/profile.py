"""`pollux profile`: fit, show and plot goodput models."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Fit, show and plot goodput models.")
