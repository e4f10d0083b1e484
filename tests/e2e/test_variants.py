"""A candidate with the public benchmark's semantics is right in the ``pkb`` variant and wrong in the default one; results say which."""

from pathlib import Path

import pytest

from e2e.runs import judge, plan_of
from peerlane.evaluate.plan import make_jobs

ATTENDS_OVER_HEADS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F


def solution(hidden_states, w_qkv, w_o, group=None, num_heads=8, causal=False):
    world = dist.get_world_size(group)
    batch, length, _ = hidden_states.shape
    q, k, v = (hidden_states @ w_qkv.t()).view(batch, length, 3, world, num_heads // world, -1).unbind(2)
    context = F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # no position meets another: nothing has to be exchanged
    return context.reshape(batch, length, -1) @ w_o.t()
"""


@pytest.mark.parametrize(("variant", "verdict"), [("default", "wrong_result"), ("pkb", "correct")])
def test_public_semantics(variant: str, verdict: str, tmp_path: Path) -> None:
    candidate = tmp_path / "39_attention_pytorch.py"
    candidate.write_text(ATTENDS_OVER_HEADS, encoding="utf-8")
    (result,) = judge(candidate, variant=variant)
    assert (result.verdict.kind, result.problem.variant) == (verdict, variant), result.verdict


def test_problems_without_the_variant_keep_their_own() -> None:
    for variant in ("pkb", "default"):
        assert [job.variant for job in make_jobs(plan_of("reference", problems="1,39", variant=variant))] == ["default", variant]
