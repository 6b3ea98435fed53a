"""A cluster file of a CPU with round numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fivefold.cluster.cluster import Cluster
from fivefold.cluster.load import cluster_of

PASS = {
    "matmul_flop": 1e-11,
    "matmul_byte": 0.0,
    "attention_flop": 2e-11,
    "elementwise_byte": 2e-11,
    "operation": 1e-5,
}
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "send")


def machine(cores: int = 2, busy_s: float = 2e-4, wait_s: float = 3e-4) -> dict[str, Any]:
    """As a cluster file has it. A message costs the same at any size."""
    return {
        "summary": "a CPU",
        "device": {
            "name": "CPU",
            "memory_bytes": 4 * 2**30,
            "memory_bandwidth_tb_s": 0.02,
            "peak_tflops": {"fp32": 0.1},
        },
        "tiers": [{"name": "in the node", "bandwidth_gb_s": 2}],
        "cpu": {
            "cores": cores,
            "forward": PASS,
            "backward": {name: 2 * value for name, value in PASS.items()},
            "copy_byte": 1e-11,
            "optimizer_element": 2e-9,
            "step": 1e-3,
            "messages": [
                {"op": op, "ranks": ranks, "bytes": size, "busy_s": busy_s, "wait_s": wait_s}
                for op in OPS
                for ranks in (2, 8)
                for size in (1, 2**40)
            ],
        },
    }


def cluster(processes: int, **changes: Any) -> Cluster:
    return cluster_of(machine(**changes), "cpu", "cpu", processes)


def write(folder: Path, **changes: Any) -> str:
    path = folder / "cpu.yaml"
    path.write_text(yaml.safe_dump(machine(**changes)))
    return str(path)
