"""What compiled bodies of parallel regions have in common. Needs numba (extra `hf`).

A *body* is run by every thread of a region. It gets the address of an int64 record: the piece of work that is taken
next, how many pieces there are, then what the body itself wants to know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core.errors import NumbaError
from numba.extending import intrinsic

__all__ = ["NumbaError", "address_of", "float_rows", "integers", "pointer", "take_next"]


@intrinsic
def pointer(typingctx: Any, address: Any, kind: Any) -> Any:
    """`address` int64 as a pointer to numbers of the type `kind`."""
    target = types.CPointer(kind.dtype)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(target))

    return target(address, kind), code


@intrinsic
def take_next(typingctx: Any, counter: Any) -> Any:
    """Add one to the int64 behind the pointer `counter`, as one step for all threads; gives what was there before."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), code


@numba.njit(error_model="numpy")
def float_rows(address: int, rows: int, width: int) -> Any:
    """The float32 numbers [rows, width] at `address`."""
    return numba.carray(pointer(address, types.float32), (rows, width))


@numba.njit(error_model="numpy")
def integers(address: int, count: int) -> Any:
    """The int64 numbers [count] at `address`."""
    return numba.carray(pointer(address, types.int64), (count,))


def address_of(body: Callable[[Any], None]) -> int:
    """Machine code of a body, a C function of a pointer to the record; compiled once per machine."""
    return int(numba.cfunc(types.void(types.CPointer(types.int64)), cache=True)(body).address)
