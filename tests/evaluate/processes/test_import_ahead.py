"""What candidates import of torch, and takes seconds, is imported once by the fork server."""

import pytest

import peerlane as pl
from peerlane.evaluate.processes.import_ahead import wants_import
from peerlane.results.verdict import RuntimeFailure


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import torch\n\n\ndef solution(x):\n    return torch.compile(f)(x)\n", True),
        ("from torch import compile\n", True),
        ("import torch._dynamo as d\n", True),
        ("from torch.nn.attention.flex_attention import flex_attention\n", True),
        ("from torch.nn.attention.bias import causal_lower_right\n", True),
        ("from torch.nn.attention import bias\nbias.causal_lower_right(2, 2)\n", True),
        ("import torch.distributed.nn.functional as F\n", True),
        ("from torch.distributed import _functional_collectives as c\n", True),
        ("from torch.distributed.tensor import DTensor\n", True),
        ("from torch.distributed.device_mesh import init_device_mesh\n", True),
        ("from torch.distributed.fsdp import fully_shard\n", True),
        ("import torch\nimport torch.distributed as dist\nfrom torch import nn\n", False),
        ("import re\nre.compile('x')\nfrom peerlane.device import compile_cubin\n", False),
    ],
)
def test_the_source_says_what_is_wanted(source: str, wanted: bool) -> None:
    assert wants_import(source) == wanted


# The name in pieces: the source must not want what it looks for.
RANKS = """import os, sys, tempfile
had = "torch._dyn" "amo" in sys.modules
{line}

def solution(tensor):
    own = tempfile.gettempdir() == os.environ.get("TMPDIR")
    raise RuntimeError(f"own folder: {{own}}, had it: {{had}}, has tensors: {{'torch.distributed' '.tensor' in sys.modules}}")
"""


@pytest.mark.slow
def test_ranks_have_it_before_the_candidate_imports_it() -> None:
    """Also where ranks without it were waiting. It brings DTensor with it."""
    with pl.Evaluator(2, "cpu", presets=("small",), modes=(), cases="timed") as evaluator:
        for line, had in (("import torch", False), ("from torch.nn.attention.bias import causal_lower_right", True)):
            verdict = evaluator.evaluate(1, RANKS.format(line=line)).verdict
            assert isinstance(verdict, RuntimeFailure) and f"had it: {had}, has tensors: {had}" in verdict.message
            assert "own folder: True" in verdict.message or evaluator.isolation.tier == "L0"
