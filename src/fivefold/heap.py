"""How a program that trains on a CPU has the C library keep the memory that tensors free."""

from __future__ import annotations

import os
import sys

SETTINGS = {
    "GLIBC_TUNABLES": ":".join(
        (
            # Large blocks (up to 32 MiB, its limit) stay when they are freed: the system would
            # have to clear and map their pages anew at every use.
            f"glibc.malloc.mmap_threshold={32 * 2**20}",
            f"glibc.malloc.trim_threshold={2**31 - 1}",
            # Small blocks join with their free neighbours at once. Kept apart, in its caches, they
            # lie between large blocks, which then never fit into the place of one another.
            "glibc.malloc.tcache_count=0",
            "glibc.malloc.mxfast=0",
        )
    ),
    "MKL_DISABLE_FAST_MM": "1",  # nor does MKL keep what its products work in
}
"""What glibc and MKL read from the environment when a program starts (docs/decisions.md says what
it gains). Other C libraries know nothing of it."""


def restart_with_settings() -> None:
    """Start this very command anew with the settings in its environment, unless they are there: it
    is the same process. What a user has set stays."""
    missing = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    if sys.platform == "linux" and sys.executable and missing:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})
