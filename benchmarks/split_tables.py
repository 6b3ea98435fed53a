"""The tables of docs/: what each split sends, measured on real processes.

    python -m benchmarks.split_tables

Runs `fivefold check` on a tiny model in each layout of `CASES`, 1 to 8 local processes, and
writes what was sent between the markers `<!-- begin: NAME -->` and `<!-- end: NAME -->` of the
pages. Nothing is written unless every layout computes what one process does and sends, row by
row, what arithmetic predicts. tests/test_docs.py holds the pages to the prediction ever after.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pages
from fivefold.layout.notation import Layout, parse
from fivefold.layout.stages import split_layers
from fivefold.model.config import ModelConfig
from fivefold.model.counts import layer_parameters
from fivefold.model.huggingface.load import load_config
from fivefold.parallel.cost import ledger
from fivefold.parallel.workload import ELEMENT_BYTES
from fivefold.train.runfile import Run
from fivefold.verify.check import check
from fivefold.verify.ledgers import compare_ledgers

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PRECISION = "bf16"
"""So that 2 bytes of an activation can be told from 4 bytes of a gradient."""
SEQUENCE_LENGTH = 64
STEPS = 1

DENSE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TIED = DENSE | {"tie_word_embeddings": True}
MIXTURE = DENSE | {
    "model_type": "mixtral",
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}


@dataclass(frozen=True)
class Case:
    """One layout that is run, and the page that shows what it sent."""

    name: str  # of the table's markers
    page: str
    model: dict[str, Any]
    layout: str

    @property
    def parsed(self) -> Layout:
        return parse(self.layout)

    @property
    def config(self) -> ModelConfig:
        return load_config(self.model)


CASES = [
    Case("zero0", "splits/data.md", DENSE, "dp2 ga2"),
    Case("zero1", "splits/data.md", DENSE, "dp2 zero1 ga2"),
    Case("zero2", "splits/data.md", DENSE, "dp2 zero2 ga2"),
    Case("zero3", "splits/data.md", DENSE, "dp2 zero3 ga2"),
    Case("hsdp", "splits/data.md", DENSE, "dp4 dp_replicate2 zero3 ga2"),
    Case("pipeline", "splits/pipeline.md", TIED, "pp2 ga4"),
    Case("tensor", "splits/tensor.md", DENSE, "tp2 ga2"),
    Case("sp", "splits/tensor.md", DENSE, "tp2 sp ga2"),
    Case("ulysses", "splits/sequence.md", DENSE, "ulysses2 ga2"),
    Case("ring", "splits/sequence.md", DENSE, "ring2 ga2"),
    Case("usp", "splits/sequence.md", DENSE, "ulysses2 ring2 ga2"),
    Case("expert", "splits/expert.md", MIXTURE, "dp2 ep2 ga2"),
    Case("etp", "splits/expert.md", MIXTURE, "tp2 dp2 ep2 etp2 ga2"),
    Case("five", "splits.md", MIXTURE, "tp2 sp pp2 dp2 ep2 ga2"),
]

Rows = list[dict[str, Any]]
"""As of `fivefold.verify.ledgers.compare_ledgers`: an average rank of each pipeline rank."""


# --- what was sent -----------------------------------------------------------------------------


def predicted_rows(case: Case) -> Rows:
    """What arithmetic says, without a process."""
    layout = case.parsed
    predicted = [
        ledger(case.config, layout, SEQUENCE_LENGTH, rank, PRECISION)
        for rank in range(layout.world_size)
    ]
    rows, _ = compare_ledgers(case.config, layout, SEQUENCE_LENGTH, PRECISION, predicted)
    return rows


def measured_rows(case: Case, cache: str) -> Rows:
    """What a real run sent, which is what arithmetic says: anything else ends this program."""
    run = Run.model_validate(
        {
            "model": case.model,
            "data": {
                "files": [str(ROOT / "LICENSE")],  # any text will do
                "sequence_length": SEQUENCE_LENGTH,
                "cache": cache,
            },
            "layout": case.layout,
            "global_batch": case.parsed.global_batch,
            "steps": STEPS,
            "optimizer": {"lr": 1e-3},
            "precision": PRECISION,
            "device": "cpu",
            "folder": ROOT,
        }
    )
    report = check(run, STEPS)
    if not report.ok:
        sys.exit(f"{case.name} ({case.layout}) is not the same: {report.as_dict()}")
    return report.ledger


# --- a table of one layout ---------------------------------------------------------------------


def ledger_table(case: Case, rows: Rows) -> str:
    """Markdown: one row a transfer, a table for each pipeline rank."""
    processes = case.parsed.world_size
    parts = [f"`{case.layout}` on {processes} processes, one optimizer step of one rank:"]
    for pp_rank in range(case.parsed.pp):
        own = [row for row in rows if row["pp_rank"] == pp_rank]
        if case.parsed.pp > 1:
            parts.append(f"Pipeline rank {pp_rank}:")
        parts.append(_table(own))
    return "\n\n".join(parts)


def _table(rows: Rows) -> str:
    lines = [
        "| split | phase | operation | group | payload of a call, bytes | calls | wire, bytes |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        payload = _number(row["payload_bytes"]) + (" (mean)" if row["routed"] else "")
        cells = [
            row["split"],
            row["phase"],
            f"`{row['op']}`",
            str(row["group_size"]),
            payload,
            _number(row["measured_calls"]),
            _number(row["measured_wire_bytes"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.12g}"


# --- the table of all transfers ----------------------------------------------------------------


FORMULAS = """\
DP, ZeRO 0 | gradients of a layer | dp backward all_reduce | dp*c | 4*W | L | zero0
 | of the head and its norm | dp backward all_reduce | dp*c | 4*(V+1)*h | 1 | zero0
 | of the embedding | dp backward all_reduce | dp*c | 4*V*h | 1 | zero0
 | of a layer's experts | dp backward all_reduce | edp | 4*X | L | five
