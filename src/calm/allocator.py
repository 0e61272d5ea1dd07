"""Memory as large computations want it (docs/performance.md has the numbers).

What torch frees is kept for the next step, instead of going back to the system and coming anew as empty pages: the C
library returns every large block at once, and a training step asks for the same blocks as the one before it. Matrices
that a step of generation reads from beginning to end lie on huge pages: what reads ahead stops at the end of a page.
"""

import ctypes
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line sets memory up before it imports torch
    from torch import Tensor

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt, as glibc's malloc.h numbers them
MOST = 2**31 - 1
HUGE_PAGE, MADV_HUGEPAGE = 2**21, 14  # bytes, where pages have 4 kB; as Linux numbers it


def keep_memory() -> None:
    """For this process, where the C library is glibc; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            mallopt(option, MOST)


def on_huge_pages(matrix: "Tensor") -> "Tensor":
    """The same numbers, on huge pages where the system has them; small ones, and parts of others, stay."""
    here = sys.platform.startswith("linux") and matrix.device.type == "cpu" and matrix.is_contiguous()
    if not here or matrix.nbytes < 2 * HUGE_PAGE or matrix.storage_offset() or matrix.data_ptr() % HUGE_PAGE == 0:
        return matrix
    room = matrix.new_empty(matrix.numel() + HUGE_PAGE // matrix.itemsize)
    first = -room.data_ptr() % HUGE_PAGE // matrix.itemsize
    moved = room[first : first + matrix.numel()].view_as(matrix)
    pages = ctypes.c_void_p(moved.data_ptr()), ctypes.c_size_t(matrix.nbytes // HUGE_PAGE * HUGE_PAGE)
    ctypes.CDLL(None).madvise(*pages, MADV_HUGEPAGE)  # a system that has none says no, and nothing is lost
    return moved.copy_(matrix)
