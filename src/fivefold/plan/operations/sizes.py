"""Sizes of the tensors of one micro-batch on one rank, for layouts of one structure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.batch import LayoutBatch
from fivefold.model.config import LayerKind, MoEConfig
from fivefold.model.weights import layer_weights
from fivefold.parallel.workload import FP32, RankWorkload
from fivefold.plan.engines import Job
from fivefold.plan.operations.operation import Bytes
from fivefold.plan.time.operations import tokens

INT64 = 8


@dataclass(frozen=True)
class Structure:
    """Which operations a layer consists of: the same for layouts whose degrees differ in size."""

    tp: bool
    sp: bool
    ring: int  # steps that differ: 1 to 4
    ulysses: bool
    repeated: bool  # are kv heads copied for the ulysses ranks?
    grouped: bool  # do several query heads share a kv head in the attention kernel?
    ep: bool
    etp: bool
    short: bool  # are elements shorter than those of fp32, so that arithmetic in fp32 needs copies?

    @property
    def routes_slices(self) -> bool:
        """Does each tp rank route a slice of the tokens that all of them have?"""
        return self.tp and not self.sp

    @property
    def dispatches(self) -> bool:
        """Are the experts on several ranks, so that rows are sent to them?"""
        return self.ep or self.etp


def structures(job: Job, layouts: LayoutBatch) -> dict[Structure, NDArray[np.int64]]:
    """The indices of the layouts of each structure."""
    heads = job.config.num_heads / layouts.tp
    kv_heads = job.config.num_kv_heads / np.minimum(layouts.tp, job.config.num_kv_heads)
    spread = kv_heads * np.maximum(1.0, layouts.ulysses / kv_heads)
    columns = (
        layouts.tp > 1,
        layouts.sp_degree > 1,
        np.minimum(layouts.ring, 4),
        layouts.ulysses > 1,
        layouts.ulysses > kv_heads,
        heads > 1.5 * spread,
        layouts.ep > 1,
        layouts.etp > 1,
    )
    code = np.zeros(len(layouts), np.int64)
    for column in columns:
        code = code * 5 + column
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    short = job.element_bytes < FP32
    found = {}
    for group, index in enumerate(first):
        flags = [column[index].item() for column in columns]
        structure = Structure(*flags, short)  # pyright: ignore[reportCallIssue]
        found[structure] = np.flatnonzero(number.reshape(-1) == group)
    return found


@dataclass(frozen=True)
class Sizes:
    """Bytes, arrays [layout], where no other unit is named."""

    job: Job
    layouts: LayoutBatch
    work: RankWorkload
    structure: Structure

    @property
    def element(self) -> int:
        return self.job.element_bytes

    @cached_property
    def tokens(self) -> Bytes:
        """Tokens on one context-parallel rank."""
        return tokens(self.job, self.layouts)

    @cached_property
    def held(self) -> Bytes:
        """Tokens per rank between layers: with sp a slice."""
        return self.tokens / self.layouts.sp_degree

    @cached_property
    def hidden(self) -> Bytes:
        """Hidden states between layers."""
        return self.element * self.job.config.hidden_size * self.held

    @cached_property
    def wide(self) -> Bytes:
        """Hidden states of all tokens here: gathered, or a product's partial sums."""
        return self.element * self.job.config.hidden_size * self.tokens

    @cached_property
    def gathered(self) -> Bytes:
        """Hidden states as megatron sequence parallelism gathers them, else nothing."""
        return self.wide if self.structure.sp else 0.0

    @cached_property
    def heads(self) -> Bytes:
        """Query heads on one rank."""
        return self.job.config.num_heads / self.layouts.tp

    @cached_property
    def query(self) -> Bytes:
        return self.element * self.tokens * self.heads * self.job.config.head_dim

    @cached_property
    def kv_heads(self) -> Bytes:
        """Key heads on one rank."""
        kv_heads = self.job.config.num_kv_heads
        return kv_heads / np.minimum(self.layouts.tp, kv_heads)

    @cached_property
    def key(self) -> Bytes:
        """Keys, or values, of all tokens here."""
        return self.element * self.tokens * self.kv_heads * self.job.config.head_dim

    @cached_property
    def spread_key(self) -> Bytes:
        """Keys as attention reads them: repeated where ulysses has more ranks than heads."""
        return self.key * np.maximum(1.0, self.layouts.ulysses / self.kv_heads)

    @cached_property
    def log_sums(self) -> Bytes:
        """One fp32 number per query and head."""
        return FP32 * self.tokens * self.heads

    @cached_property
    def angles(self) -> Bytes:
        """Cosine and sine in the compute precision; in fp32 the shared ones are read."""
        length = self.job.sequence_length / self.layouts.cp
        return self.structure.short * self.element * length * self.job.config.head_dim

    def fp32(self, size: Bytes) -> Bytes:
        """The same elements in fp32."""
        return size * (FP32 / self.element)

    def weight(self, name: str) -> Bytes:
        """Elements of a weight on one rank, by the end of its name."""
        return self._weights[name]

    @cached_property
    def _weights(self) -> dict[str, Bytes]:
        kinds = dict.fromkeys(LayerKind(kind.moe) for kind in self.job.config.layer_kinds)
        return {
            weight.name.removesuffix(".weight").split(".", 1)[-1]: self.work.sizes(weight).local
            for kind in kinds
            for weight in layer_weights(self.job.config, kind)
        }

    def sharded(self, expert: bool) -> NDArray[np.bool_]:
        """Does FSDP2 hold such weights?"""
        layouts = self.layouts
        shards = layouts.edp_shard if expert else layouts.dp_shard * layouts.cp
        return (layouts.zero > 0) & (shards > 1)

    @cached_property
    def adds_up(self) -> NDArray[np.bool_]:
        """Does autograd add to the gradients of earlier micro-batches? It does where FSDP2 leaves
        them whole and in the precision they have."""
        return (self.layouts.zero == 1) & (not self.structure.short)

    def waits(self, expert: bool, accumulated: bool) -> NDArray[np.bool_]:
        """Are gradients of such weights held until FSDP2 reduces their unit? Not those that a
        buffer or autograd adds up one by one."""
        return self.sharded(expert) & ~(self.adds_up & accumulated)

    # Mixtures

    @property
    def moe(self) -> MoEConfig:
        assert self.job.config.moe is not None
        return self.job.config.moe

    @cached_property
    def routed(self) -> Bytes:
        """Tokens that one rank routes."""
        return self.tokens / self.layouts.tp

    @cached_property
    def copies(self) -> Bytes:
        """Copies of these tokens, one for each chosen expert."""
        return self.routed * self.moe.experts_per_token

    @cached_property
    def arrived(self) -> Bytes:
        """Copies that arrive at the busiest rank."""
        return self.copies * self.job.busiest(self.layouts.ep)

    @cached_property
    def assembled(self) -> Bytes:
        """Copies that its experts work on, with those that arrived at its tp peers."""
        return self.arrived * self.layouts.etp

    def rows(self, count: Bytes) -> Bytes:
        """Hidden states of `count` tokens."""
        return self.element * self.job.config.hidden_size * count

    @cached_property
    def expert_width(self) -> Bytes:
        width = self.moe.expert_intermediate_size / self.layouts.etp
        return self.element * width * self.assembled