DP, ZeRO 1 | weights of a layer | dp forward all_gather | n | e*W | L | zero1
 | weights outside the layers | dp forward all_gather | n | e*O | 1 | zero1
 | gradients of a layer | dp backward reduce_scatter | n | 4*W | L | zero1
 | gradients outside the layers | dp backward reduce_scatter | n | 4*O | 1 | zero1
DP, ZeRO 2 | weights, as ZeRO 1 | dp forward all_gather | n | e*W | L | zero2
 | gradients of a layer | dp backward reduce_scatter | n | 4*W | m*L | zero2
 | gradients outside the layers | dp backward reduce_scatter | n | 4*O | m | zero2
DP, ZeRO 3 | weights of a layer | dp forward,backward all_gather | n | e*W | m*L | zero3
 | weights outside the layers | dp forward all_gather | n | e*O | m | zero3
 | gradients, as ZeRO 2 | dp backward reduce_scatter | n | 4*W | m*L | zero3
HSDP | shards of all gradients | dp optimizer all_reduce | dp_replicate | 4*(L*W + O)/n | 1 | hsdp
PP | hidden states, their gradients | pp forward,backward send | 2 | B | m | pipeline
 | the same with sp | pp forward,backward send | 2 | B/t | m | five
 | gradient of a tied embedding | pp optimizer all_reduce | 2 | 4*V*h/t | 1 | pipeline
TP | sums after attention, MLP, embedding | tp forward all_reduce | t | B | m*(2*L + 1) | tensor
 | sums before attention, MLP, head | tp backward all_reduce | t | B | m*(2*L + 1) | tensor
 | loss: row maxima | tp forward all_reduce | t | 4*T | m | tensor
 | loss: sums and target logits | tp forward all_reduce | t | 8*T | m | tensor
 | gradient of the routers | tp optimizer all_reduce | t | 4*L*E*h | 1 | etp
TP (sp) | into attention, MLP, head | tp forward all_gather | t | B | m*(2*L + 1) | sp
 | out of attention, MLP, embedding | tp forward reduce_scatter | t | B | m*(2*L + 1) | sp
 | gradients, and the inputs again | tp backward all_gather | t | B | m*(4*L + 2) | sp
 | gradients of the inputs | tp backward reduce_scatter | t | B | m*(2*L + 1) | sp
 | gradients of the norms | tp optimizer all_reduce | t | 4*(2*L + 1)*h | 1 | sp
CP ulysses | queries, output | cp forward,backward all_to_all | u | B*q/(h*t) | 2*m*L | ulysses
 | keys, values | cp forward,backward all_to_all | u | B*kv/(h*t) | 2*m*L | ulysses
CP ring | keys and values | cp forward,backward send | r | 2*B*kv/(h*t) | m*L*(r - 1) | ring
 | their gradients, in fp32 | cp backward send | r | 2*B*kv/(h*t)*4/e | m*L*(r - 1) | ring
CP usp | more tokens, fewer heads | cp forward,backward send | r | 2*B*kv/(h*t) | m*L*(r - 1) | usp
EP | tokens to experts, and back | ep forward,backward all_to_all | ep | k*B/t | 2*m*L | expert
 | how many tokens | ep forward all_to_all | ep | 8*E | m*L | expert
 | balance statistics | ep forward all_reduce | c*t | 4*b*E | m*L | five
EP, etp = tp | arrived tokens, gathered | ep forward,backward all_gather | t | k*B | m*L | etp
 | partial results, summed | ep forward,backward reduce_scatter | t | k*B | m*L | etp
 | how many tokens | ep forward all_gather | t | 8*E*t | m*L | etp
