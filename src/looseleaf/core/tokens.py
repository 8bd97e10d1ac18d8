"""Token ids as packed int32 bytes: the form in which prompts are stored and compared."""

from __future__ import annotations

import operator
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from looseleaf.errors import InvalidTokens, RequestError

Tokens: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"

TOKEN_BYTES = 4
_LIMIT = 2**31
_HIGHEST_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids as native int32 bytes, 4 a token.

    Radix edges are compared as bytes: one memory comparison instead of a loop over integers.

    Raises:
        InvalidTokens: empty, negative, ≥ 2**31, not integers, or not one-dimensional. Costs O(tokens).
    """
    if isinstance(tokens, np.ndarray):
        return _pack_array(tokens)
    try:
        # Twice as fast as `array`, but its errors say less; `struct.pack` would copy the tokens once more.
        data = struct.Struct(f"{len(tokens)}i").pack(*tokens)
    except (TypeError, struct.error):
        data = _pack_strange(tokens)
    if not data:
        raise InvalidTokens("the token sequence is empty", "a prompt has at least one token")
    if not data[_HIGHEST_BYTE::TOKEN_BYTES].isascii():  # its top bit is set where a token is negative
        _check_not_negative(unpack_tokens(data))
    return data


def _pack_strange(tokens: Sequence[int]) -> bytes:
    """Tokens that are no proper sequence of them, or an error that says what they are."""
    try:
        return array("i", list(tokens)).tobytes() if len(tokens) else b""
    except TypeError as error:
        raise InvalidTokens(f"tokens must be a sequence of integers ({error})") from None
    except OverflowError:
        raise InvalidTokens(f"a token id is outside 0 to {_LIMIT - 1}") from None


def pack_one_each(token_ids: npt.ArrayLike, num_leases: int) -> npt.NDArray[np.int32]:
    """One token for each of `num_leases` leases, int32 [num_leases].

    Raises:
        InvalidTokens: no tokens; RequestError: more or fewer.
    """
    try:
        tokens = np.asarray(token_ids)
    except ValueError as error:
        raise InvalidTokens(f"tokens are no array of integers ({error})") from None
    if tokens.shape != (num_leases,):
        raise RequestError(
            f"{num_leases} leases but tokens of shape {tokens.shape}", "append_many takes one token each"
        )
    return unpack_tokens(pack_tokens(tokens)) if num_leases else np.empty(0, dtype=np.int32)


def unpack_tokens(data: bytes) -> npt.NDArray[np.int32]:
    """The int32 array [num_tokens] that `data` packs; read-only, no copy."""
    return np.frombuffer(data, dtype=np.int32)


def check_count(num_tokens: int, call: str) -> int:
    """`num_tokens` as an int; RequestError if it is none or negative."""
    if type(num_tokens) is int and num_tokens >= 0:
        return num_tokens
    try:
        count = operator.index(num_tokens)
    except TypeError:
        raise RequestError(f"{call}({num_tokens!r}): a number of tokens is an integer") from None
    if count < 0:
        raise RequestError(f"{call}({count}): a number of tokens is not negative")
    return count


def _pack_array(tokens: npt.NDArray[np.integer]) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidTokens(
            f"tokens must be a one-dimensional integer array, not {tokens.ndim}-dimensional {tokens.dtype}"
        )
    if len(tokens) == 0:
        raise InvalidTokens("the token sequence is empty", "a prompt has at least one token")
    if tokens.dtype != np.int32 and int(tokens.max()) >= _LIMIT:
        raise InvalidTokens(f"token id {int(tokens.max())} is above {_LIMIT - 1}")
    _check_not_negative(tokens)
    return tokens.astype(np.int32, copy=False).tobytes()


def _check_not_negative(tokens: npt.NDArray[np.integer]) -> None:
    if np.minimum.reduce(tokens) < 0:
        at = int(np.argmax(tokens < 0))
        raise InvalidTokens(f"token id {int(tokens[at])} at position {at} is negative")
