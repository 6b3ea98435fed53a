"""Settings of the C library: on a CPU, it keeps the memory that tensors free."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLES = {
    # Large blocks (up to 32 MiB, its limit) stay when they are freed: the system would have to
    # clear and map their pages again at every use.
    "glibc.malloc.mmap_threshold": 32 * 2**20,
    "glibc.malloc.trim_threshold": 2**31 - 1,
    # Small blocks join with their free neighbours at once. Kept apart, in its caches, they lie
    # between large blocks, which then never fit into the place of one another.
    "glibc.malloc.tcache_count": 0,
    "glibc.malloc.mxfast": 0,
}
"""What glibc reads from the environment when a program starts (docs/decisions.md says what it
gains). Other C libraries know nothing of it."""

NVIDIA = Path("/dev/nvidiactl")
"""Where there are GPUs tensors are on them, and the host's small blocks count."""


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for training on a CPU: the given one, and the settings that it lacks."""
    own = environment.get("GLIBC_TUNABLES", "")
    missing = [f"{name}={value}" for name, value in TUNABLES.items() if f"{name}=" not in own]
    return {
        "MKL_DISABLE_FAST_MM": "1",  # MKL should not keep either what its products work in
        **environment,
        "GLIBC_TUNABLES": ":".join([*([own] if own else []), *missing]),
    }


def reexec_with_malloc_settings() -> None:
    """Execute this command again, in the same process, with the settings in its environment, unless
    they are there. What a user has set stays."""
    wanted = settings(os.environ)
    if sys.platform == "linux" and sys.executable and not NVIDIA.exists() and wanted != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