EP in TP, no sp | slices, joined | ep forward,backward all_gather | t | B | m*L | etp
all | loss, tokens, balance loss, squared norm | world optimizer all_reduce | N | 32 | 1 | five
"""
"""All transfers: split | what | split, phases, operation in the ledger | group | payload | calls |
case. An empty split is the one above; letters are those of `symbols`."""


def symbols(case: Case, pp_rank: int) -> dict[str, float]:
    """What the letters of `FORMULAS` stand for on a rank; the page explains them."""
    config, layout = case.config, case.parsed
    layer = layer_parameters(config, config.layer_kinds[0])
    matrix, tied = config.vocab_size * config.hidden_size, config.tied_embeddings
    tokens = layout.micro_batch * SEQUENCE_LENGTH // layout.cp
    element_bytes = ELEMENT_BYTES[PRECISION]
    return {
        "b": layout.micro_batch,
        "e": element_bytes,
        "h": config.hidden_size,
        "V": config.vocab_size,
        "q": config.num_heads * config.head_dim,
        "kv": config.num_kv_heads * config.head_dim,
        "E": config.moe.num_experts if config.moe else 0,
        "k": config.moe.experts_per_token if config.moe else 0,
        "m": layout.accumulation,
        "L": split_layers(config.num_layers, layout.stages)[pp_rank],
        "t": layout.tp,
        "c": layout.cp,
        "u": layout.ulysses,
        "r": layout.ring,
        "n": layout.dp_shard * layout.cp,
        "dp": layout.dp,
        "dp_replicate": layout.dp_replicate,
        "ep": layout.ep,
        "edp": layout.edp,
        "N": layout.world_size,
        "T": tokens,
        "B": tokens * config.hidden_size * element_bytes,
        "W": layer.total - layer.routed_experts,
        "X": layer.routed_experts // (layout.ep * layout.etp),
        "O": matrix * (1 if tied else 2) + config.hidden_size,
    }


@dataclass(frozen=True)
class Formula:
    """A line of `FORMULAS`."""

    split: str
    what: str
    ledger_split: str
    phases: tuple[str, ...]
    op: str
    wanted: tuple[str, str, str]  # group, payload and calls, as expressions
    case: Case

    @staticmethod
    def read(line: str) -> Formula:
        split, what, transfer, group, payload, calls, name = map(str.strip, line.split("|"))
        ledger_split, phases, op = transfer.split()
        case = next(case for case in CASES if case.name == name)
        wanted = (group, payload, calls)
        return Formula(split, what, ledger_split, tuple(phases.split(",")), op, wanted, case)

    def measurement(self, rows: Rows) -> dict[str, Any]:
        """The row that it stands for. Each phase must have one, on some pipeline rank."""
        found = [next((row for row in rows if self._is(row, phase)), None) for phase in self.phases]
        if found[0] is None or None in found:
            raise ValueError(f"{self.case.layout} has no row as of {self}: {rows}")
        return found[0]

    def _is(self, row: Mapping[str, Any], phase: str) -> bool:
        if (row["split"], row["phase"], row["op"]) != (self.ledger_split, phase, self.op):
            return False
        values = symbols(self.case, row["pp_rank"])
        wanted = [eval(text, {"__builtins__": {}}, values) for text in self.wanted]
        return wanted == [row["group_size"], row["payload_bytes"], row["measured_calls"]]


def formula_table(rows_of: Mapping[str, Rows]) -> str:
    """Markdown: every transfer in symbols beside its measurement; `rows_of` by the name of a case.
    Raises ValueError where a formula does not give what was sent."""
    lines = [
        "| split | what | phase | operation | group | payload of a call, bytes | calls a step "
        "| measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for formula in map(Formula.read, FORMULAS.splitlines()):
        case, row = formula.case, formula.measurement(rows_of[formula.case.name])
        page = case.page if case.page != "splits.md" else "#the-five-together"
        calls, payload = _number(row["measured_calls"]), _number(row["payload_bytes"])
        cells = [
            formula.split,
            formula.what,
            ", ".join(formula.phases),
            f"`{formula.op}`",
            *(f"`{text.replace('*', '·')}`" for text in formula.wanted),
            f"{calls} × {payload} in [{case.layout}]({page})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- the pages ---------------------------------------------------------------------------------


def blocks(rows_of: Mapping[str, Rows]) -> dict[str, dict[str, str]]:
    """The text between the markers of each page: by page, then by name."""
    found: dict[str, dict[str, str]] = {"splits.md": {"transfers": formula_table(rows_of)}}
    for case in CASES:
        found.setdefault(case.page, {})[case.name] = ledger_table(case, rows_of[case.name])
    return found


def main() -> None:
    rows_of = {}
    with tempfile.TemporaryDirectory() as cache:
        for case in CASES:
            rows_of[case.name] = measured_rows(case, cache)
            print(f"{case.name}: {case.layout}: {len(rows_of[case.name])} rows, all as predicted")
    for name, contents in blocks(rows_of).items():
        pages.write(DOCS / name, contents)


if __name__ == "__main__":
    main()
