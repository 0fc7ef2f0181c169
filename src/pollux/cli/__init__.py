"""The command line: `pollux …`.

Thin: a command reads its arguments, calls one of the rooms and prints the answer through `output`. Importing a module
of this room loads typer, rich and the standard library only; numpy, scipy and the rest are imported inside the
functions that need them, so that `pollux --help` answers at once.
"""
