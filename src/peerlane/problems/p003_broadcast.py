"""Problem 3: broadcast from one root."""

from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, may_be_root, root_argument, root_of, sweep


def reference(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    received = tensor.clone() if dist.get_rank() == src else torch.empty_like(tensor)
    dist.broadcast(received, src=src)
    return received


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    root = root_argument(case, draw)
    tensor = draw.bits(case["shape"], case.dtype)
    if case.params.get("poison") and rank != root_of((tensor, *root)):
        tensor.fill_(float("nan"))
    return (tensor, *root)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    return pc.exactly("received", inputs[root_of(inputs[rank])][0])


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The root's port sends the payload once (peers pass it on); every other port receives it once."""
    payload = torch.Size(case["shape"]).numel() * case.dtype.itemsize
    if may_be_root(case, rank):
        return pc.Cost(hbm_bytes=2 * payload, egress_bytes=payload, ingress_bytes=0)
    return pc.Cost(hbm_bytes=payload, egress_bytes=0, ingress_bytes=payload)


PROBLEM = pc.Problem(
    id=3,
    slug="broadcast",
    title="Broadcast from one root",
    category="collective",
    parallelism=("data", "fsdp"),
    origin="NCCL / torch.distributed primitive; weight synchronisation after initialisation, weight push in RL, DDP's buffer broadcast",
    summary=(
        "Every rank returns a bit copy of rank src's tensor, in fresh storage (the root too). Shapes and dtypes agree on all ranks; the "
        "contents of the other ranks' tensors do not matter. Inputs stay as they are."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    bandwidth="production_llama3_8b_gate_proj",
    presets=(
        pc.preset(
            "small",
            "ragged, tiny, empty and odd-sized tensors of random bits; roots 0, last and changing",
            pc.case("ragged_bf16", BF16, shape=(7, 11), root=0),
            pc.case("ragged_bf16_from_last", BF16, shape=(7, 11), root="last"),
            pc.case("scalar_int64", torch.int64, shape=(1,), root=0),
            pc.case("scalar_int64_from_last", torch.int64, shape=(1,), root="last"),
            pc.case("empty_bf16", BF16, shape=(0, 4), root=0),
            pc.case("odd_bytes_uint8", torch.uint8, shape=(4097,), root="any"),
            pc.case("nan_elsewhere_bf16", BF16, shape=(7, 11), root="last", poison=True),
        ),
        pc.preset("pkb", "the public benchmark's shape and root, src left out", pc.case("bf16", BF16, shape=(1024, 1024))),
        pc.preset("production_llama3_8b_embedding", "the embedding table", pc.case("bf16", BF16, shape=(128256, 4096), root=0)),
        pc.preset(
            "production_llama3_8b_gate_proj", "one weight, from the last rank", pc.case("bf16", BF16, shape=(14336, 4096), root="last")
        ),
        pc.preset("production_decode_control", "4096 token ids: latency", pc.case("int32", torch.int32, shape=(4096,), root=1)),
        *sweep(lambda elements: {"shape": (elements,)}),
    ),
    known_wrong_answers=(
        pc.wrong("no_communication", "the rank's own tensor", lambda c: c.args[0].clone()),
        pc.wrong(
            "always_from_rank_0",
            "rank 0's tensor, whatever src says",
            lambda c: c.inputs[0][0].clone(),
            ("small/ragged_bf16_from_last", "small/scalar_int64_from_last", "small/nan_elsewhere_bf16"),
        ),
        pc.wrong(
            "neighbour_of_root",
            "the tensor of the rank after src",
            lambda c: c.inputs[(root_of(c.args) + 1) % c.case.world_size][0].clone(),
        ),
    ),
    excused={"another_rank": "all ranks have the same answer"},
    replicated=True,
    notes=(
        "In the public benchmark the answer is the constant 1 in every trial and src is never passed. Here the bits are random, and src is "
        "the first rank, the last, or another one in every slot.",
        "The public reference copies the local tensor on every rank before overwriting it. Here only the root copies, which does not "
        "change the answer but makes the baseline faster.",
        "Where src changes between slots, the cost charges every rank as the root; the slowest rank's bound is the right one.",
    ),
)
