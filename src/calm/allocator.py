"""Memory that torch frees is kept for the next step, instead of going back to the system and coming anew as empty
pages.

The C library returns every large block at once. A training step asks for the same blocks as the one before it, so
that a seventh of its time was spent on filling pages with zeros (docs/performance.md).
"""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt, as glibc's malloc.h numbers them
MOST = 2**31 - 1


def keep_memory() -> None:
    """For this process, where the C library is glibc; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            mallopt(option, MOST)
