"""The convolutions of problems 62 and 72 on this machine's GPUs: right, under replay, and how fast beside older solutions.

    PYTHONPATH=src python tests/gpu/check_convolutions.py [--ranks 2] [--old DIR] [--only WORD] [--seconds 200] [--out FILE]

A rank is a process, on a GPU of its own or on its part of one. Results are sampled and compared with float64, eagerly and under replay.
Then graphs of all solutions take turns on several sets of inputs; the slowest rank counts. ``--old`` is a folder of solutions, of another
checkout say. Other tilings of the direct convolution are timed too. What would begin after ``--seconds`` is left out, and said so; a
minute later everything is ended. Exits with 1 if a result was wrong, or a case failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from peerlane import solutions
from peerlane.device import group_of
from peerlane.hardware.environment import record
from peerlane.hardware.virtual_node import share_gpus
from peerlane.problems.families.conv import from_zigzag, zigzag_shard
from peerlane.problems.families.sphere import disks
from peerlane.settings import WAIT_LIMIT
from peerlane.solutions import load
from peerlane.solutions.families import gated_convolution as direct
from peerlane.solutions.families import long_convolution as transforms
from peerlane.solutions.families.sphere_exchange import shares

BF16, SETS, ROUNDS, TARGET_S, SAMPLES = torch.bfloat16, 3, 5, 0.15, 6
Call = Callable[[tuple[Any, ...]], torch.Tensor]


class Case(NamedTuple):
    """Inputs of a call, the largest error of a result over its tolerance (all ranks take part), and other ways to compute it."""

    name: str
    problem: int
    draw: Callable[[], tuple[Any, ...]]
    error: Callable[[tuple[Any, ...], torch.Tensor], float]
    variants: dict[str, Call]


def everyones(mine: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, whose sizes may differ."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine.cpu())
    return [tensor.to(mine.device) for tensor in found]


def sampled(bounds: int | tuple[int, ...]) -> list[list[int]]:
    """Random indices, the same on all ranks."""
    bounds = (bounds,) if isinstance(bounds, int) else bounds
    drawn: list[Any] = [[[int(torch.randint(bound, ())) for bound in bounds] for _ in range(SAMPLES)]]
    dist.broadcast_object_list(drawn, 0)
    return list(drawn[0])


def same_on_all(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's."""
    return everyones(tensor)[0]


