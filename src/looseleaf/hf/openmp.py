"""Compiled bodies on the threads that torch has already."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from looseleaf.ids import Int64Array


class Threads:
    """Runs compiled bodies on torch's own OpenMP threads.

    A second pool beside torch's would fight with it for the same cores, because idle OpenMP threads spin. So the
    parallel region is opened in the OpenMP library that torch has loaded. Where that is another one than GNU's, bodies
    run on the calling thread alone.
    """

    def __init__(self) -> None:
        self._region: Any = None
        try:
            openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except (AttributeError, OSError):  # no such library in this process, or no way to tell
            return
        self._region = openmp.GOMP_parallel
        self._region.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._region.restype = None

    @property
    def num_threads(self) -> int:
        """Threads that take part."""
        return 1 if self._region is None else torch.get_num_threads()

    def run(self, body: int, record: Int64Array, num_work: int) -> None:
        """Run the body at address `body` on `record` until `num_work` pieces of work are done."""
        record[0], record[1] = 0, num_work
        num_threads = min(self.num_threads, num_work)
        if num_threads <= 1:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)(record.ctypes.data)
        else:
            self._region(body, record.ctypes.data, num_threads, 0)
