"""The one door to numba: `@compiled` functions run as machine code, or as plain Python where numba is not installed.

Plain Python gives the same answers, about a hundred times slower. Compiled code is kept on disk, so only the first
call on a machine pays for compiling. Measured reasons for numba: docs/decisions/0002-numba.md.
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

        # nogil: an agent fits beside its training thread. error_model: division by zero gives inf, as in NumPy.
        compiled = numba.njit(cache=True, nogil=True, error_model="numpy")
    except ImportError:

        def compiled(function):
            return function