def hyena_case(name: str, batch: int, groups: int, dim: int, local: int, taps: int, zigzag: bool = True) -> Case:
    """``local`` positions of each rank; at most ``taps`` taps, or as many as there are positions."""
    channels, rank, world = groups * dim, dist.get_rank(), dist.get_world_size()
    length, pieces = world * local, 2 if zigzag else 1
    taps = min(taps, length)

    def draw() -> tuple[Any, ...]:
        x1, x2, v = (torch.randn(batch, channels, local, device="cuda").to(BF16) for _ in range(3))
        decay = torch.exp(-torch.arange(taps, device="cuda") * (4.0 / taps))
        h = same_on_all((torch.randn(groups, taps, device="cuda") * decay * (8.0 / taps) ** 0.5).to(BF16))
        return x1, x2, v, h, same_on_all(torch.randn(channels, device="cuda").to(BF16)), groups, dim, None, zigzag

    def error(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
        x1, x2, v, h, bias = inputs[:5]
        worst = 0.0
        for (channel,) in sampled(channels):
            parts = everyones((x2[:, channel] * v[:, channel]).double())
            z = from_zigzag(parts, -1) if zigzag else torch.cat(parts, -1)
            filter_, direct_term = h[channel // dim].double(), z * bias[channel].double()

            def own(whole: torch.Tensor) -> torch.Tensor:
                return zigzag_shard(whole, rank, world, -1) if zigzag else whole.chunk(world, -1)[rank]

            def convolved(z: torch.Tensor, filter_: torch.Tensor) -> torch.Tensor:
                return torch.fft.irfft(torch.fft.rfft(z, n=2 * length) * torch.fft.rfft(filter_, n=2 * length), n=2 * length)[:, :length]

            gate = x1[:, channel].double()
            right = own(convolved(z, filter_) + direct_term) * gate
            size = gate.abs() * own(convolved(z.square(), filter_.square()).clamp_(min=0).sqrt_() + direct_term.abs() + 1e-3)
            difference = (got[:, :, channel].double() - right).abs()
            worst = max(worst, float((difference / (6 * 2**-8 * size + 4 * 2**-8 * right.abs())).nan_to_num(nan=1e9).max()))
        return worst

    def tiled(tiling: direct.Tiling) -> Call:
        def call(inputs: tuple[Any, ...]) -> torch.Tensor:
            x1, x2, v, h, bias = inputs[:5]
            out = v.new_empty((batch, local, channels))
            launch = direct.gated_convolution(group_of(), shape, tiling)
            assert launch is not None
            launch(x1=x1, x2=x2, v=v, h=h, bias=bias, out=out)
            return out

        return call

    def transformed(inputs: tuple[Any, ...]) -> torch.Tensor:
        return transforms.convolve_by_transforms(group_of(), transforms.Inputs(*inputs[:5]), zigzag)

    shape = direct.Shape(batch, channels, local // pieces, pieces, groups, taps, BF16)
    chosen, variants = direct.tiling_of(shape, 2, 8), {}
    if chosen is not None and taps <= 8192 and local >= 1024:
        for many, steps in ((32, 8), (16, 8), (16, 4), (8, 8), (8, 4), (4, 8), (4, 4), (2, 8), (2, 4)):
            tiling = direct.Tiling.of(shape, many, steps, 8)
            fits = 2 * tiling.shared_bytes <= direct.SHARED_LIMIT_BYTES and tiling.stretch <= max(shape.length, 512)
            if fits and tiling != chosen and not variants:
                variants[f"tile {many} x {tiling.stretch}"] = tiled(tiling)
        if taps >= 1024:
            variants["transforms"] = transformed
    return Case(name, 72, draw, error, variants)


class Sphere(NamedTuple):
    """Sizes of one case of problem 62; longitudes are split over all ranks, latitudes are not."""

    batch: int
    channels: int
    outputs: int
    groups: int
    taps: int
    nlat_in: int
    nlon_in: int
    nlat_out: int
    nlon_out: int
    public: bool = False

    def filters(self) -> torch.Tensor:
        """On disks of three rows; or four taps in a row, at other places for each filter."""
        columns = self.nlat_in * self.nlon_in
        if self.public:
            k, h, tap = (t.flatten() for t in torch.meshgrid(*(torch.arange(n) for n in (self.taps, self.nlat_in, 4)), indexing="ij"))
            column = h * self.nlon_in + ((h + tap * (k + 1)) % self.nlon_in).view(-1, 4).sort(-1).values.flatten()
            at, scale = torch.stack([k, h, column]).cuda(), torch.tensor(0.5)
        else:
            device = torch.device("cuda")
            h, row, offset, in_disk = disks(self.nlat_out, self.nlat_in, self.nlon_in, 3.0, 0, self.nlat_in, device)
            code, order = ((h * self.nlat_in + row) * self.nlon_in + offset % self.nlon_in).sort()
            k = torch.arange(self.taps, device=device).repeat_interleave(code.numel())
            at = torch.stack([k, (code // columns).repeat(self.taps), (code % columns).repeat(self.taps)])
            scale = in_disk[order].repeat(self.taps).rsqrt()
        values = same_on_all(torch.randn(at.shape[1], device="cuda") * scale.cuda())
        return torch.sparse_coo_tensor(at, values, (self.taps, self.nlat_out, columns), is_coalesced=True, check_invariants=False)


def sphere_case(name: str, size: Sphere, alone: dist.ProcessGroup) -> Case:
    inner, step, rank, world = size.channels // size.groups, size.nlon_in // size.nlon_out, dist.get_rank(), dist.get_world_size()
    widths, outputs = shares(size.nlon_in, world), shares(size.nlon_out, world)

    def draw() -> tuple[Any, ...]:
        x = torch.randn(size.batch, size.channels, size.nlat_in, widths[rank], device="cuda")
        weight = same_on_all(torch.randn(size.outputs, inner, size.taps, device="cuda") * (inner * size.taps) ** -0.5)
        bias = same_on_all(torch.randn(size.outputs, device="cuda"))
        return x, size.filters(), weight, size.groups, size.nlon_out, size.nlon_in, None, alone, bias

    def error(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
        x, psi, weight, *_, bias = inputs
        k, h, column = psi.indices()
        worst = 0.0
        for number, (b, o, latitude) in enumerate(sampled((size.batch, size.outputs, size.nlat_out))):
            here = h == (latitude, 0, size.nlat_out - 1)[number % 3]  # poles too
            place = int(torch.randint(outputs[rank], ()))
            q = outputs[0] * rank + place
            row, longitude = column[here] // size.nlon_in, (column[here] + q * step) % size.nlon_in
            first = o // (size.outputs // size.groups) * inner
            whole = torch.cat(everyones(x[b, first : first + inner, int(row.min()) : int(row.max()) + 1]), -1)
            weighted = weight[o].double()[:, k[here]] * whole[:, row - row.min(), longitude].double() * psi.values()[here].double()
            right, scale = weighted.sum() + bias[o].double(), weighted.square().sum().sqrt() + bias[o].double().abs()
            difference = (got[b, o, (latitude, 0, size.nlat_out - 1)[number % 3], place].double() - right).abs()
            worst = max(worst, float((difference / (2e-6 * scale)).nan_to_num(nan=1e9)))
        return worst

    return Case(name, 62, draw, error, {})


def cases() -> list[Case]:
    """Small shapes, then those of the problems at two ranks."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert isinstance(alone, dist.ProcessGroup)
    return [
        hyena_case("72 small, odd", 2, 6, 3, 2 * 333, 127),
        hyena_case("72 short, contiguous", 2, 32, 2, 1000, 65, zigzag=False),
        hyena_case("72 history of several ranks", 1, 16, 2, 128, 200),
        hyena_case("72 evo2_mr, 128 taps", 1, 256, 16, 65536, 128),
        hyena_case("72 512 taps", 1, 1024, 4, 8192, 512),
        hyena_case("72 pkb, 4096 taps", 1, 1024, 1, 2048, 4096),
        hyena_case("72 sweep_1024, 127 taps", 1, 1024, 1, 1024, 127),
        hyena_case("72 sweep_1024, 2048 taps", 1, 1024, 1, 1024, 2048),
        hyena_case("72 sweep_16384, 127 taps", 1, 1024, 1, 16384, 127),
        hyena_case("72 sweep_16384, 2048 taps", 1, 1024, 1, 16384, 2048),
        hyena_case("72 sweep_16384, 8192 taps", 1, 1024, 1, 16384, 8192),
        hyena_case("72 hyenadna", 8, 256, 1, 16384, 32768),
        hyena_case("72 evo2_li", 1, 256, 16, 65536, 131072),
        sphere_case("62 small, step 2", Sphere(2, 6, 4, 2, 3, 15, 40, 8, 20), alone),
        sphere_case("62 pkb", Sphere(32, 8, 8, 1, 3, 128, 256, 128, 256, True), alone),
        sphere_case("62 local_operator", Sphere(4, 128, 128, 1, 7, 181, 360, 180, 360), alone),
        sphere_case("62 fourcastnet3_encoder", Sphere(1, 73, 256, 1, 9, 721, 1440, 360, 720), alone),
        sphere_case("62 fourcastnet3_local_block", Sphere(1, 641, 641, 641, 9, 360, 720, 360, 720), alone),
    ]


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return max(found)


def captured(call: Call, inputs: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call(inputs)
    return graph, out


def measure(case: Case, calls: dict[str, Call]) -> dict[str, Any]:
    """Errors of each call, and the median time of a replay in microseconds."""
    row: dict[str, Any] = {"case": case.name, "us": {}, "error": {}, "peak_gib": {}}
    sets = [case.draw()]
    if sets[0][0].nbytes < 2**28:
        sets += [case.draw() for _ in range(SETS - 1)]
    graphs: dict[str, list[torch.cuda.CUDAGraph]] = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        errors = [case.error(inputs, call(inputs)) for inputs in (*sets, sets[0])]
        row["peak_gib"][name] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
        made = [captured(call, inputs) for inputs in sets]
        for graph, _ in made * 2:
            graph.replay()
        torch.cuda.synchronize()
        errors += [case.error(inputs, out) for inputs, (_, out) in zip(sets, made, strict=True)]
        row["error"][name] = round(slowest(max(errors)), 4)
        graphs[name] = [graph for graph, _ in made]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    repeats = {name: 2 * len(sets) for name in graphs}
    for _ in range(ROUNDS + 1):
        for name, replays in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            begin.record()
            for i in range(repeats[name]):
                replays[i % len(replays)].replay()
            end.record()
            end.synchronize()
            spent = slowest(begin.elapsed_time(end)) / repeats[name]
            times[name].append(spent * 1e3)
            repeats[name] = max(len(replays), min(200, int(TARGET_S / ROUNDS * 1e3 / max(spent, 1e-3))))
    row["us"] = {name: round(statistics.median(spent[1:]), 1) for name, spent in times.items()}
    return row


def loaded(file: Path) -> Callable[..., torch.Tensor]:
    spec = importlib.util.spec_from_file_location(f"old_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    solution: Callable[..., torch.Tensor] = module.solution
    return solution


def run(rank: int, options: argparse.Namespace, environments: list[dict[str, str]], store: str) -> None:
    os.environ |= environments[rank] | {WAIT_LIMIT: "10"}
    torch.cuda.set_device(rank * torch.cuda.device_count() // options.ranks)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    torch.manual_seed(rank)
    begin, failed = time.monotonic(), False
    for case in cases():
        if options.only not in case.name:
            continue
        if slowest(time.monotonic() - begin) > options.seconds:
            print(f"left out {case.name}: {options.seconds:.0f} s are over" if rank == 0 else "", end="\n" if rank == 0 else "", flush=True)
            continue
        solve = load(case.problem)
        calls: dict[str, Call] = {"new": lambda inputs, solve=solve: solve(*inputs)}  # type: ignore[misc]
        if options.old is not None:
            old = loaded(options.old / solutions.files()[case.problem].name)
            calls["old"] = lambda inputs, old=old: old(*inputs)  # type: ignore[misc]
        calls |= case.variants
        try:
            row = measure(case, calls)
        except Exception:
            print(f"FAIL {case.name} on rank {rank}; what follows is left out", flush=True)
            traceback.print_exc()
            sys.exit(1)
        wrong = [name for name, error in row["error"].items() if not error < 1]
        failed |= bool(wrong)
        if rank == 0:
            times = ", ".join(f"{name} {us}" for name, us in row["us"].items())
            errors, peaks = list(row["error"].values()), list(row["peak_gib"].values())
            print(f"{'FAIL' if wrong else 'ok  '} {case.name}: us {times}; errors {errors}; GiB {peaks}", flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps({**row, "ranks": options.ranks, "environment": record()}) + "\n")
        torch.cuda.empty_cache()
    sys.exit(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--old", type=Path, help="a folder with older solutions of the same names")
    parser.add_argument("--only", default="", help="of cases whose name has this word")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    node = share_gpus(options.ranks, torch.cuda.device_count())
    if node is None:
        parser.error("there is no GPU here, expected at least one")
    with tempfile.TemporaryDirectory() as folder, node.daemon() as daemon:
        environments = [node.rank_environment(rank, daemon) for rank in range(options.ranks)]
        context = mp.spawn(run, (options, environments, f"{folder}/store"), nprocs=options.ranks, join=False)
        stop = time.monotonic() + options.seconds + 60
        try:
            while not context.join(timeout=1):
                if time.monotonic() > stop:
                    sys.exit("FAIL: ended, for a case has not come to its end")
        finally:
            for process in context.processes:
                process.kill()


if __name__ == "__main__":
    main()
