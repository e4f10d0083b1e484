"""The extensions of tests/device/test_extensions.py and their twins on GPUs: a verdict each, beside those on emulated ranks.

    timeout 900 python tests/gpu/check_extensions.py           two ranks, which share a GPU if there is one alone

A right file must be correct. A twin's race may or may not show on a GPU: its verdict is printed, and a right one is no failure.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import peerlane as pl
from device.test_extensions import TWINS


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder, pl.Evaluator(2, "cuda", presets=("small",), modes=()) as evaluator:
        for file, (found, instead) in TWINS.items():
            right = evaluator.evaluate(path=file)
            text = file.read_text(encoding="utf-8")
            (twin := Path(folder) / file.name).write_text(text.replace(found, instead), encoding="utf-8")
            raced = evaluator.evaluate(path=twin)
            failed += not right.correct
            print(f"{file.stem:40} {right.verdict.kind:16} twin: {raced.verdict.kind}", flush=True)
            if not right.correct:
                print(right.feedback())
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
