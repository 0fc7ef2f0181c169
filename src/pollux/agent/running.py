"""A replica: one run of the user's script, in a process that was forked with torch loaded.

What the script sees and how it ends are as with `python script.py`. Without torch installed this still works.
"""

from __future__ import annotations

import io
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

from pollux.agent.environment import take_credentials


def main(script: str) -> None:
    """Run the script as `__main__`, where environment, directory, `sys.argv` and `sys.path` are set. Call it once.

    Exceptions are left to the interpreter, which prints them and turns them into an exit code when the caller lets
    them through; the traceback begins with the script.
    """
    take_credentials()
    _set_threads(os.environ.get("OMP_NUM_THREADS", ""))
    _seed_numpy()
    try:
        with io.open_code(os.path.abspath(script)) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"pollux: cannot open the script {script!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    # By hand, not by runpy: that takes `__main__` away again before threads and atexit handlers have ended.
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=script, __cached__=None, __package__=None, __loader__=SourceFileLoader("__main__", script)
    )
    module.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = module
    try:
        exec(compile(source, script, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        hook = sys.excepthook

        def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            trace = _of_script(trace)
            hook(kind, error.with_traceback(trace), trace)

        sys.excepthook = told
        raise


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that led to the script."""
    while trace is not None and trace.tb_frame.f_code is not main.__code__:
        trace = trace.tb_next
    return None if trace is None else trace.tb_next


def _set_threads(wanted: str) -> None:
    """torch read OMP_NUM_THREADS when it was loaded, which was in another environment."""
    torch: Any = sys.modules.get("torch")
    first = wanted.split(",")[0].strip()
    if torch is not None and first.isdecimal() and int(first) > 0:
        torch.set_num_threads(int(first))


def _seed_numpy() -> None:
    """Forked processes would all draw the same numbers. `random` takes care of that itself; torch's seed is fixed."""
    random: Any = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
