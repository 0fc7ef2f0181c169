"""The one door to numba: `@compiled` functions run as machine code, or as plain Python where numba is not installed.

Plain Python gives the same answers; a fit then takes about 18 ms instead of 0.5, one best (m, s) 63 µs instead of 10.
numba is imported by the first call, not before: it costs 0.25 s, and many programs never call. Compiled code is kept
on disk, so only the first call on a machine pays for compiling. Measured reasons for numba:
docs/decisions/0002-numba.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])

if TYPE_CHECKING:

    def compiled(function: Function) -> Function: ...
    def interpreted() -> AbstractContextManager[None]: ...

else:
    import contextlib
    import functools
    import importlib.util
    import threading

    _lock = threading.Lock()
    _thread = threading.local()

    @contextlib.contextmanager
    def interpreted():
        """Inside, this thread neither loads numba nor compiles: for a process that fits once in half a minute beside
        its real work, 18 ms each time are less than one start of the compiler. What is machine code already stays so.
        """
        before, _thread.is_interpreted = getattr(_thread, "is_interpreted", False), True
        try:
            yield
        finally:
            _thread.is_interpreted = before

    class _CompiledLater:
        """A function that becomes machine code at its first call, from whichever thread.

        Compiled functions may call one another, imported by name or not: numba is told to see the machine code in it.
        """

        def __init__(self, function):
            functools.update_wrapper(self, function)
            self.py_func = function  # as numba's own dispatchers call it
            self._dispatcher = None

        def __call__(self, *args):
            if self._dispatcher is None and getattr(_thread, "is_interpreted", False):
                return self.py_func(*args)
            return (self._dispatcher or self.dispatcher())(*args)

        def dispatcher(self):
            with _lock:
                if self._dispatcher is None:
                    self._dispatcher = _machine_code()(self.py_func)
                    # Whoever asks the module for it is spared the detour of 0.3 µs from now on.
                    self.py_func.__globals__[self.__name__] = self._dispatcher
                return self._dispatcher

    @functools.cache
    def _machine_code():
        """What turns a function into machine code; numba is imported here."""
        try:
            import numba
        except ImportError:  # installed, but broken
            return lambda function: function

        @numba.extending.typeof_impl.register(_CompiledLater)
        def _typeof(value, context):
            return numba.extending.typeof_impl(value.dispatcher(), context)

        def machine_code(function):
            # nogil: an agent fits beside its training thread. error_model: division by zero gives inf, as in NumPy.
            options = {"nogil": True, "error_model": "numpy"}
            try:
                return numba.njit(cache=True, **options)(function)
            except RuntimeError:  # nowhere to keep compiled code: a read-only installation without a home
                return numba.njit(**options)(function)

        return machine_code

    def compiled(function):
        return function if importlib.util.find_spec("numba") is None else _CompiledLater(function)
