"""Problem 8: all-to-all with equal splits."""

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, first_arguments, sweep


def reference(tensor: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    return received


def _shape(case: pc.Case) -> tuple[int, ...]:
    """(W k, *S), from ``block`` = (k, *S). Lengths named in ``over_world`` hold the sum over ranks and are divided by W."""
    rows, *rest = (
        length // case.world_size if axis in case.params.get("over_world", ()) else length for axis, length in enumerate(case["block"])
    )
    return (case.world_size * rows, *rest)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor]:
    return (draw.bits(_shape(case), case.dtype),)


def _blocks(inputs: pc.Inputs, index: int) -> torch.Tensor:
    """Block ``index`` of every rank's tensor, in rank order."""
    rows = inputs[0][0].shape[0] // len(inputs)
    return torch.cat([tensor.narrow(0, index * rows, rows) for tensor in first_arguments(inputs)])


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("received", _blocks(inputs, rank))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    payload = torch.Size(_shape(case)).numel() * case.dtype.itemsize
    port = pc.traffic.all_to_all(payload, case.world_size)
    return pc.Cost(hbm_bytes=2 * payload, egress_bytes=port, ingress_bytes=port)


PROBLEM = pc.Problem(
    id=8,
    slug="alltoall",
    title="All-to-all with equal splits",
    category="collective",
    parallelism=("sequence", "expert"),
    origin="NCCL / torch.distributed primitive; the exchanges of DeepSpeed-Ulysses and of GShard-style experts with fixed capacity",
    summary=(
        "The leading axis, of length W k, is W blocks of k rows. Block q of rank r's result is a bit copy of block r of rank q's "
        "tensor; shape and dtype are the input's, the storage is fresh."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "blocks of one and of several rows, odd sizes, empty",
            pc.case("block_bf16", BF16, block=(1, 3, 5)),
            pc.case("rows_int64", torch.int64, block=(2, 7)),
            pc.case("empty_bf16", BF16, block=(1, 0)),
            pc.case("odd_bytes_uint8", torch.uint8, block=(3, 1367)),
        ),
        pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, block=(1, 1024, 1024))),
        pc.preset(
            "production_llama3_8b_ulysses",
            "32768/W tokens x 32/W heads of 128 for every rank",
            pc.case("bf16", BF16, block=(1, 32768, 32 * 128), over_world=(1, 2)),
        ),
        pc.preset(
            "production_deepseek_v3_moe_capacity",
            "4096 tokens x 8 experts, balanced, hidden 7168",
            pc.case("bf16", BF16, block=(1, 4096 * 8, 7168), over_world=(1,)),
        ),
        pc.preset("production_small_counts", "256 counts for every rank: latency", pc.case("int32", torch.int32, block=(1, 256))),
        *sweep(lambda elements: {"block": (1, elements), "over_world": (1,)}),
    ),
    known_wrong_answers=(
        pc.wrong("mirrored_blocks", "block W - 1 - r of every rank", lambda c: _blocks(c.inputs, c.case.world_size - 1 - c.rank)),
    ),
    notes=(
        "In the public benchmark every block is a constant known from source and destination, and has one row. Here the bits are "
        "random, so that order inside a block counts, and blocks may have several rows.",
    ),
)
