"""Chain keys: one 64-bit number for a block and all that lies before it, the same in every process.

They name content where content itself is gone or too large: in the event stream, in what was forgotten, in the memory
of eviction policies. Matches never rely on them: the tree compares tokens.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from looseleaf.ids import Int64Array, Namespace

_STEP = 0x9E3779B97F4A7C15  # odd, so that it can be divided by, modulo 2**64
_MASK = 2**64 - 1
_HALF, _MIX = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)


def root_key(namespace: Namespace) -> int:
    """Chain key in front of a namespace's first block."""
    digest = hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8, person=b"looseleaf").digest()
    return int.from_bytes(digest, "little", signed=True)


def join_keys(key: int, namespace: Namespace) -> int:
    """Chain key behind `key` where another namespace begins."""
    seed = key.to_bytes(8, "little", signed=True)
    data = namespace.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=seed).digest(), "little", signed=True)


class ChainKeys:
    """Chain keys of blocks of one size, a whole prompt in a few array operations.

    A block's words w, two tokens each, shifted into each other, give a multilinear hash h = Σ wⱼ·rⱼ over fixed odd r
    (Dietzfelbinger, STACS 1996), mixed once, and the keys follow kᵢ₊₁ = kᵢ·s + hᵢ, all modulo 2**64. As s is odd,
    kᵢ = sⁱ·(k₀ + Σ hⱼ·s⁻ʲ⁻¹): a cumulative sum.
    """

    def __init__(self, block_bytes: int) -> None:
        self._word = np.dtype(np.uint64 if block_bytes % 8 == 0 else np.uint32)
        self._block_words = block_bytes // self._word.itemsize
        self._shift = self._word.type(29)
        self._is_wide = self._word.itemsize == 8
        raw = np.random.PCG64(0x10051EAF).random_raw(self._block_words)  # a stream that numpy promises not to change
        self._factors: npt.NDArray[np.uint64] = raw | np.uint64(1)
        self._powers = self._scales = np.empty(0, dtype=np.uint64)

    def behind(self, key: int, data: bytes | memoryview) -> Int64Array:
        """Keys of the whole blocks of packed tokens `data` behind what has `key`: int64 [n]. O(tokens)."""
        count = len(data) // (self._word.itemsize * self._block_words)
        if count > len(self._powers):
            self._grow(2 * count)
        packed = np.frombuffer(data, dtype=self._word, count=count * self._block_words)
        words = packed >> self._shift
        words ^= packed
        words = words.reshape(count, self._block_words)
        hashes = (words if self._is_wide else words.astype(np.uint64)) @ self._factors
        hashes ^= hashes >> _HALF
        hashes *= self._scales[:count]
        if count:
            hashes[0] = (int(hashes[0]) + key) & _MASK
        sums = np.add.accumulate(hashes, out=hashes)
        sums *= self._powers[:count]
        keys: Int64Array = sums.view(np.int64)
        return keys

    def _grow(self, count: int) -> None:
        """Powers 1 to `count` of the step, and of its inverse, times what hashes are mixed with."""
        self._powers = _powers(_STEP, count)
        self._scales = _powers(pow(_STEP, -1, 2**64), count) * _MIX


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    powers: npt.NDArray[np.uint64] = np.cumprod(np.full(count, base, dtype=np.uint64), dtype=np.uint64)
    return powers
