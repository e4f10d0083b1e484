"""The experts' two kernels on this machine's GPUs, from one process: right, under replay, and how fast.

    PYTHONPATH=src python tests/gpu/check_experts.py [--ranks 4] [--time] [--out FILE]

A rank is a stream on a GPU of its own, or on its part of one (``peerlane.device.host.local``). For each case: three calls with new
contents and random routing against float32, then a graph of all ranks' calls replayed, with contents that change. ``--time`` adds the
time of a replay. Every failure names the wait that ran out. Exits with 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from check_kernels import captured, faults_told

from peerlane.device.host.local import LocalRanks
from peerlane.device.moe.layer import ExpertLayer, ExpertSizes
from peerlane.hardware.environment import record

BF16 = torch.bfloat16
TOLERANCE = 0.02
"""Of the largest absolute value of a result: two roundings to bfloat16, of the layer between and of the rows that come home."""
REPLAYS, TIMEOUT_S = 50, 3.0


class Mixture(NamedTuple):
    """Sizes of one case; ``own`` sets of weights on each rank."""

    name: str
    tokens: int
    h: int
    inner: int
    own: int
    k: int


SMALL = (Mixture("small", 96, 64, 32, 1, 2), Mixture("ragged", 201, 200, 104, 3, 2))
PUBLIC = (Mixture("49 pkb", 1024, 1024, 128, 1, 2), Mixture("50 pkb", 1024, 1024, 128, 2, 2))
PRODUCTION = (Mixture("Mixtral 8x7B", 2048, 4096, 14336, 1, 2), Mixture("DeepSeek-V3, 16 experts a rank", 1024, 7168, 2048, 16, 8))


class Contents:
    """One draw for all ranks: tokens, routing and weights of the sum; and what comes of them."""

    def __init__(self, ranks: LocalRanks, case: Mixture, layers: list[tuple[torch.Tensor, ...]]) -> None:
        count = len(ranks.groups)
        self.x, self.experts, self.weights, self.answers = [], [], [], []
        for group in ranks.groups:
            at = group.device
            self.x.append(torch.randn(case.tokens, case.h, device=at).to(BF16))
            self.experts.append(torch.rand(case.tokens, count * case.own, device=at).topk(min(case.k, count * case.own)).indices)
            self.weights.append(torch.rand(self.experts[-1].shape, device=at).to(BF16))
            answer = torch.zeros(case.tokens, case.h, device=at)
            for expert in range(count * case.own):
                gate, up, down = (
                    layer.view(case.own, -1, layer.shape[1])[expert % case.own].to(at) for layer in layers[expert // case.own]
                )
                chosen = self.experts[-1] == expert
                token = chosen.any(1).nonzero().flatten()
                x = self.x[-1][token]
                rows = F.linear((F.silu(F.linear(x, gate).float()) * F.linear(x, up).float()).to(BF16), down)
                answer.index_add_(0, token, rows.float() * (self.weights[-1].float() * chosen).sum(1)[token].unsqueeze(1))
            self.answers.append(answer)

    def worst(self, got: list[torch.Tensor]) -> float:
        errors = [(one.float() - answer).abs().max() / answer.abs().max() for one, answer in zip(got, self.answers, strict=True)]
        return max(float(error) for error in errors)


def check(ranks: LocalRanks, case: Mixture, timed: bool) -> dict[str, object]:
    count = len(ranks.groups)
    layers = []
    for group in ranks.groups:
        shapes = ((case.inner, case.h), (case.inner, case.h), (case.h, case.inner))
        layers.append(tuple((torch.randn(case.own * m, n, device=group.device) / n**0.5).to(BF16) for m, n in shapes))
    k = min(case.k, count * case.own)
    sizes = ExpertSizes(case.tokens, k, case.h, case.inner, case.own, 1, BF16)
    made = [ExpertLayer(group, sizes, TIMEOUT_S) for group in ranks.each()]

    def call(rank: int, contents: Contents) -> torch.Tensor:
        return made[rank](contents.x[rank], contents.experts[rank], contents.weights[rank], layers[rank])

    def synchronize() -> None:
        for gpu in range(ranks.gpus):
            torch.cuda.synchronize(gpu)

    errors = []
    for _ in range(3):
        contents = Contents(ranks, case, layers)
        synchronize()
        got = [call(group.rank, contents) for group in ranks.each()]
        ranks.synchronize()
        errors.append(contents.worst(got))
    outputs: dict[int, torch.Tensor] = {}

    def launch(_: int, rank: int) -> None:
        outputs[rank] = call(rank, contents)

    graphs = [captured(ranks, launch, 0, group.rank) for group in ranks.groups]
    new = Contents(ranks, case, layers)
    for rank in range(count):
        for name in ("x", "experts", "weights"):
            getattr(contents, name)[rank].copy_(getattr(new, name)[rank])
    synchronize()
    begin = time.perf_counter()
    for _ in range(REPLAYS):
        for group in ranks.each():
            graphs[group.rank].replay()
    ranks.synchronize()
    spent = (time.perf_counter() - begin) / REPLAYS
    errors.append(new.worst([outputs[rank] for rank in range(count)]))
    row: dict[str, object] = {**case._asdict(), "ranks": count, "errors": [round(error, 5) for error in errors]}
    row["tilings"] = [f"{tiling.rows}x{tiling.columns}" for tiling in made[0].tilings]
    if timed:
        flops = 2 * 3 * case.tokens * k * case.h * case.inner * count
        row |= {"us": round(spent * 1e6, 1), "tflops_of_a_gpu": round(flops / spent / 1e12 / ranks.gpus, 1)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ranks, rows = LocalRanks(options.ranks), []
    with faults_told():
        for case in SMALL + PUBLIC + (PRODUCTION if options.time else ()):
            rows.append(row := check(ranks, case, options.time))
            wrong = not all(error < TOLERANCE for error in row["errors"])  # type: ignore[attr-defined]
            print("FAIL" if wrong else "ok  ", json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": record(), "gpus": ranks.gpus, "rows": rows}, indent=1))
    sys.exit(any(not all(error < TOLERANCE for error in row["errors"]) for row in rows))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
