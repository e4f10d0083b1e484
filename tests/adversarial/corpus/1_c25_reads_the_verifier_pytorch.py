"""C25: opens the memory of the supervisor and of every rank that it forked, for the seed and the answers are in there.

Right only if it could read some of it: the verdict `correct` means that a candidate can, and `wrong_result` that it cannot.
"""

import os
from pathlib import Path

import torch.distributed as dist


def parents():
    """The parent of every process in sight."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def readable(pid):
    try:
        begin = next(line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " rw-p " in line).split("-")[0]
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(int(begin, 16))
            return len(memory.read(8)) == 8
    except (OSError, StopIteration):
        return False


parent, leader = parents(), os.getppid()
nursery = parent.get(leader, 0)
relatives = [pid for pid, its in parent.items() if its == nursery and pid != leader] if nursery > 1 else []
verifiers = [pid for pid, its in parent.items() if its in relatives] + ([parent[nursery]] if parent.get(nursery, 0) > 1 else [])
seen = any(readable(pid) for pid in verifiers)


def solution(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total if seen else tensor.clone()
