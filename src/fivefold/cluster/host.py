"""The machine at hand: its cores and memory, and where its cluster file lies. Needs no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: by its affinity, and by the limit of its control group."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, int(_cgroup_cores() or allowed)))


def _cgroup_cores() -> float | None:
    """Version 2 of control groups, then version 1; None without a limit."""
    quota = _words(CGROUP / "cpu.max")
    if not quota:
        limits = (CGROUP / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
        quota = [word for path in limits for word in _words(path)]
    if len(quota) != 2 or not quota[0].isdecimal():  # "max" and -1 are no limit
        return None
    return int(quota[0]) / int(quota[1])


def memory_bytes() -> int:
    """Of the machine, or of this control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes")
    found = [int(word) for path in limits for word in _words(path) if word.isdecimal()]
    return min([total, *found])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def cpu_name() -> str:
    """As the processor calls itself."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1].strip() if found else platform.processor() or platform.machine()


def here_path() -> Path:
    """The file that `fivefold calibrate` writes for this machine, unless told another."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    digest = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]
    return Path(cache, "fivefold", f"{digest}.yaml")
