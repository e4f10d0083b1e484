"""peerlane on a machine with one GPU, for work on the evaluator: with one rank, or with two that share the GPU.

    python tests/gpu/on_one_gpu.py 1 eval reference --problem 1-20 --preset pkb --mode eager,graph --world-size 1
    python tests/gpu/on_one_gpu.py 2 eval tests/adversarial/corpus/1_c61_works_ahead_pytorch.py --world-size 2
    python tests/gpu/on_one_gpu.py 2 selftest --gpu

It runs a copy of the package in which that is allowed. One rank's collectives are copies, and some problems have no case for it: times say
something about the protocol of timing, nothing about a problem, and physical floors that count links may be too high. Two ranks talk by
gloo, which no graph holds, and take turns on the GPU: what is seen there is how the evaluator works, not how fast anything is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "peerlane"
CORPUS = Path(__file__).parents[1] / "adversarial"
CHANGES: dict[int, dict[str, dict[str, str]]] = {
    1: {"problems/contract/spec.py": {"(2, 4, 8)": "(1, 2, 4, 8)"}},
    2: {
        "evaluate/ranks/rank.py": {
            'torch.device("cuda", rank)': 'torch.device("cuda", 0)',
            '"nccl", store=store, rank=self.rank, world_size=self.world_size, device_id=self.device)': (
                '"gloo", store=store, rank=self.rank, world_size=self.world_size)'
            ),
        },
        "evaluate/node.py": {"torch.cuda.device_count() if": "2 * torch.cuda.device_count() if"},
        "problems/contract/spec.py": {'return ("eager", "graph") if self.graph else ("eager",)': 'return ("eager",)'},
        "evaluate/processes/fork_client.py": {
            'if device == "cpu" else environment': 'if device == "cpu" else {**environment, "GLOO_SOCKET_IFNAME": "lo"}'
        },
    },
}
"""By the number of ranks: what stands in a file instead of what."""


def changed_copy(ranks: int, folder: Path) -> None:
    """Puts a package for so many ranks on one GPU into a folder. Raises LookupError where the package is no longer what this file knows."""
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "peerlane", ignore=without)
    shutil.copytree(CORPUS, folder / "peerlane" / "selftest", ignore=without, dirs_exist_ok=True)  # as in wheels
    for name, changes in CHANGES[ranks].items():
        path = folder / "peerlane" / name
        text = path.read_text()
        for old, new in changes.items():
            if text.count(old) != 1:
                raise LookupError(f"{name} holds {old!r} {text.count(old)} times, expected once: mend CHANGES in {__file__}")
            text = text.replace(old, new)
        path.write_text(text)


def main() -> int:
    match sys.argv[1:]:
        case [("1" | "2") as ranks, *arguments] if arguments:
            with tempfile.TemporaryDirectory() as folder:
                changed_copy(int(ranks), Path(folder))
                path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
                with subprocess.Popen([sys.executable, "-m", "peerlane", *arguments], env={**os.environ, "PYTHONPATH": path}) as process:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # peerlane has it, too, and ends its ranks first
                    return process.wait()
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
