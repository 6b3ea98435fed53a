"""How long it takes to build, prove and simulate tables of actions, in processor time.

    python -m benchmarks.schedule_speed [--rounds N] [--json]

The smallest of some rounds counts, for the machine may do something else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from fivefold.parallel.pipeline.proof import validate
from fivefold.parallel.pipeline.schedules import build
from fivefold.parallel.pipeline.simulation import simulate

CASES = [  # schedule, pp, vpp, micro-batches
    ("dualpipe-v", 16, 2, 240),
    ("dualpipe", 16, 1, 240),
    ("zb-v", 16, 2, 240),
    ("1f1b", 16, 4, 240),
    ("1f1b", 128, 1, 1024),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast schedules are built and simulated.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows = [measure(*case, arguments.rounds) for case in CASES]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'schedule':42} {'actions':>8} {'build s':>8} {'prove s':>8} {'simulate s':>10}")
    for row in rows:
        name = "{schedule} pp{pp} vpp{vpp}, {micro_batches} micro-batches".format(**row)
        print(
            f"{name:42} {row['actions']:8,} {row['build_s']:8.3f} {row['prove_s']:8.3f} "
            f"{row['simulate_s']:10.3f}"
        )


def measure(name: str, pp: int, vpp: int, micro_batches: int, rounds: int) -> dict:
    schedule = build(name, pp, vpp, micro_batches)

    def built() -> None:
        build.cache_clear()
        build(name, pp, vpp, micro_batches)

    return {
        "schedule": name,
        "pp": pp,
        "vpp": vpp,
        "micro_batches": micro_batches,
        "actions": sum(map(len, schedule.table)),
        "build_s": seconds(built, rounds),
        "prove_s": seconds(lambda: validate(schedule), rounds),
        "simulate_s": seconds(lambda: simulate(schedule, 1.0, 2.0, 0.1, overlapped_s=2.5), rounds),
    }


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Processor seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    main()
