"""Memory for large computations (docs/performance.md has the numbers).

glibc returns every large block to the system at once, and a training step allocates the same blocks as the one before
it: `keep_memory` keeps them. A decoding step reads whole matrices: hardware prefetching stops at the end of a page, so
they are moved to huge pages.
"""

import ctypes
import sys
from functools import cache

from torch import Tensor

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's parameters in glibc's malloc.h
MAX_INT = 2**31 - 1
HUGE_PAGE, MADV_HUGEPAGE = 2**21, 14  # bytes on systems with 4 kB pages; Linux's number


@cache
def keep_memory() -> None:
    """Let glibc keep freed memory for this process; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            mallopt(option, MAX_INT)


def on_huge_pages(matrix: Tensor) -> Tensor:
    """The same matrix on huge pages, if the system has them; small ones, and views of others, are returned as is."""
    movable = sys.platform.startswith("linux") and matrix.device.type == "cpu" and matrix.is_contiguous()
    if not movable or matrix.nbytes < 2 * HUGE_PAGE or matrix.storage_offset() or matrix.data_ptr() % HUGE_PAGE == 0:
        return matrix
    memory = matrix.new_empty(matrix.numel() + HUGE_PAGE // matrix.itemsize)
    first = -memory.data_ptr() % HUGE_PAGE // matrix.itemsize
    moved = memory[first : first + matrix.numel()].view_as(matrix)
    pages = ctypes.c_void_p(moved.data_ptr()), ctypes.c_size_t(matrix.nbytes // HUGE_PAGE * HUGE_PAGE)
    ctypes.CDLL(None).madvise(*pages, MADV_HUGEPAGE)  # a system without huge pages refuses, which does no harm
    return moved.copy_(matrix)
