"""The language that cost, run and report share: what one rank sends in one optimizer step.

The payload of a call is the size of one tensor, so that it can be counted by whoever issues the
call and computed by whoever knows the shapes:

| op               | payload: bytes of ...                                                |
| ---------------- | -------------------------------------------------------------------- |
| `all_reduce`     | the tensor (it has the same size before and after)                   |
| `all_gather`     | the gathered tensor that is handed out                               |
| `reduce_scatter` | the full tensor that is handed in                                    |
| `all_to_all`     | the tensor on the side of the rank whose tokens they are: handed in  |
|                  | where tokens leave (dispatch), handed out where they come back       |
| `send`           | the message; counted by the sender only                              |

Where routing decides how many rows an expert's rank receives, no rank can know its payload
beforehand, but the mean over the group's ranks is fixed. Such transfers are `routed`; their
payload is a mean, over calls and (in a merged ledger) over ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fivefold.arrays import Elementwise

SPLITS = ("dp", "pp", "tp", "cp", "ep", "world")
"""Whose traffic it is; Megatron's sequence parallelism is part of tp. `world` is the one tiny
message per step that sums loss and norm."""
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Transfer:
    """`calls` equal messages of one rank in one optimizer step.

    Group size, payload and calls are numbers, or arrays [n] over layouts (which no `Ledger` takes);
    a message that does not happen has no calls. Costs say more than can be recorded: the axis of
    the group (see `layout.ranks.AXES`), and whether recomputation sends the message again.
    """

    split: str
    phase: str
    op: str
    group_size: Elementwise
    payload_bytes: Elementwise  # of one call
    calls: Elementwise
    routed: bool = False
    axis: str = field(default="", compare=False)
    is_recompute: bool = field(default=False, compare=False)

    @property
    def is_between_stages(self) -> bool:
        """Does it go along the pipeline, from one stage to the next?"""
        return self.axis == "pp" and self.op == "send"

    @property
    def total_bytes(self) -> Elementwise:
        """Payload of all calls."""
        return self.payload_bytes * self.calls

    @property
    def wire_bytes(self) -> Elementwise:
        """Bytes that leave this rank in all calls, by the ring or direct algorithm.

        Ring all-reduce 2(n-1)/n of the payload; ring all-gather and reduce-scatter and direct
        all-to-all (n-1)/n; a send is sent once (Thakur et al. 2005, section 4).
        """
        n = self.group_size
        share = {"all_reduce": 2 * (n - 1) / n, "send": 1.0}.get(self.op, (n - 1) / n)
        return share * self.total_bytes


class Ledger:
    """Transfers of one rank in one step; equal ones are counted, not listed."""

    def __init__(self, transfers: Iterable[Transfer] = ()) -> None:
        self._calls: dict[tuple, float] = defaultdict(float)
        self._bytes: dict[tuple, float] = defaultdict(float)
        for transfer in transfers:
            self.add(transfer)

    def add(self, transfer: Transfer) -> None:
        if transfer.calls == 0 or transfer.group_size == 1:
            return
        # Routed payloads differ from call to call: one row holds them all.
        size = None if transfer.routed else transfer.payload_bytes
        key = (transfer.split, transfer.phase, transfer.op, transfer.group_size, size)
        self._calls[key] += transfer.calls
        self._bytes[key] += transfer.total_bytes

    def __iter__(self) -> Iterator[Transfer]:
        def order(key: tuple) -> tuple:
            split, phase, op, group_size, size = key
            return SPLITS.index(split), PHASES.index(phase), op, group_size, size or 0

        for key in sorted(self._calls, key=order):
            split, phase, op, group_size, size = key
            calls = self._calls[key]
            payload = self._bytes[key] / calls
            yield Transfer(split, phase, op, group_size, payload, calls, routed=size is None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and not self.differences(other)

    def differences(self, other: Ledger) -> list[tuple[Transfer | None, Transfer | None]]:
        """Pairs of rows (mine, other's) that are not the same; None where one has no such row."""
        return [(a, b) for a, b in self.align(other) if a != b]

    def align(self, other: Ledger) -> list[tuple[Transfer | None, Transfer | None]]:
        """All rows of both, paired: (mine, other's)."""

        def key(t: Transfer) -> tuple:
            size = None if t.routed else t.payload_bytes
            return t.split, t.phase, t.op, t.group_size, size

        mine = {key(t): t for t in self}
        others = {key(t): t for t in other}
        keys = list(dict.fromkeys([*mine, *others]))
        return [(mine.get(k), others.get(k)) for k in keys]

    @staticmethod
    def mean(ledgers: list[Ledger]) -> Ledger:
        """The ledger of an average rank. Ranks of one pipeline stage differ in routed rows only."""
        merged = Ledger()
        for ledger in ledgers:
            for key, calls in ledger._calls.items():
                merged._calls[key] += calls
                merged._bytes[key] += ledger._bytes[key]
        for key in merged._calls:  # divided once, so that a mean of whole numbers is exact
            merged._calls[key] /= len(ledgers)
            merged._bytes[key] /= len(ledgers)
        return merged
