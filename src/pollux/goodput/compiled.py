"""The one door to numba: `@compiled` and `@lean` functions run as machine code, or as plain Python without numba.

Plain Python gives the same answers; a fit then takes about 18 ms instead of 0.5, one best (m, s) 63 µs instead of 10.
numba is imported by the first call, not before: it costs 0.25 s, and many programs never call. Compiled code is kept
on disk, so only the first call on a machine pays for compiling, and the first after a change to a function or to
anything of ours that it is made of. Measured reasons for numba: docs/decisions/0002-numba.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])

if TYPE_CHECKING:

    def compiled(function: Function) -> Function: ...
    def lean(function: Function) -> Function: ...
    def interpreted() -> AbstractContextManager[None]: ...

else:
    import contextlib
    import functools
    import hashlib
    import importlib.util
    import re
    import sys
    import threading
    from pathlib import Path

    from pollux.goodput.lone_extension import load_alone

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

        def __init__(self, function, **options):
            functools.update_wrapper(self, function)
            self.py_func = function  # as numba's own dispatchers call it
            self._options = options
            self._dispatcher = None

        def __call__(self, *args):
            if self._dispatcher is None and getattr(_thread, "is_interpreted", False):
                return self.py_func(*args)
            return (self._dispatcher or self.dispatcher())(*args)

        def dispatcher(self):
            with _lock:
                if self._dispatcher is None:
                    self._dispatcher = _machine_code()(self.py_func, **self._options)
                    # Whoever asks the module for it is spared the detour of 0.3 µs from now on.
                    self.py_func.__globals__[self.__name__] = self._dispatcher
                return self._dispatcher

    @functools.cache
    def _machine_code():
        """What turns a function into machine code; numba is imported here."""
        try:
            import numba
        except ImportError:  # installed, but broken
            return lambda function, **options: function
        # At the first call numba looks for BLAS, whose package takes as long to import as all the rest of that call.
        load_alone("scipy.linalg.cython_blas")

        @numba.extending.typeof_impl.register(_CompiledLater)
        def _typeof(value, context):
            return numba.extending.typeof_impl(value.dispatcher(), context)

        def machine_code(function, **options):
            # nogil: an agent fits beside its training thread. error_model: division by zero gives inf, as in NumPy.
            options |= {"nogil": True, "error_model": "numpy"}
            try:
                found = numba.njit(cache=True, **options)(function)
            except RuntimeError:  # nowhere to keep compiled code: a read-only installation without a home
                return numba.njit(**options)(function)
            # numba itself only looks at the function's own file, but the machine code also holds all that it calls.
            kept = found._cache._cache_file
            kept._source_stamp = kept._source_stamp, _made_of(function)
            return found

        return machine_code

    def _made_of(function):
        """A hash of what goes into its machine code: the files of the compiled functions that it calls, directly or
        not, those of the classes that it handles, and the constants that it reads."""
        files, constants, waiting, seen = set(), set(), [function], set()
        while waiting:
            this = waiting.pop()
            seen.add(this)
            files.add(this.__code__.co_filename)
            read = {*this.__code__.co_names, *re.findall(r"\w+", " ".join(map(str, this.__annotations__.values())))}
            for name in read & this.__globals__.keys():
                value = this.__globals__[name]
                called = getattr(value, "py_func", None)
                if called is not None:
                    waiting += [] if called in seen else [called]
                elif isinstance(value, bool | int | float | str | tuple):
                    constants.add(f"{name}={value!r}")
                elif isinstance(value, type) and hasattr(sys.modules.get(value.__module__), "__file__"):
                    files.add(sys.modules[value.__module__].__file__)
        found = hashlib.sha256("".join(sorted(constants)).encode())
        for file in sorted(files):
            found.update(_content(file))
        return found.hexdigest()

    @functools.cache
    def _content(file):
        """A hash of a file; of nothing if it is gone."""
        try:
            return hashlib.sha256(Path(file).read_bytes()).digest()
        except OSError:
            return b""

    _is_installed = importlib.util.find_spec("numba") is not None

    def compiled(function):
        return _CompiledLater(function) if _is_installed else function

    def lean(function):
        """`compiled`, for functions that make no arrays and return none: they need not count who uses those that they
        are handed (numba's `nrt`), which takes most of the time of small ones that are handed many."""
        return _CompiledLater(function, _nrt=False) if _is_installed else function
