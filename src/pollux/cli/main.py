"""The `pollux` command: its global options, and what a failure looks like.

Exit codes: 0 done · 1 failed · 2 wrong input (as for a wrong option) · 70 a bug in Pollux · 130 Ctrl-C; `run` and
`wait` end as the job did (see `jobs.exit_code`).
"""

from __future__ import annotations

import os
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pollux import __version__
from pollux.cli import output
from pollux.cli.commands import COMMANDS, Commands
from pollux.errors import InvalidInput, PolluxError, Refusal, Temporary

FAILED = 1
INVALID_INPUT = 2
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
UNAUTHORIZED = 401
NOT_FOUND = 404
WRONG_REQUESTS = (400, 404, 422)
"""What the service answers to wrong input."""
WRONG_COPY = (
    "The service does not take this token. Copy the file token of the cluster's folder again, "
    "and name the copy by POLLUX_TOKEN_FILE."
)
WRONG_TOKEN = (
    "The service does not take the token in the cluster's folder: the file was changed since it started. "
    "Put the old one back."
)
UNREACHABLE = (
    "See that POLLUX_URL is right, that the cluster runs there (pollux up) and that a tunnel to it is open; "
    "unset POLLUX_URL to use a cluster on this machine."
)


class PolluxGroup(TyperGroup):
    """The root group: turns exceptions into one line and an exit code; with `--debug`, into a traceback before it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException):
            raise  # typer's own: wrong usage, an early end
        except KeyboardInterrupt:
            output.note("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as failure:
            if isinstance(failure, BrokenPipeError):
                raise  # `pollux … | head`: typer ends quietly
            raise typer.Exit(_report(failure, ctx.params["debug"])) from None


class PolluxRoot(PolluxGroup):
    """That of the `pollux` command, with all of its commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands(COMMANDS)


def _report(failure: Exception, debug: bool) -> int:
    """Say what went wrong and return the exit code, which `--debug` does not change."""
    if debug:
        output.note(traceback.format_exc().rstrip())
    match failure:
        case InvalidInput():
            output.error(str(failure))
            return INVALID_INPUT
        case Refusal(status=status):
            output.error(_refusal(failure))
            return INVALID_INPUT if status in WRONG_REQUESTS else FAILED
        case Temporary():
            fix = f" {UNREACHABLE}" if os.environ.get("POLLUX_URL") else ""
            output.error(f"{failure.args[0]}{fix}")  # nobody tries again here
            return FAILED
        case PolluxError():
            output.error(str(failure))
            return FAILED
        case OSError():  # a full disk, a lost connection: the machine's, not ours
            output.error(f"{failure}" if debug else f"{failure} (where: pollux --debug …)")
            return FAILED
    what = " ".join(f"{type(failure).__name__}: {failure}".split())
    advice = "this is a bug" if debug else "this is a bug, run again with --debug (pollux --debug …) and report it"
    output.error(f"{what} ({advice})")
    return BUG


def _refusal(failure: Refusal) -> str:
    """What the service says, as far as it helps somebody at a terminal."""
    if failure.status == UNAUTHORIZED:
        return WRONG_COPY if os.environ.get("POLLUX_URL") else WRONG_TOKEN
    if failure.status == NOT_FOUND and failure.detail.startswith("job "):
        return f"{failure} pollux ps -a shows jobs that have ended, too."
    return str(failure)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pollux {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=PolluxRoot,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar="POLLUX_DEBUG", help="Show tracebacks of errors.")] = False,
) -> None:
    """Co-adaptive cluster scheduling for deep learning: GPUs, batch sizes and learning rates tuned for goodput."""


def main() -> None:
    """Entry point of the `pollux` script."""
    app(prog_name="pollux")


if __name__ == "__main__":
    main()
