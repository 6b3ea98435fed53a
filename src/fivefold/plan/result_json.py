"""The planner's answer as plain data: what `fivefold plan --json` prints and the tables show.

Keys are stable, units are in the names, and equal requests have equal answers (but for the seconds
that the search took). Counts of bytes are of one device.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TypeAlias

from fivefold.cluster.cluster import Cluster
from fivefold.layout.notation import Layout
from fivefold.model.counts import count_parameters, flops_per_token
from fivefold.plan.memory.states import checkpoint_bytes, loading_bytes
from fivefold.plan.request import PlanRequest
from fivefold.plan.result import PlannedLayout, PlanResult
from fivefold.plan.search.ranking import TIE_TOLERANCE

VERSION = 1
"""Of the keys: a higher number where one goes away or changes its meaning."""

Json: TypeAlias = (
    "str | int | float | bool | list[Json] | tuple[Json, ...] | dict[str, Json] | None"
)


def to_json(result: PlanResult) -> dict[str, Json]:
    """The answer, as `--json` prints it."""
    request, found, best = result.request, result.search, result.best_found
    return {
        "version": VERSION,
        "model": _model(request),
        "cluster": _cluster(request.job.cluster),
        "job": {
            **_job(request),
            "memory_limit_bytes": result.limit_bytes,
            "measured": plain(result.measured),
            "measured_factor": result.measured_factor,
        },
        "search": {
            "layouts": found.counted,
            "legal": found.legal,
            "fit": found.fit,
            "skipped": found.skipped,
            "near": TIE_TOLERANCE,
            "seconds": found.seconds,
        },
        "layouts": [_layout(request, each) for each in result.layouts],
        "best_found": None if best is None else _layout(request, best),
        "order": plain(result.order),
        "neighbours": plain(result.neighbours),
        "changes": plain(result.changes),
        "nothing_fits": plain(result.nothing_fits),
        "notes": plain(result.notes),
    }


def plain(value: object) -> Json:
    """Dataclasses as dictionaries of their fields, layouts as their line of text."""
    if isinstance(value, Layout):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    assert value is None or isinstance(value, str | int | float), type(value)
    return value


def _layout(request: PlanRequest, each: PlannedLayout) -> dict[str, Json]:
    layout, step_s = each.estimate.layout, each.estimate.step_time_s
    hours = None
    if request.tokens is not None:
        step_tokens = request.job.global_batch * request.job.sequence_length
        hours = request.tokens / step_tokens * step_s / 3600
    estimate = {f.name: plain(getattr(each.estimate, f.name)) for f in fields(each.estimate)}
    return {
        "layout": estimate.pop("layout"),
        "meaning": layout.describe(),
        "devices": layout.world_size,
        **estimate,
        "training_hours": hours,
        "device_hours": None if hours is None else hours * layout.world_size,
        "why": plain(each.why),
    }


def _model(request: PlanRequest) -> dict[str, Json]:
    job, config = request.job, request.job.config
    counts = count_parameters(config, mtp=job.mtp)
    causal, full = (
        flops_per_token(config, job.sequence_length, causal=causal, mtp=job.mtp)
        for causal in (True, False)
    )
    return {
        "name": request.name,
        "family": config.family,
        "total_params": counts.total,
        "active_params": counts.active,
        "flops_per_token": causal,
        "flops_per_token_full_attention": full,
        "layers": config.num_layers,
        "mtp_params": counts.mtp,
    }


def _cluster(cluster: Cluster) -> dict[str, Json]:
    device = cluster.device
    return {
        "name": cluster.name,
        "devices": cluster.num_devices,
        "device": device.name,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth,
        "peak_flops_per_s": dict(device.peak),
        "tiers": [
            {
                "name": tier.name,
                "devices": tier.size,
                "shape": tier.shape,
                "bandwidth_bytes_per_s": tier.bandwidth,
                "oversubscription": tier.oversubscription,
            }
            for tier in cluster.tiers
        ],
    }


def _job(request: PlanRequest) -> dict[str, Json]:
    job, constraints = request.job, request.constraints
    node = min(job.cluster.tiers[0].size or 1, job.cluster.num_devices)
    return {
        "sequence_length": job.sequence_length,
        "global_batch": job.global_batch,
        "global_batch_tokens": job.global_batch * job.sequence_length,
        "precision": job.precision,
        "engine": job.engine.name,
        "mtp": job.mtp,
        "offload": job.engine.host_optimizer,
        "imbalance": job.imbalance,
        "objective": constraints.objective,
        "fix": constraints.fix,
        "forbid": constraints.forbid,
        "tokens": request.tokens,
        "checkpoint_bytes": checkpoint_bytes(job),
        "loading_bytes": loading_bytes(job.config, node),
    }
