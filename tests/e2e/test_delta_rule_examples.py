"""The candidates that call flash-linear-attention, judged on CPU ranks with the functions that they call written in plain PyTorch."""

import re
from pathlib import Path

import pytest

from e2e.runs import EXAMPLES, PATIENT, judge

pytestmark = pytest.mark.slow

PLAIN = '''
import torch.nn.functional as F


def recurrence(q, k, v, log_decay, beta, use_qk_l2norm_in_kernel):
    """The delta rule token by token: q, k (B, T, H, K), v (B, T, H', V), log_decay (B, T, H', K or 1), beta (B, T, H')."""
    assert use_qk_l2norm_in_kernel
    repeats = v.shape[2] // q.shape[2]
    q, k = (F.normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(repeats, dim=2) for x in (q, k))
    state, outputs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp().unsqueeze(-1)
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        written = beta[:, t].float().unsqueeze(-1) * (v[:, t].float() - held)
        state = state + k[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(outputs, 1).to(v.dtype), None


def chunk_gated_delta_rule(q, k, v, g, beta, *, use_gate_in_kernel, A_log, dt_bias, use_qk_l2norm_in_kernel):
    assert use_gate_in_kernel and A_log.shape == dt_bias.shape == g.shape[2:]
    return recurrence(q, k, v, (-A_log.exp() * F.softplus(g.float() + dt_bias)).unsqueeze(-1), beta, use_qk_l2norm_in_kernel)


def chunk_kda(
    q, k, v, g, beta, *, use_gate_in_kernel, use_beta_sigmoid_in_kernel, safe_gate, lower_bound, A_log, dt_bias, use_qk_l2norm_in_kernel
):
    assert use_gate_in_kernel and use_beta_sigmoid_in_kernel and safe_gate and A_log.shape == g.shape[2:3]
    log_decay = lower_bound * torch.sigmoid(A_log.exp().unsqueeze(-1) * (g.float() + dt_bias.view(-1, g.shape[-1])))
    return recurrence(q, k, v, log_decay, beta.float().sigmoid(), use_qk_l2norm_in_kernel)
'''


def test_delta_rules_are_right_with_the_library_and_not_run_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted((EXAMPLES / "libraries").glob("*_fla_pytorch.py"))
    for path in files:
        source, count = re.subn(r"^from fla\..* import .*$", PLAIN, path.read_text(), flags=re.MULTILINE)
        (tmp_path / path.name).write_text(source)
        assert count == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    *judged, refused = judge(*(tmp_path / path.name for path in files), files[0], deadlines=PATIENT)
    assert [(result.problem.id, result.correct) for result in judged] == [(74, True), (75, True)], [result.verdict for result in judged]
    assert refused.verdict.kind == "not_run" and "pip install 'fla-core[cuda]'" in refused.verdict.reason
