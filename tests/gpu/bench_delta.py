"""The gated delta rule of problems 74 and 75 on one GPU: first against a recurrence in float64, then timed beside others.

    PYTHONPATH=src:tests/gpu python tests/gpu/bench_delta.py [--out FILE] [--check] [--sweep]

Checks: the chunked kernel token by token in float64, with ragged ends, on one rank and on two that share the GPU. Repeated
launches give the same bits. Times, each a replayed graph, in turns, the median of five stretches, on inputs larger than L2: the
chunked kernel, the token-serial one, and torch's matrix products in chunks (no graph). ``--check`` only checks. ``--sweep`` also
tries other shares of scanning blocks and other rings. Ends by itself after five minutes. Exits with 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from check_kernels import faults_told

from peerlane.device.host.local import LocalRanks
from peerlane.hardware.environment import record
from peerlane.problems import p074_kimi_delta_attention_cp_tp as kimi
from peerlane.problems import p075_gated_deltanet_ulysses_cp as gated
from peerlane.problems.families import delta
from peerlane.solutions.families import delta_chunks, delta_rule
from peerlane.solutions.families.delta_rule import DeltaInputs, gated_delta_rule

BF16, FP64 = torch.bfloat16, torch.float64
LIMIT_S, STRETCHES, STRETCH_S = 300, 5, 0.03
NORMWISE, OF_SCALE, RELATIVE = 1.75e-2, 20 * 2.0**-9, 2 * 2.0**-9  # as the problems allow
"""The problems' tolerances in bfloat16."""
HBM_BYTES_PER_S, FLOPS = 3.35e12, 989e12


@dataclasses.dataclass(frozen=True)
class Size:
    batch: int
    tokens: int
    heads: int
    key_heads: int
    depth: int
    values: int
    by_channel: bool

    def bytes(self) -> int:
        of_heads = self.heads * (2 * self.values + 1 + (self.depth if self.by_channel else 1))
        return 2 * self.batch * self.tokens * (2 * self.key_heads * self.depth + of_heads)

    def flops(self) -> int:
        return 6 * self.batch * self.tokens * self.heads * self.depth * self.values

    def bound_us(self) -> float:
        return max(self.bytes() / HBM_BYTES_PER_S, self.flops() / FLOPS) * 1e6


CHECKED = [
    Size(1, 1000, 4, 4, 128, 128, True),
    Size(2, 70, 3, 3, 24, 40, True),
    Size(1, 200, 40, 40, 128, 128, True),
    Size(1, 1000, 6, 3, 128, 128, False),
    Size(2, 200, 2, 2, 256, 512, False),
    Size(1, 129, 40, 20, 64, 72, False),
    Size(1, 64, 8, 8, 256, 512, False),
]
TIMED = [
    *(Size(1, tokens, 32, 32, 128, 128, True) for tokens in (256, 2048, 8192, 32768)),
    *(Size(1, tokens, 32, 16, 128, 128, False) for tokens in (256, 2048, 8192, 32768)),
    Size(4, 16384, 8, 8, 256, 512, False),
    Size(1, 256, 6, 6, 256, 512, False),
]
EXTREMES = {"fast": 40.0, "slow": -40.0}


def draw(size: Size, gate: float | None = None) -> DeltaInputs:
    """Inputs as the problems draw them: a quarter of the heads hardly forgets. ``gate``: of all decays."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda")

    rows, patient = (size.batch, size.tokens), slice(0, size.heads // 4)
    q, k = (normal(*rows, size.key_heads, size.depth).to(BF16) for _ in "qk")
    v = normal(*rows, size.heads, size.values).to(BF16)
    if size.by_channel:
        g, beta = normal(*rows, size.heads, size.depth) - 4, normal(*rows, size.heads)
        g[:, :, patient] -= 8
        beta[:, :, patient] -= 5
        a_log, dt_bias = 0.1 * normal(size.heads), 7 * torch.rand(size.heads * size.depth, device="cuda") - 4
    else:
        g, beta = normal(*rows, size.heads), torch.sigmoid(normal(*rows, size.heads) - 1)
        g[..., patient] -= 12
        beta[..., patient] *= 0.02
        a_log, dt_bias = torch.linspace(-6, 0, size.heads, device="cuda"), 0.5 * normal(size.heads)
    if gate is not None:
        g.fill_(gate)
    return DeltaInputs(q, k, v, g.to(BF16), beta.to(BF16), a_log.to(BF16), dt_bias.to(BF16))


def floor(size: Size) -> float:
    return 1e-12 if size.by_channel else 1e-6


def tokens_of(size: Size, x: DeltaInputs, work: torch.dtype) -> Callable[[slice], delta.Tokens]:
    problem = kimi if size.by_channel else gated
    return lambda part: problem.prepared((x.q, x.k, x.v, x.decay, x.beta), x.a_log, x.dt_bias, part, work)


def call(group: object, size: Size, x: DeltaInputs) -> torch.Tensor:
    return gated_delta_rule(group, x, by_channel=size.by_channel, floor=floor(size), sharded=False)  # type: ignore[arg-type]


def run_sharded(ranks: LocalRanks, size: Size, x: DeltaInputs) -> torch.Tensor:
    """All ranks' outputs of one call, put together; each has its part of the tokens."""
    world, outputs = len(ranks.groups), []
    rows = [[t.contiguous() for t in field.chunk(world, dim=1)] for field in (x.q, x.k, x.v, x.decay, x.beta)]
    torch.cuda.synchronize()
    for group in ranks.each():
        own = DeltaInputs(*(parts[group.rank] for parts in rows), x.a_log, x.dt_bias)
        outputs.append(call(group, size, own))
    ranks.synchronize()
    return torch.cat(outputs, dim=1)


