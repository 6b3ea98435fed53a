"""The list of a layer's operations is the program's: same weights, same FLOPs, no part left out."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fivefold.model
from fivefold.layout.batch import LayoutBatch
from fivefold.layout.notation import Layout, parse
from fivefold.model.config import LayerKind, ModelConfig
from fivefold.model.huggingface.presets import load_preset
from fivefold.model.weights import layer_weights
from fivefold.parallel.workload import rank_work
from fivefold.plan.operations.layer import layer_operations
from fivefold.plan.operations.operation import Operation
from fivefold.plan.operations.sizes import Sizes, structures
from fivefold.plan.time.operations import head_operations
from fivefold.verify.trace import _job, trace
from tests.verify.test_trace import MODELS

LENGTH = 384


def operations_of(
    config: ModelConfig, layout: Layout, kind: LayerKind, length: int = LENGTH
) -> tuple[list[Operation], range]:
    job, batch = _job(config, layout, length, "bf16"), LayoutBatch.of([layout])
    (work, *_) = rank_work(config, layout, length, 0, "bf16")
    (structure,) = structures(job, batch)
    return layer_operations(Sizes(job, batch, work, structure), kind)


# Weights and modules


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_of_a_layer_has_an_operation(name: str) -> None:
    config = MODELS[name]
    for kind in dict.fromkeys(config.layer_kinds):
        names = [weight.name.removesuffix(".weight") for weight in layer_weights(config, kind)]
        names = [weight for weight in names if not weight.endswith("bias")]  # with their matrices
        norms = [weight for weight in names if weight.endswith("norm")]
        used, _ = operations_of(config, parse("tp1"), kind)
        assert len(norms) == sum(each.kind == "norm" for each in used)
        matrices = [weight.split(".", 1)[-1] for weight in names if weight not in norms]
        assert sorted(matrices) == sorted(weight for each in used for weight in each.weights)


IN_THE_LIST = {"RMSNorm", "Attention", "MLP", "Experts", "MoE", "Layer"}
OUTSIDE_LAYERS = {"Embedding", "Body", "Stage"}


def test_a_module_without_operations_is_noticed() -> None:
    """A new kind of layer needs its operations in plan/operations, and its name here."""
    found = set()
    for module in pkgutil.walk_packages(fivefold.model.__path__, "fivefold.model."):
        members = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        found |= {
            name
            for name, each in members
            if issubclass(each, nn.Module) and each.__module__.startswith("fivefold.")
        }
    assert found == IN_THE_LIST | OUTSIDE_LAYERS


# FLOPs


class Flops(TorchDispatchMode):
    """Floating-point operations of the matrix products and of attention's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "_grouped_mm"):
            self.products += 2 * args[0].numel() * args[1].shape[-1]
        elif name in ("addmm", "addmm_"):
            self.products += 2 * args[1].numel() * args[2].shape[-1]
        elif name == "_scaled_dot_product_flash_attention":
            self.attention += self._scores(*args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _scores(q: Tensor, k: Tensor, v: Tensor, dropout=0.0, causal=False, *_) -> int:
        scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        return 2 * scores * (q.shape[3] + v.shape[3]) // (2 if causal else 1)


def expected_flops(config: ModelConfig, layout: Layout, rank: int, length: int) -> np.ndarray:
    """Of the products and of attention's forward passes on one rank, in one step."""
    total = np.zeros(2)
    for work in rank_work(config, layout, length, rank, "bf16"):
        for (kind, count), recomputed in zip(work.layers, work.recomputed, strict=True):
            used, _ = operations_of(config, layout, kind, length)
            products = sum(float(np.sum(p.flops)) for each in used for p in each.products)
            scores = sum(float(np.sum(each.attention.flops)) for each in used if each.attention)
            again = count if layout.recompute == "selective" else recomputed
            total += [products * (3 * count + recomputed), scores * (count + again)]
        if work.last:
            job = _job(config, layout, length, "bf16")
            head = head_operations(job, LayoutBatch.of([layout]))
            total[0] += 3 * float(np.sum(head.flops))
    return total * layout.accumulation


LAYOUTS = [
    ("dense", "tp2 sp dp2 zero3 ga2 recompute=full"),
    ("two kv heads", "tp4 pp2 ulysses3 ga2"),
    ("tied", "pp2 ring3 dp2 recompute=selective schedule=zb-h1 ga2"),
    ("dense", "pp2 vpp2 ulysses2 ring2 ga4 schedule=zb-v"),
    ("mixture", "tp2 dp4 ep4 zero1"),
    ("shared expert", "tp2 sp dp2 ep2 etp2 recompute=full"),
]


def assert_same_flops(config: ModelConfig, text: str, length: int) -> None:
    layout = parse(text)
    counter = Flops()
    with counter:
        trace(config, layout, length, "bf16", 0)
    found = np.array([counter.products, counter.attention], float)
    np.testing.assert_allclose(found, expected_flops(config, layout, 0, length), rtol=1e-9)


@pytest.mark.parametrize(("name", "text"), LAYOUTS)
def test_the_program_computes_what_the_list_says(name: str, text: str) -> None:
    config = replace(MODELS[name], vocab_size=1008)  # which all degrees of tp divide
    assert_same_flops(config, text, LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "text"),
    [
        ("llama-3.1-8b", "tp4 sp dp4 zero3 ulysses2 ring2 mb2 ga2 recompute=full"),
        ("qwen3-30b-a3b", "tp4 sp dp8 ep8 zero1 ulysses4 mb2"),
    ],
)
def test_real_sizes_compute_what_the_list_says(preset: str, text: str) -> None:
    torch.set_num_threads(1)
    assert_same_flops(load_preset(preset), text, 4096)
