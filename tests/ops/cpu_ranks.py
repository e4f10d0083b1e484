"""Checks of ``peerlane.ops`` on CPU ranks: forks three ranks, runs every check on groups of 1, 2 and 3 of them.

    python tests/ops/cpu_ranks.py [CHECK ...]       prints a JSON object: check -> null, or what failed on which rank

Every rank draws all ranks' inputs, so results are compared with the whole computation in one place.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ops.whole import CASES, Case

RANKS = 3
Check = Callable[[dist.ProcessGroup], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def gradients(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    wanted = [value for value in inputs if value.requires_grad]
    return list(torch.autograd.grad(list(outputs), wanted, list(seeds), allow_unused=True))


def drawn(case: Case, world_size: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [case.draw(generator, rank, world_size, dtype) for rank in range(world_size)]


def compared(case: Case, group: dist.ProcessGroup, call: Callable[..., torch.Tensor], limit: float) -> None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    wide = drawn(case, world_size, torch.float64)
    results = case.whole(wide)
    seeds = [torch.randn(result.shape, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r, result in enumerate(results)]
    expected = gradients(results, wide[rank], seeds)
    own = [value.detach().to(torch.float32).requires_grad_() if value.is_floating_point() else value for value in wide[rank]]
    y = call(*own)
    assert y.shape == results[rank].shape, f"{case.name}: got {tuple(y.shape)}, expected {tuple(results[rank].shape)}"
    found = gradients([y], own, [seeds[rank].to(y.dtype)])
    for got, want in zip((y, *found), (results[rank], *expected), strict=True):
        assert got is not None and want is not None
        error = float((got.detach().double() - want.detach()).norm() / want.detach().norm().clamp(min=1e-12))
        assert error < limit, f"{case.name} on {world_size} ranks: error {error}"


@check
def results_and_gradients(group: dist.ProcessGroup) -> None:
    for case in CASES:
        compared(case, group, case.call(group), 1e-5)


@check
def compiled(group: dist.ProcessGroup) -> None:
    for case in CASES:
        torch._dynamo.reset()
        compared(case, group, torch.compile(case.call(group), fullgraph=True, backend="aot_eager"), 1e-5)


@check
def autocast(group: dist.ProcessGroup) -> None:
    for case in CASES:
        plain = case.call(group)

        def call(*values: torch.Tensor, plain: Callable[..., torch.Tensor] = plain) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return plain(*values)

        torch._dynamo.reset()
        for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            own = [
                value.float() if value.is_floating_point() else value for value in drawn(case, group.size(), torch.float64)[group.rank()]
            ]
            assert function(*own).dtype == (torch.bfloat16 if case.casts else torch.float32), case.name
            compared(case, group, function, 3e-2)


@check
def opcheck(group: dist.ProcessGroup) -> None:
    seen = set()
    for case in CASES:
        if case.operator in seen:
            continue
        seen.add(case.operator)
        own = [
            value.requires_grad_() if value.is_floating_point() else value
            for value in drawn(case, group.size(), torch.float32)[group.rank()]
        ]
        torch.library.opcheck(getattr(torch.ops.peerlane, case.operator).default, (*own, *case.settings, group.group_name))


def main(names: Sequence[str]) -> None:
    folder = tempfile.mkdtemp()
    children = []
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            code = 1
            try:
                code = run_rank(rank, folder, names)
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    found: dict[str, str | None] = dict.fromkeys(names, "did not run")
    for rank in range(RANKS):
        for name, failure in json.loads(Path(folder, f"{rank}.json").read_text()).items():
            if found[name] in (None, "did not run"):
                found[name] = failure and f"rank {rank}: {failure}"
    print(json.dumps(found))


def run_rank(rank: int, folder: str, names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of torch.distributed, about names of its next version
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    groups = [dist.new_group(list(range(size))) for size in range(1, RANKS + 1)]
    found: dict[str, str | None] = {}
    file = Path(folder, f"{rank}.json")
    for name in names:
        start = time.monotonic()
        try:
            for size, group in enumerate(groups, 1):
                if rank < size:
                    CHECKS[name](group)
        except BaseException:
            found[name] = traceback.format_exc()
            file.write_text(json.dumps(found))
            return 1  # the other ranks cannot go on either
        found[name] = None
        if rank == 0:
            print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    file.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    main(sys.argv[1:] or list(CHECKS))
