"""The planner's answer as plain data: what `--json` prints and the tables show.

Keys are stable, units are in the names, and equal questions have equal answers (but for the
seconds that the search took). Counts of bytes are of one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from fivefold.cluster.cluster import Cluster
from fivefold.errors import UserError
from fivefold.layout.legality import violations
from fivefold.layout.notation import Layout, parse
from fivefold.model.counts import count_parameters, flops_per_token
from fivefold.plan import explain
from fivefold.plan.engines import Job
from fivefold.plan.estimate import Estimate, estimate
from fivefold.plan.explain import gb, largest_differences
from fivefold.plan.infeasible import shortage
from fivefold.plan.intervals import MeasurementCalibration, calibrate_with_measurements
from fivefold.plan.memory.states import checkpoint_bytes, loading_bytes, verdict
from fivefold.plan.request import PlanRequest
from fivefold.plan.search.ranking import TIE_TOLERANCE
from fivefold.plan.search.search import search

if TYPE_CHECKING:
    from fivefold.plan.planfile import PlanFile

Answer = dict[str, Any]


def answer(question: PlanRequest) -> Answer:
    """Search, or look at the one layout that is asked about, and explain."""
    job, wishes = question.job, question.wishes
    if question.layout is not None:
        _refuse_illegal(job, question.layout)
    found = search(job, wishes)
    measured, sharpened = _measured(question)
    factor = sharpened.factor
    best = [_finished(question, each, sharpened) for each in found.best]
    if question.measured and wishes.objective == "time":
        best.sort(key=lambda each: each.step_time_s)  # what was measured replaces a prediction
    chosen = best
    limit = found.limit_bytes
    if question.layout is not None:
        chosen = [_finished(question, estimate(job, question.layout), sharpened)]
        if chosen[0].verdict == "tight":
            limit = _memory_bytes(question)
    result: Answer = {
        "model": _model(question),
        "cluster": _cluster(job.cluster),
        "job": {
            **_job(question),
            "memory_limit_bytes": limit,
            "measured": measured,
            "measured_factor": factor,
        },
        "search": {
            "layouts": found.counted,
            "legal": found.legal,
            "fit": found.fit,
            "skipped": found.skipped,
            "near": TIE_TOLERANCE,
            "seconds": found.seconds,
        },
        "layouts": [_layout(question, each) for each in chosen],
        "best_found": None,
        "order": None,
        "neighbours": [],
        "changes": [],
        "nothing_fits": None,
        "notes": [*question.notes, *found.notes, *_doubts(measured)],
    }
    if not best:
        result["nothing_fits"] = asdict(shortage(job, wishes, limit, found.closest))
    if chosen:
        _explain(result, question, chosen, limit)
    if question.layout is not None:
        _compare(result, question, chosen[0], best, limit)
    return result


def job_of(question: PlanRequest, layout: Layout) -> Job:
    """The job on the devices that a layout uses, which may be fewer than there are."""
    if layout.world_size == question.job.cluster.num_devices:
        return question.job
    cluster = question.job.cluster.with_devices(layout.world_size)
    return replace(question.job, cluster=cluster)


def refuse_unsavable(question: PlanRequest, path: str) -> None:
    """UserError for a plan that could not be saved, whatever the answer is."""
    from fivefold.plan import planfile  # pydantic, which only a plan file needs

    if question.model is None:
        raise UserError(
            "a model that only Megatron's arguments describe cannot be saved: describe it with "
            "--dims, and give --layout"
        )
    planfile.refuse_unwritable(path)


def plan_file(question: PlanRequest, result: Answer) -> PlanFile:
    """The first layout of an answer as a plan file. UserError where there is none."""
    assert question.model is not None, "see refuse_unsavable"
    if not result["layouts"]:
        raise UserError("nothing fits, so that there is no plan to save")
    from fivefold.plan.planfile import PlanFile, Predicted  # pydantic, which only this needs

    first, job = result["layouts"][0], question.job
    names = ("step_time_s", "tokens_per_s_per_device", "mfu", "peak_memory_bytes")
    return PlanFile(
        layout=first["layout"],
        model=question.model,
        cluster=question.cluster,
        gpus=parse(first["layout"]).world_size,
        gpus_per_node=job.cluster.tiers[0].size or 8,
        sequence_length=job.sequence_length,
        global_batch=job.global_batch,
        precision=job.precision,  # pyright: ignore[reportArgumentType]  # pydantic checks it
        mtp=job.mtp,
        predicted=Predicted(**{name: float(first[name]) for name in names}),
    )


# What was asked


def _model(question: PlanRequest) -> Answer:
    job, config = question.job, question.job.config
    counts = count_parameters(config, mtp=job.mtp)

    def flops(causal: bool) -> int:
        return flops_per_token(config, job.sequence_length, causal, mtp=job.mtp)

    return {
        "name": question.name,
        "family": config.family,
        "total_params": counts.total,
        "active_params": counts.active,
        "flops_per_token": flops(causal=True),
        "flops_per_token_full_attention": flops(causal=False),
        "layers": config.num_layers,
        "mtp_params": counts.mtp,
    }


def _cluster(cluster: Cluster) -> Answer:
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


def _job(question: PlanRequest) -> Answer:
    job, wishes = question.job, question.wishes
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
        "objective": wishes.objective,
        "fix": wishes.fix,
        "forbid": wishes.forbid,
        "tokens": question.tokens,
        "checkpoint_bytes": checkpoint_bytes(job),
        "loading_bytes": loading_bytes(job.config, node),
    }


# What was measured


def _measured(question: PlanRequest) -> tuple[list[Answer], MeasurementCalibration]:
    """The steps that were measured beside their prediction, and what they say of all times. What
    all layouts share, such as clocks or a network below its data sheet, is then out of the way;
    their order stays."""
    rows: list[Answer] = []
    for layout, measured_s in question.measured:
        _refuse_illegal(question.job, layout)
        predicted_s = estimate(question.job, layout).step_time_s
        rows.append(
            {
                "layout": str(layout),
                "step_time_s": measured_s,
                "predicted_step_time_s": predicted_s,
                "ratio": measured_s / predicted_s,
            }
        )
    return rows, calibrate_with_measurements(
        [(row["step_time_s"], row["predicted_step_time_s"]) for row in rows]
    )


SURPRISING = 3.0
"""Times that a measured step is longer or shorter than predicted from which on it is doubted."""


def _doubts(measured: list[Answer]) -> Iterator[str]:
    for row in measured:
        if not 1 / SURPRISING <= row["ratio"] <= SURPRISING:
            yield (
                f"{row['layout']} was measured to take {row['ratio']:.3g} x what is predicted: see "
                "whether batch, sequence length and precision are those of the measured run"
            )


def _memory_bytes(question: PlanRequest) -> float:
    """What counts as the memory of a device."""
    return question.wishes.max_memory_bytes or float(question.job.cluster.device.memory_bytes)


def _verdict(question: PlanRequest, peak_bytes: float) -> str:
    """By the limit that was asked for, where one was."""
    if question.wishes.headroom is not None and peak_bytes > question.wishes.limit_bytes(
        question.job
    ):
        return "no"
    return str(verdict(peak_bytes, _memory_bytes(question)))


def _finished(question: PlanRequest, each: Estimate, sharpened: MeasurementCalibration) -> Estimate:
    """The estimate with what the options say of it: a layout that was measured takes what was
    measured, the seconds of the others are sharpened."""
    own = [seconds for layout, seconds in question.measured if layout == each.layout]
    if own:
        factor, low, high = sum(own) / len(own) / each.step_time_s, min(own), max(own)
    else:
        factor = sharpened.factor
        job = job_of(question, each.layout)
        low, high = sharpened.interval(job, each.layout, each.step_time_s)
    each = replace(each, verdict=_verdict(question, each.peak_memory_bytes))
    return _scaled(each, factor, low, high)


def _scaled(each: Estimate, factor: float, low: float, high: float) -> Estimate:
    """The estimate with all its seconds times a factor; `low` and `high` are its interval."""
    rates = ("tokens_per_s_per_device", "model_flops_per_s_per_device", "mfu", "mfu_full_attention")
    return replace(
        each,
        step_time_s=each.step_time_s * factor,
        step_time_low_s=low,
        step_time_high_s=high,
        **{name: getattr(each, name) / factor for name in rates},
        seconds={name: seconds * factor for name, seconds in each.seconds.items()},
        stages=[
            replace(stage, forward_s=stage.forward_s * factor, backward_s=stage.backward_s * factor)
            for stage in each.stages
        ],
        ledger=[
            replace(row, time_s=row.time_s * factor, exposed_s=row.exposed_s * factor)
            for row in each.ledger
        ],
    )


# One layout


def _layout(question: PlanRequest, each: Estimate) -> Answer:
    job = question.job
    step_tokens = job.global_batch * job.sequence_length
    hours = None
    if question.tokens is not None:
        hours = question.tokens / step_tokens * each.step_time_s / 3600
    return {
        "layout": str(each.layout),
        "meaning": each.layout.describe(),
        "devices": each.layout.world_size,
        "step_time_s": each.step_time_s,
        "step_time_low_s": each.step_time_low_s,
        "step_time_high_s": each.step_time_high_s,
        "tokens_per_s_per_device": each.tokens_per_s_per_device,
        "model_flops_per_s_per_device": each.model_flops_per_s_per_device,
        "mfu": each.mfu,
        "mfu_full_attention": each.mfu_full_attention,
        "bubble_fraction": each.bubble_fraction,
        "peak_memory_bytes": each.peak_memory_bytes,
        "peak_memory_low_bytes": each.peak_memory_low_bytes,
        "peak_memory_high_bytes": each.peak_memory_high_bytes,
        "worst_stage": each.worst_stage,
        "verdict": each.verdict,
        "memory_bytes": each.memory_bytes,
        "seconds": each.seconds,
        "stages": [asdict(stage) for stage in each.stages],
        "ledger": [asdict(row) for row in each.ledger],
        "placement": each.placement,
        "training_hours": hours,
        "device_hours": None if hours is None else hours * each.layout.world_size,
        "why": [],
    }


# Why


def _explain(result: Answer, question: PlanRequest, chosen: list[Estimate], limit: float) -> None:
    """The first layout against what it could be instead, the others against the first."""
    first = chosen[0]
    job = job_of(question, first.layout)
    tiers = [tier.name for tier in job.cluster.tiers]
    around = explain.neighbours(job, first.layout, limit)
    result["order"] = asdict(explain.found_order(first.ledger, tiers))
    result["neighbours"] = [_neighbour(question, first, each) for each in around]
    result["changes"] = [asdict(each) for each in explain.changes(job, first.layout, around, limit)]
    result["layouts"][0]["why"] = [asdict(r) for r in explain.reasons(job, first.layout, limit)]
    for entry, other in zip(result["layouts"][1:], chosen[1:], strict=True):
        entry["why"] = [asdict(_difference("the first", first, other))]


def _neighbour(question: PlanRequest, first: Estimate, each: explain.Neighbour) -> Answer:
    """With seconds as those of the first layout are, and the verdict that it would get itself."""
    if each.step_time_ratio is None or each.peak_memory_bytes is None:
        return asdict(each)
    tight = each.verdict == "no" and _verdict(question, each.peak_memory_bytes) == "tight"
    seconds = each.step_time_ratio * first.step_time_s
    return asdict(replace(each, step_time_s=seconds, verdict="tight" if tight else each.verdict))


def _difference(name: str, first: Estimate, other: Estimate) -> explain.Justification:
    """What costs another layout most against the first."""
    ratio = other.step_time_s / first.step_time_s
    text = f"{ratio:.3f} x the step of {name}"
    if named := largest_differences(first, other):
        text += f": {', '.join(named)}"
    memory = other.peak_memory_bytes - first.peak_memory_bytes
    if abs(memory) >= 1e9:
        text += f"; {gb(abs(memory))} {'more' if memory > 0 else 'less'} memory"
    return explain.Justification("layout", f"{text}.", other.peak_memory_bytes, ratio)


# One layout that was asked about


def _refuse_illegal(job: Job, layout: Layout) -> None:
    """UserError with every rule that the layout breaks, the first ones first."""
    devices = job.cluster.num_devices
    broken = violations(layout, job.config, job.sequence_length, devices, running=False)
    if broken:
        raise UserError(f"{layout} is not legal: {'; '.join(broken)}")


def _compare(
    result: Answer, question: PlanRequest, asked: Estimate, best: list[Estimate], limit: float
) -> None:
    """Says of the one layout whether it fits and what the best found would cost."""
    why = result["layouts"][0]["why"]
    if asked.verdict == "no":
        needs = gb(asked.peak_memory_bytes)
        available = explain.available_clause(limit)
        text = f"It does not fit: stage {asked.worst_stage} needs {needs} {available}."
        why.insert(0, asdict(explain.Justification("memory", text, asked.peak_memory_bytes)))
    if not best:
        return
    first = best[0]
    result["best_found"] = _layout(question, first)
    if first.layout == asked.layout:
        why.insert(
            0, asdict(explain.Justification("layout", "It is the best that the search finds."))
        )
    else:
        why.insert(0, asdict(_difference(f"the best found ({first.layout})", first, asked)))
