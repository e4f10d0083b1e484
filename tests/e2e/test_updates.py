"""Parameters that a call updates in place are part of its answer: right norms do not help a candidate that leaves its gradients alone."""

from pathlib import Path

from e2e.runs import judge

HEAD = """
import torch
import torch.distributed as dist


def solution(grad_tensors, max_norm, norm_type=2.0, fsdp_group=None):
    present = [g for g in grad_tensors if g is not None]
    total = sum((torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) ** norm_type for g in present), torch.zeros(()))
    if fsdp_group is not None:
        dist.all_reduce(total, group=fsdp_group)
    norm = total ** (1.0 / norm_type)
"""
CLIPS = """
    if norm > max_norm:
        for g in present:
            g.copy_(g.float() * (max_norm / norm))
    return norm
"""
PUTS_OTHERS_IN_THEIR_PLACE = """
    if norm > max_norm:
        for i, g in enumerate(grad_tensors):
            if g is not None:
                grad_tensors[i] = (g.float() * (max_norm / norm)).to(g.dtype)
    return norm
"""
CLIPS_A_COPY = """
    if norm > max_norm:
        present = [g * (max_norm / norm) for g in present]
    return norm
"""
CLIPS_THE_FIRST_ONLY = """
    if norm > max_norm:
        present[0].copy_(present[0].float() * (max_norm / norm))
    return norm
"""


CANDIDATES = {
    "clips": (CLIPS, "correct"),
    "puts_others_in_their_place": (PUTS_OTHERS_IN_THEIR_PLACE, "correct"),
    "clips_a_copy": (CLIPS_A_COPY, "wrong_result"),
    "clips_the_first_only": (CLIPS_THE_FIRST_ONLY, "wrong_result"),
}


def test_clipping(tmp_path: Path) -> None:
    for name, (body, _) in CANDIDATES.items():
        (tmp_path / f"21_{name}_pytorch.py").write_text(HEAD + body, encoding="utf-8")
    results = judge(*(tmp_path / f"21_{name}_pytorch.py" for name in CANDIDATES))
    for result, (_, verdict) in zip(results, CANDIDATES.values(), strict=True):
        assert result.verdict.kind == verdict, result.verdict
        if verdict == "wrong_result":
            assert result.verdict.output.startswith("gradient_"), result.verdict  # type: ignore[union-attr]
