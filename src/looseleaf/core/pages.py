"""Pages of blocks: which blocks are taken, and which to take next.

A page's occupancy is a bit mask (bit i set: block i of the page is taken). Long runs take whole pages, the tail of a
sequence goes into a partly used page, so that 256-token pages waste no more than 16-token blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from looseleaf.errors import IntegrityError
from looseleaf.ids import Int32Array


class PagePool:
    """Gives out blocks of `num_pages` pages and takes them back. Knows nothing of sequences.

    Modifies itself only. Block ids are `page_id * blocks_per_page + index`. Free blocks are found through buckets of
    pages by their number of free blocks, never by a scan.
    """

    def __init__(self, num_pages: int, blocks_per_page: int) -> None:
        self.blocks_per_page = blocks_per_page
        self.full_mask = (1 << blocks_per_page) - 1
        self._bits = np.left_shift(np.uint64(1), np.arange(blocks_per_page, dtype=np.uint64))
        self._set_up(num_pages, [0] * num_pages)

    def _set_up(self, num_pages: int, masks: list[int]) -> None:
        self.num_pages = num_pages
        self.masks = masks
        ids = np.arange(num_pages * self.blocks_per_page, dtype=np.int32)
        self._blocks_of: Int32Array = ids.reshape(num_pages, self.blocks_per_page)
        # Whole free pages, lowest id on top. Pages leave only from the top, so a list needs no look-up inside.
        self.free_pages = [page for page in range(num_pages - 1, -1, -1) if not masks[page]]
        # partial[f]: pages with f free blocks, 0 < f < blocks_per_page; a dict is an ordered set with O(1) removal.
        self.partial: list[dict[int, None]] = [{} for _ in range(self.blocks_per_page)]
        self.num_free_blocks = 0
        for page, mask in enumerate(masks):
            free = self.blocks_per_page - mask.bit_count()
            self.num_free_blocks += free
            if 0 < free < self.blocks_per_page:
                self.partial[free][page] = None

    def rebuild(self, taken: npt.NDArray[np.bool_]) -> None:
        """Start anew with other pages: `taken` bool [num_pages * blocks_per_page]. O(pages)."""
        by_page = taken.reshape(-1, self.blocks_per_page)
        masks = np.zeros(len(by_page), dtype=np.uint64)
        for index in range(self.blocks_per_page):
            masks |= by_page[:, index].astype(np.uint64) << np.uint64(index)
        self._set_up(len(by_page), masks.tolist())

    def taken(self) -> npt.NDArray[np.bool_]:
        """Which blocks are taken, bool [num_pages * blocks_per_page]. O(blocks)."""
        masks = np.array(self.masks, dtype=np.uint64)
        taken: npt.NDArray[np.bool_] = (masks[:, None] & self._bits) != 0
        return taken.ravel()

    @property
    def num_free_pages(self) -> int:
        """Pages without any taken block."""
        return len(self.free_pages)

    @property
    def num_partial_pages(self) -> int:
        """Pages with both taken and free blocks."""
        return sum(map(len, self.partial))

    def take(self, num_blocks: int, after: int | None = None, growth_blocks: int | None = None) -> Int32Array:
        """`num_blocks` free blocks, int32 [num_blocks], in the order in which a sequence should use them.

        `after` is the sequence's last block: the blocks right behind it in its page are preferred. Then whole pages,
        then one partly used page that has room for the rest and for `growth_blocks` to come (None: a quarter page),
        then a fresh page, then whatever is free. The caller guarantees `num_blocks <= num_free_blocks`. Costs O(pages
        touched).
        """
        behind, whole = self._take_behind(after, num_blocks), None
        left = num_blocks - len(behind)
        if left >= self.blocks_per_page and self.free_pages:
            whole = self._take_pages(min(left // self.blocks_per_page, len(self.free_pages)))
            left -= len(whole)
        rest: Sequence[int] = ()
        if left and left < self.blocks_per_page:
            page = self._page_with_room(left, growth_blocks)
            if page is not None:
                rest = self._take_some(page, left)
                left = 0
        if left:
            rest = self._take_emptiest(left, growth_blocks)
        if whole is None:
            return np.array([*behind, *rest], dtype=np.int32)
        if not (behind or rest):
            return whole
        return np.concatenate((np.array(behind, np.int32), whole, np.array(rest, np.int32)))

    def take_one_each(self, lasts: Sequence[int], growths: Sequence[int | None]) -> Int32Array:
        """One free block for each of several sequences, int32 [len(lasts)]: as `take(1, last, growth)` for one after
        the other. `lasts[i]` -1: a sequence without a block. O(sequences)."""
        blocks: list[int] = []
        for last, growth in zip(lasts, growths, strict=True):
            page, index = divmod(last + 1, self.blocks_per_page)
            if index and not self.masks[page] >> index & 1:  # the next one in its page
                self._set_mask(page, self.masks[page] | 1 << index)
                blocks.append(last + 1)
            else:
                blocks += self.take(1, None if last < 0 else last, growth).tolist()
        return np.array(blocks, dtype=np.int32)

    def give_back(self, blocks: Int32Array) -> None:
        """Return taken blocks, int32 [num_blocks], each at most once.

        Raises:
            IntegrityError: I3, a block is free already; nothing is given back then.
        """
        if len(blocks) == 0:
            return
        if len(blocks) == 1:  # the common case of a decode step under pressure
            page, index = divmod(int(blocks[0]), self.blocks_per_page)
            if not self.masks[page] >> index & 1:
                raise IntegrityError("I3", f"block {int(blocks[0])} is given back twice")
            self._set_mask(page, self.masks[page] ^ (1 << index))
            return
        if self.blocks_per_page == 1:
            self._give_back_pages(blocks.tolist())
            return
        if len(blocks) % self.blocks_per_page == 0 and (whole := self._whole_pages(blocks)):
            self._give_back_pages(whole)
            return
        pages, indices = np.divmod(blocks, self.blocks_per_page)
        starts = [0, *((pages[1:] != pages[:-1]).nonzero()[0] + 1).tolist()]
        # A sum, not an OR: a block named twice in a run carries over and is caught by the check.
        runs = zip(pages[starts].tolist(), np.add.reduceat(self._bits[indices], starts).tolist(), strict=True)
        stops = [*starts[1:], len(blocks)]
        cleared: dict[int, int] = {}
        for (page, mask), start, stop in zip(runs, starts, stops, strict=True):
            seen = cleared.get(page, 0)
            if mask.bit_count() != stop - start or mask & ~self.masks[page] or mask & seen:
                raise IntegrityError(
                    "I3", f"a block of page {page} is given back twice (blocks {blocks.tolist()[:8]}…)"
                )
            cleared[page] = seen | mask
        for page, mask in cleared.items():
            self._set_mask(page, self.masks[page] ^ mask)

    def _whole_pages(self, blocks: Int32Array) -> list[int]:
        """The pages of which `blocks` are all blocks in order; none if they are anything else."""
        pages = [first // self.blocks_per_page for first in blocks[:: self.blocks_per_page].tolist()]
        return pages if self._blocks_of.take(pages, axis=0).tobytes() == blocks.tobytes() else []

    def _give_back_pages(self, pages: list[int]) -> None:
        """Return whole pages."""
        if len(set(pages)) < len(pages) or {self.masks[page] for page in pages} != {self.full_mask}:
            raise IntegrityError("I3", f"a page is given back twice (pages {pages[:8]}…)")
        self._free_pages(pages)

    def _free_pages(self, pages: Sequence[int]) -> None:
        """Pages of which every block was taken are free as a whole."""
        for page in pages:
            self.masks[page] = 0
        self.free_pages.extend(pages)
        self.num_free_blocks += len(pages) * self.blocks_per_page

    def _take_pages(self, num_pages: int) -> Int32Array:
        """All blocks of the topmost free pages."""
        size, full = self.blocks_per_page, self.full_mask
        pages = self.free_pages[: -num_pages - 1 : -1]
        del self.free_pages[-num_pages:]
        for page in pages:
            self.masks[page] = full
        self.num_free_blocks -= num_pages * size
        return self._blocks_of.take(pages, axis=0).ravel()

    def _take_behind(self, block: int | None, num_blocks: int) -> Sequence[int]:
        """Free blocks right behind one in its page, up to so many."""
        if block is None:
            return ()
        page, start = divmod(block + 1, self.blocks_per_page)
        count = 0
        if start:  # else it is the last of its page
            free = ~self.masks[page] & self.full_mask
            while count < num_blocks and free >> (start + count) & 1:
                count += 1
        return self._take_run(page, start, count) if count else ()

    def _page_with_room(self, num_blocks: int, growth_blocks: int | None) -> int | None:
        """A partly used page for the tail of a sequence: fullest first among those with room to grow, then a fresh
        page, then the fullest that just fits."""
        growth = max(1, self.blocks_per_page // 4) if growth_blocks is None else growth_blocks
        for free in range(min(num_blocks + growth, self.blocks_per_page), self.blocks_per_page):
            if self.partial[free]:
                return next(reversed(self.partial[free]))
        if self.free_pages:
            return self.free_pages[-1]
        for free in range(num_blocks, self.blocks_per_page):
            if self.partial[free]:
                return next(reversed(self.partial[free]))
        return None

    def _take_emptiest(self, num_blocks: int, growth_blocks: int | None) -> list[int]:
        """All that is free in the emptiest of partly used pages, one after the other; the rest in one that has room."""
        drained: list[int] = []
        left = num_blocks
        for num_free in range(self.blocks_per_page - 1, 0, -1):
            pages = self.partial[num_free]
            while pages and num_free <= left:
                drained.append(pages.popitem()[0])
                left -= num_free
            if pages:
                break  # this one has more than enough
        taken = self._take_all_of(drained)
        if left:
            page = self._page_with_room(left, growth_blocks)
            if page is None:
                raise IntegrityError("I3", f"{left} of {num_blocks} blocks that are counted as free are in no page")
            taken += self._take_some(page, left)
        return taken

    def _take_all_of(self, pages: list[int]) -> list[int]:
        """Every free block of partly used pages that are in no bucket any more."""
        if not pages:
            return []
        masks = np.array([self.masks[page] for page in pages], dtype=np.uint64)
        is_free = masks[:, None] >> np.arange(self.blocks_per_page, dtype=np.uint64) & np.uint64(1) == 0
        rows, indices = is_free.nonzero()
        for page in pages:
            self.masks[page] = self.full_mask
        self.num_free_blocks -= len(rows)
        blocks: list[int] = (np.array(pages)[rows] * self.blocks_per_page + indices).tolist()
        return blocks

    def _take_some(self, page: int, num_blocks: int) -> list[int]:
        """`num_blocks` free blocks of one page: the lowest run that is long enough, else the lowest free ones."""
        free = ~self.masks[page] & self.full_mask
        starts = free
        for _ in range(num_blocks - 1):
            starts &= starts >> 1  # bit i stays set while the run from i on is free
        if starts:
            low = (starts & -starts).bit_length() - 1
            return list(self._take_run(page, low, num_blocks))
        indices = []
        for _ in range(num_blocks):
            low = free & -free
            indices.append(low.bit_length() - 1)
            free ^= low
        mask = sum(1 << index for index in indices)
        self._set_mask(page, self.masks[page] | mask)
        base = page * self.blocks_per_page
        return [base + index for index in indices]

    def _take_run(self, page: int, start: int, count: int) -> range:
        self._set_mask(page, self.masks[page] | ((1 << count) - 1) << start)
        base = page * self.blocks_per_page + start
        return range(base, base + count)

    def _set_mask(self, page: int, mask: int) -> None:
        """Change a page's mask and move the page to the list of its new state."""
        old = self.masks[page]
        free_before = self.blocks_per_page - old.bit_count()
        free_now = self.blocks_per_page - mask.bit_count()
        self.masks[page] = mask
        self.num_free_blocks += free_now - free_before
        if free_before == self.blocks_per_page:
            self.free_pages.pop()  # a whole free page is only ever taken from the top
        elif free_before:
            del self.partial[free_before][page]
        if free_now == self.blocks_per_page:
            self.free_pages.append(page)
        elif free_now:
            self.partial[free_now][page] = None
