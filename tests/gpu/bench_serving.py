"""What serving calls between layers, in graphs: the decode norm and the communicator, beside torch's symmetric memory and the unfused pair.

    PYTHONPATH=src timeout 120 python tests/gpu/bench_serving.py [--ranks 2] [--out FILE]

Checks sums, norms, unequal parts and captured calls of the communicator first; exits with 1 where a result is wrong. Times are of replayed
graphs: the slowest rank's median of five stretches, microseconds. Ranks share GPUs where there are fewer GPUs than ranks: then times are a
virtual node's, whose links are its memory. Every line of output is a JSON object; ``--out`` appends them to a file."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import BF16, Call, Row, in_symmetric_memory, note_failure, replay, run_on_shared_gpus, script, slowest_in_turn, small

from peerlane import ops
from peerlane.ops.serving import CustomAllReduce

HIDDEN, EPSILON, TOKENS = 8192, 1e-6, (1, 8, 64, 512)


def residual_and_weight(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return small(tokens, HIDDEN, seed=50, largest=3), small(HIDDEN, seed=51, largest=3)


def norm_of(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = total.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()


def wrong_norms(rank: int, world: int, tokens: int) -> int:
    """Counts wrong numbers of the sum, of Gemma's norm and of blocks in e4m3, of calls and of a replay."""
    xs, (residual, weight) = [small(tokens, HIDDEN, seed=q, largest=3) for q in range(world)], residual_and_weight(tokens)
    total = torch.stack(xs).float().sum(0) + residual.float()
    plain, gemma = norm_of(total, weight), norm_of(total, weight.float() + 1)
    wrong = 0
    for invariant in (False, True):
        ops.set_batch_invariant(invariant)
        y, got = ops.all_reduce_rms_norm(xs[rank], weight, residual, epsilon=EPSILON)
        wrong += int((got.float() != total).sum() + ((y.double() - plain).abs() > 2**-8 * 1.001 * plain.abs()).sum())
        y, _, scales = ops.all_reduce_rms_norm_fp8(xs[rank], weight, residual, by="block", weight_offset=1.0, epsilon=EPSILON)
        blocks, by = gemma.unflatten(1, (-1, 128)), scales.double().unsqueeze(2)
        wrong += int(((by - blocks.abs().amax(2, keepdim=True) / 448).abs() > 1e-5 * by).sum())
        wrong += int(((y.double().unflatten(1, (-1, 128)) * by - blocks).abs() > 2**-4 * 1.001 * blocks.abs() + 2**-9 * by).sum())
    ops.set_batch_invariant(False)
    return wrong


def wrong_sums(rank: int, world: int, comm: CustomAllReduce) -> int:
    """Counts wrong numbers of the communicator's sums, called and captured, and of unequal parts in packets and in rings."""
    wrong = int(comm.disabled)
    for shape in ((1, HIDDEN), (3, 5), (512, HIDDEN)):
        terms = [small(*shape, seed=q, largest=3) for q in range(world)]
        total, x = torch.stack(terms).float().sum(0), terms[rank].clone()
        with comm.capture():
            comm.custom_all_reduce(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = comm.custom_all_reduce(x)
        for factor in (1, 2):
            x.copy_(terms[rank] * factor)
            graph.replay()
            wrong += int((out.float() != factor * total).sum())
    for most in (3, 40, 20_000):
        sizes = [0 if q == 1 else most - q for q in range(world)]
        own = [small(size, 1024, seed=q, largest=3) for q, size in enumerate(sizes)]
        wrong += int((ops.all_gatherv(own[rank], sizes) != torch.cat(own)).sum())
        whole = [small(sum(sizes), 1024, seed=90 + q, largest=3) for q in range(world)]
        part = torch.stack(whole).float().sum(0).split(sizes)[rank]
        wrong += int((ops.reduce_scatterv(whole[rank], sizes).float() != part).sum())
    return wrong


def calls_of(tokens: int, comm: CustomAllReduce) -> dict[str, Callable[[], Any]]:
    x, (residual, weight) = torch.randn(tokens, HIDDEN, device="cuda").to(BF16), residual_and_weight(tokens)

    def normed(total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        added = total + residual
        return F.rms_norm(added, (HIDDEN,), weight, EPSILON), added

    calls: dict[str, Call] = {
        "fused": lambda: ops.all_reduce_rms_norm(x, weight, residual),
        "fused_invariant": lambda: ops.all_reduce_rms_norm(x, weight, residual),
        "fused_token_fp8": lambda: ops.all_reduce_rms_norm_fp8(x, weight, residual),
        "fused_block_fp8": lambda: ops.all_reduce_rms_norm_fp8(x, weight, residual, by="block"),
        "communicator": lambda: comm.custom_all_reduce(x),
        "communicator_then_norm": lambda: normed(comm.custom_all_reduce(x)),
        "norm": lambda: normed(x),
    }
    try:
        shared, name = in_symmetric_memory(x)
        calls["torch_one_shot_then_norm"] = lambda: normed(torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name))
        calls["torch_two_shot_then_norm"] = lambda: normed(torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name))
    except Exception as error:
        note_failure("symm_mem", error)
    return calls


def rows(rank: int, world: int) -> Iterator[Row]:
    comm = CustomAllReduce(dist.group.WORLD, torch.cuda.current_device())
    yield {
        "check": "communicator and unequal parts",
        "disabled": comm.disabled,
        "reason": comm.reason,
        "wrong": wrong_sums(rank, world, comm),
    }
    for tokens in TOKENS:
        yield {"check": "norms", "tokens": tokens, "wrong": wrong_norms(rank, world, tokens)}
        graphs: dict[str, Call] = {}
        for name, call in calls_of(tokens, comm).items():
            ops.set_batch_invariant(name.endswith("_invariant"))
            try:
                graphs[name] = replay(call)
            except Exception as error:
                note_failure(name, error)
        ops.set_batch_invariant(False)
        times = slowest_in_turn(graphs, 200 if tokens < 512 else 50, warm_up=50)
        yield {"bench": "serving", "tokens": tokens, "hidden": HIDDEN, "ranks": world, "microseconds": times}


if __name__ == "__main__":
    options = script(__doc__, ranks=2).parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    run_on_shared_gpus(options.ranks, options.out, rows)
