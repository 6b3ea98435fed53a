"""Numbers and nouns of the planner's sentences."""

from __future__ import annotations

from fivefold.plan.engines import Job


def longer(ratio: float) -> str:
    """What follows "takes", for a ratio of two times: `10% longer`, `4.2% less time`."""
    if ratio >= 2:
        return f"{ratio:.1f}x as long"
    change = abs(ratio - 1)
    percent = f"{change:.0%}" if change >= 0.0995 else f"{change:.1%}"
    return f"{percent} longer" if ratio >= 1 else f"{percent} less time"


def device_noun(job: Job) -> str:
    """What a sentence calls one device."""
    return "process" if job.cluster.cores else "GPU"


def devices(job: Job, count: int) -> str:
    """`1 GPU`, `1,024 GPUs` or `4 processes`."""
    noun = device_noun(job)
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun == 'process' else 's'}"


def gb(count: float) -> str:
    """`1,204 GB` or `76.4 GB`, in units of 10^9 bytes."""
    value = count / 1e9
    if value >= 99.95:
        return f"{value:,.0f} GB"
    return f"{value:.1f} GB" if value >= 0.95 else f"{count / 1e6:,.1f} MB"


def available(limit_bytes: float) -> str:
    """`78.7 GB is available`: the clause after what a device would need."""
    return f"{f'{limit_bytes / 1e9:,.1f}'.removesuffix('.0')} GB is available"
