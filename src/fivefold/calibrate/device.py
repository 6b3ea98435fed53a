"""What a cluster file says of a machine that was measured: its device, and the tiers between
devices.

Of a GPU, the planner's constants (cluster/constants.yaml) come from the points by the formulas in
which the planner uses them (plan/compute.py), on shapes where that constant decides. A CPU has
cores instead (`calibrate.cores`). Needs no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fivefold.calibrate.measure import Measured
from fivefold.calibrate.points import Point, rounded
from fivefold.cluster.cluster import FAR_LATENCY_S, NEAR_LATENCY_S
from fivefold.cluster.collectives import BASE_S
from fivefold.ledger import Transfer
from fivefold.plan.constants import (
    ATTENTION_KERNELS,
    MLP_KERNELS,
    NARROW,
    TILE_COLUMNS,
    TILE_ROWS,
)

LARGE_SHARE = 0.05
"""Products, light operations and copies of at least this share of the largest one's work count as
large: what a call costs beside its work does not show in them."""
MOVED = {"rms_norm": 2.0, "residual": 3.0, "rotate": 2.0, "gated": 3.0}
"""Elements that the planner takes a light operation to move, for each of its own."""
LEAST_STEP_S = 1e-7


class Facts:
    """The points of a machine, and the seconds of its kind: on a CPU, whose cores the processes
    share, processor seconds; on a GPU the wall clock."""

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self.on_cpu = measured.device == "cpu"
        self.usual = "fp32" if self.on_cpu else "bf16"

    def seconds(self, point: Point) -> float:
        return point.cpu_s if self.on_cpu else point.wall_s

    def points(self, what: str, **sizes: int | str) -> list[Point]:
        """Of a kind, with these sizes, in the usual precision of the device."""
        return [
            point
            for point in self.measured.points
            if point.what == what
            and point.precision == ("fp32" if what == "memory" else self.usual)
            and sizes.items() <= dict(point.sizes).items()
        ]


def head(measured: Measured) -> dict[str, Any]:
    """The cluster file but for its CPU and its points."""
    facts = Facts(measured)
    where = f"{measured.cores} cores, " if facts.on_cpu else ""
    devices = "processes" if facts.on_cpu else "devices"
    return {
        "summary": f"{measured.name}, {where}measured with {measured.processes} {devices}",
        "devices": measured.processes,
        "device": _device(facts),
        "tiers": _tiers(facts),
    }


def _device(facts: Facts) -> dict[str, Any]:
    measured = facts.measured
    best = _best_products(facts)
    peak = {p: max(flops, measured.peak.get(p, 0.0)) for p, flops in best.items()}
    bandwidth = _bandwidth(facts)
    device = {
        "name": measured.name,
        "memory_bytes": measured.memory_bytes,
        "memory_bandwidth_tb_s": rounded(bandwidth / 1e12),
        "peak_tflops": {p: rounded(flops / 1e12) for p, flops in peak.items()},
        "measured_tflops": {p: rounded(flops / 1e12) for p, flops in best.items()},
    }
    if facts.on_cpu:
        return device
    constants = _constants(facts, best, peak, bandwidth)
    return device | {"constants": {name: rounded(value) for name, value in constants.items()}}


def _flops(point: Point) -> float:
    m, n, k, groups = (float(point.sizes.get(name, 1)) for name in ("m", "n", "k", "groups"))
    return 2 * groups * m * n * k


def _best_products(facts: Facts) -> dict[str, float]:
    """FLOP/s of the fastest product in each precision."""
    best: dict[str, float] = {}
    for point in facts.measured.points:
        if point.what == "product":
            rate = _flops(point) / facts.seconds(point)
            best[point.precision] = max(rate, best.get(point.precision, 0.0))
    return best


def _bandwidth(facts: Facts) -> float:
    """Bytes/s of copies of the largest array: read and written."""
    largest = max(facts.points("memory", op="copy"), key=lambda p: float(p.sizes["bytes"]))
    return 2 * float(largest.sizes["bytes"]) / facts.seconds(largest)


def _constants(
    facts: Facts, best: dict[str, float], peak: dict[str, float], bandwidth: float
) -> dict[str, float]:
    """Those of cluster/constants.yaml that the points of a GPU say something about."""
    processors, wave_loss = facts.measured.processors, 1.0

    def losses(point: Point) -> float:
        """What the planner multiplies the arithmetic of a product (of each group) with."""
        rows = -(-float(point.sizes["m"]) // TILE_ROWS) * TILE_ROWS
        waves = rows * float(point.sizes["n"]) / (TILE_ROWS * TILE_COLUMNS) / processors
        return 1 + wave_loss / waves

    def rates(points: Iterable[Point]) -> list[float]:
        return [_flops(p) * losses(p) / facts.seconds(p) for p in points]

    large = _large(facts.points("product"), _flops)
    product_rate = statistics.median(rates(large))
    light = [p for p in facts.points("light") if p.sizes["op"] in MOVED]
    large_light = _large(light, _elements)
    return {
        "processors": processors,
        "wave_loss": wave_loss,
        "sustained": product_rate / best[facts.usual],
        "grouped": statistics.median(rates(facts.points("grouped"))) / product_rate,
        "attention": _attention_rate(facts) / peak[facts.usual],
        "portable_attention": 1.0,  # the kernel that was measured is the one there is
        "memory": 1.0,  # of a bandwidth that was measured
        "unfused_light": statistics.median(
            facts.seconds(p) * bandwidth / (2 * MOVED[str(p.sizes["op"])] * _elements(p))
            for p in large_light
            if p.sizes["part"] == "forward"
        ),
        "light_backward": _sum(facts, large_light, "backward")
        / _sum(facts, large_light, "forward"),
        "launch_s": _launch_s(facts),
    }


def _large(points: Sequence[Point], work: Callable[[Point], float]) -> list[Point]:
    """Those with much work."""
    least = LARGE_SHARE * max(work(point) for point in points)
    return [point for point in points if work(point) >= least]


def _elements(point: Point) -> float:
    return float(point.sizes["rows"]) * float(point.sizes["width"])


def _sum(facts: Facts, points: Iterable[Point], part: str) -> float:
    return sum(facts.seconds(p) for p in points if p.sizes["part"] == part)


def _attention_rate(facts: Facts) -> float:
    """FLOP/s forward of long sequences and heads of 128 elements, masked scores not counted."""
    points = facts.points("attention", part="forward")
    longest = max(float(p.sizes["sequence"]) for p in points)
    rates = []
    for p in points:
        b, h, d, s = (float(p.sizes[n]) for n in ("batch", "heads", "head_dim", "sequence"))
        if s >= longest / 4:
            narrow = (1 + NARROW / d) / (1 + NARROW / 128)
            rates.append(2 * b * h * d * s * (s + 1) * narrow / facts.seconds(p))
    return statistics.median(rates)


def _launch_s(facts: Facts) -> float:
    """Seconds a kernel of layers that the host could not launch fast enough; where the device was
    always the slower of the two, those of an operation on one number."""
    kernels = ATTENTION_KERNELS + MLP_KERNELS
    slow = [
        p.wall_s / kernels
        for p in facts.points("layer", part="forward")
        if "experts" not in p.sizes and p.cpu_s >= 0.9 * p.wall_s
    ]
    return min(slow) if slow else facts.seconds(facts.points("host", op="operation")[0])


# --- tiers -------------------------------------------------------------------------------------


def _tiers(facts: Facts) -> list[dict[str, Any]]:
    """One tier for the devices of a node, and one for the nodes."""
    measured = facts.measured
    local = measured.processes_per_node
    if measured.processes == 1:  # nothing is sent, and a job of more devices is refused
        bandwidth = rounded(_bandwidth(facts) / 1e9)
        return [{"name": "one device", "size": 1, "bandwidth_gb_s": bandwidth}]
    messages = [p for p in measured.points if p.what == "message" and p.sizes["bytes"]]
    tiers = []
    inside = [p for p in messages if p.sizes["stride"] == 1 and int(p.sizes["size"]) <= local]
    if inside:
        tiers.append({"name": "in the node", **_tier(inside, NEAR_LATENCY_S)})
    outside = [p for p in messages if p.sizes["stride"] == local and p.sizes["op"] != "send"]
    if local == 1 or (measured.processes > local and outside):
        if tiers:
            tiers[0]["size"] = local
        tiers.append({"name": "between nodes", **_tier(outside or messages, FAR_LATENCY_S)})
    return tiers


def _wire_bytes(point: Point) -> float:
    """What leaves a rank in one call, as the ledger counts it."""
    op = str(point.sizes["op"])
    op = {"shift": "send", "all_to_all_rows": "all_to_all"}.get(op, op)
    transfer = Transfer("world", "forward", op, point.sizes["size"], point.sizes["bytes"], 1)
    return float(transfer.wire_bytes)


PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def _tier(points: list[Point], usual_s: tuple[float, float, float]) -> dict[str, Any]:
    """Bandwidth that the fastest of the largest messages has, the share that they have by the
    median, and the time of a step in a ring of the smallest ones."""
    most = max(float(p.sizes["bytes"]) for p in points)
    least = min(float(p.sizes["bytes"]) for p in points)
    rates = [_wire_bytes(p) / p.wall_s for p in points if float(p.sizes["bytes"]) >= most / 2]
    steps = [
        (p.wall_s - float(BASE_S[0, 0])) / (PASSES[str(p.sizes["op"])] * (int(p.sizes["size"]) - 1))
        for p in points
        if float(p.sizes["bytes"]) <= 2 * least and p.sizes["op"] in PASSES
    ]
    step_s = max(LEAST_STEP_S, statistics.median(steps))
    return {
        "bandwidth_gb_s": rounded(max(rates) / 1e9),
        "latency_us": [rounded(step_s * each / usual_s[0] * 1e6) for each in usual_s],
        "efficiency": rounded(statistics.median(rates) / max(rates)),
    }
