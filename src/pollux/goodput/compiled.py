"""The one door to numba: `@compiled` functions run as machine code, or as plain Python where numba is not installed.

Plain Python gives the same answers; a fit then takes about 18 ms instead of 0.5, one best (m, s) 63 µs instead of 10.
Compiled code is kept on disk, so only the first call on a machine pays for compiling. Measured reasons for numba:
docs/decisions/0002-numba.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])

if TYPE_CHECKING:

    def compiled(function: Function) -> Function: ...

else:
    try:
        import numba
    except ImportError:

        def compiled(function):
            return function

    else:

        def compiled(function):
            # nogil: an agent fits beside its training thread. error_model: division by zero gives inf, as in NumPy.
            options = {"nogil": True, "error_model": "numpy"}
            try:
                return numba.njit(cache=True, **options)(function)
            except RuntimeError:  # nowhere to keep compiled code: a read-only installation without a home
                return numba.njit(**options)(function)
