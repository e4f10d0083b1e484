"""Candidates of NCCL's device API: five right ones and a broken twin of each get their verdicts.

    timeout 600 python tests/gpu/check_nccl.py --compile                          # all of them for sm_90a; needs no GPU
    timeout 1200 python tests/gpu/check_nccl.py --emulated                        # on emulated ranks; needs no GPU
    PEERLANE_MULTICAST=forbid timeout 300 python tests/gpu/check_nccl.py          # needs two GPUs of one node

Needs `pip install 'peerlane[nccl]'` or NCCL_HOME, and nvcc. Exits with 1 if anything failed.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["PEERLANE_MULTICAST"] = "forbid"
sys.path.insert(0, str(Path(__file__).parents[1]))

from check_nvshmem import compile_all, judge

from device.nccl_candidates import EXAMPLES, ON_GPUS, PROMPT, TWINS
from peerlane.device.nccl.installation import what_is_missing


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--emulated", action="store_true", help="judge on emulated ranks")
    options = parser.parse_args()
    if missing := what_is_missing():
        print(f"not run: {missing}")
        return 1
    with tempfile.TemporaryDirectory() as name:
        for twin in TWINS:
            (Path(name) / f"{twin.name}.py").write_text(twin.source())
        paths = [*sorted(EXAMPLES.glob("*.py")), *sorted(Path(name).glob("*.py"))]
        if options.compile:
            return int(compile_all([*paths, PROMPT]) > 0)
        expected = {twin.name: twin.verdicts if options.emulated else ON_GPUS for twin in TWINS}
        failures = judge(paths, (options.world_size,), expected, "emulated" if options.emulated else "cuda")
    print("all as expected" if not failures else f"{failures} failures", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