def check(size: Size, world: int, ranks: LocalRanks, gate: str | None = None) -> bool:
    x = draw(size, None if gate is None else EXTREMES[gate])
    want = delta.recurrence(tokens_of(size, x, FP64)(slice(0, size.tokens))).transpose(1, 2)
    _, scale = delta.sized_delta_rule(tokens_of(size, x, FP64), [x.v], size.tokens, first=0)
    got = run_sharded(ranks, size, x)
    same = all(torch.equal(got, run_sharded(ranks, size, x)) for _ in range(50 if world == 1 else 10))
    error = (got.to(FP64) - want).abs()
    normwise = float(error.norm() / want.norm())
    allowed = OF_SCALE * scale.transpose(1, 2).clamp(min=1e-30) + RELATIVE * want.abs()
    of_tolerance = float((error / allowed).max())
    right = normwise <= NORMWISE and of_tolerance <= 1 and same
    facts = {"world": world, "gate": gate, "normwise": round(normwise, 5), "of_tolerance": round(of_tolerance, 4), "same_bits": same}
    print("ok  " if right else "FAIL", json.dumps({**dataclasses.asdict(size), **facts}), flush=True)
    if normwise > NORMWISE or not right:
        by_token = error.amax(dim=(0, 2, 3))
        print(
            "     errors by chunk:",
            [float(f"{part.max():.2g}") for part in by_token.split(64)][:20],
            "by head:",
            error.amax(dim=(0, 1, 3)).tolist()[:8],
        )
    return right


def graph_of(work: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def stretch(work: Callable[[], object], count: int) -> float:
    """Microseconds of a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count * 1e3


def bfloat16_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a.to(BF16), b.to(BF16)).float()


def measure(size: Size) -> dict[str, object]:
    ranks = LocalRanks(1)
    group, inputs = ranks.groups[0], [draw(size) for _ in range(3 if size.tokens < 8192 else 2)]
    stream = group.shared.streams[0]
    torch.cuda.synchronize()
    in_chunks = delta_rule.in_chunks

    def of_all(chunked: bool) -> Callable[[], object]:
        def work() -> None:
            with mock.patch.object(delta_rule, "in_chunks", in_chunks if chunked else lambda *_: False):
                for x in inputs:
                    call(group, size, x)

        return work

    calls: dict[str, Callable[[], object]] = {}
    for name, chunked in (("chunked", True), ("serial", False)):
        for _ in ranks.each():
            calls[name] = graph_of(of_all(chunked), stream).replay
    calls["torch"] = lambda: [
        delta.chunked_delta_rule(tokens_of(size, x, torch.float32), size.tokens, matmul=bfloat16_matmul) for x in inputs[:1]
    ]
    share = {"chunked": len(inputs), "serial": len(inputs), "torch": 1}
    times: dict[str, list[float]] = {name: [] for name in calls}
    count = {name: max(1, int(STRETCH_S * 1e6 / stretch(work, 1))) for name, work in calls.items()}
    for turn in range(STRETCHES):
        for name, work in calls.items():
            if name != "torch" or turn < 2:
                times[name].append(stretch(work, count[name]) / share[name])
    us = {name: round(statistics.median(known), 1) for name, known in times.items()}
    best = us["chunked"]
    return {
        **dataclasses.asdict(size), "us": us, "GBps": round(size.bytes() / best / 1e3), "TFLOPs": round(size.flops() / best / 1e6, 1),
        "bound_us": round(size.bound_us(), 1), "of_bound": round(size.bound_us() / best, 3),
    }  # fmt: skip


def sweep(size: Size, at_once: int, ring: int) -> float:
    """Microseconds with ``at_once`` lines scanned at a time and a ring of as many chunks."""
    with (
        mock.patch.object(delta_chunks, "RING", ring),
        mock.patch.object(delta_chunks.ChunkShape, "scan_blocks", lambda self, blocks: at_once * self.slices),
    ):
        ranks = LocalRanks(1)
        group, inputs = ranks.groups[0], [draw(size) for _ in range(2)]
        torch.cuda.synchronize()
        for _ in ranks.each():
            replay = graph_of(lambda: [call(group, size, x) for x in inputs], group.shared.streams[0]).replay
        replay()
        return statistics.median(stretch(replay, 5) for _ in range(3)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    signal.alarm(LIMIT_S)
    torch.manual_seed(74)
    began, rows, right = time.monotonic(), [], True
    with faults_told():
        for world in (1, 2):
            ranks = LocalRanks(world)
            for size in CHECKED:
                if size.tokens % world == 0:
                    right &= check(size, world, ranks)
            for gate in EXTREMES:
                right &= check(Size(1, 256, 3, 3, 128, 128, True), world, ranks, gate)
                right &= check(Size(1, 256, 3, 3, 128, 128, False), world, ranks, gate)
        print(f"checks took {time.monotonic() - began:.0f} s", flush=True)
        if not options.check:
            for size in TIMED:
                rows.append(row := measure(size))
                print(json.dumps(row), flush=True)
        if options.sweep:
            for size in (TIMED[3], TIMED[7], TIMED[8]):
                for ring in (4, 8, 16):
                    us = {n: round(sweep(size, n, ring), 1) for n in (8, 16, 24, 32) if n * -(-size.values // 128) < 132}
                    rows.append(row := {**dataclasses.asdict(size), "ring": ring, "us_by_lines_at_once": us})
                    print(json.dumps(row), flush=True)
    print(f"all took {time.monotonic() - began:.0f} s", flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps({"environment": record(), "right": right, "rows": rows}) + "\n")
    sys.exit(not right)


if __name__ == "__main__":
    main()
