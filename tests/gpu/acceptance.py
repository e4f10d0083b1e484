"""How far references timed against themselves are from 1, and what a problem costs: the acceptance table of the timing protocol.

    python tests/gpu/acceptance.py --results peerlane-results/results.jsonl [--out acceptance.json]
    python tests/gpu/acceptance.py [--world-size 4] [--problem 1-87] [--preset pkb] [--out acceptance.json]

With ``--results`` it reads what `peerlane eval reference` stored. Without, it runs that itself, where there are too few GPUs on a
virtual node. Ends with 1 if the promise is not kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peerlane.report.noise import ACCEPTANCE


def run(options: argparse.Namespace, folder: Path) -> Path:
    """Evaluates the references; where the results are."""
    command = ["eval", "reference", "--problem", options.problem, "--preset", options.preset, "--mode", "eager,graph"]
    command += ["--device", "cuda", "--world-size", str(options.world_size), "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "peerlane", *command], check=False)
    return folder / "results.jsonl"


def rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per problem and mode."""
    found = []
    for result in results:
        seconds = sum(result["stage_seconds"].values())
        head = {"problem": result["problem"]["id"], "W": result["world_size"], "verdict": result["verdict"]["kind"], "seconds": seconds}
        head["timing_seconds"] = result["stage_seconds"].get("timing", 0.0)
        for speed in result["speed"] or [{"mode": "-", "status": "none"}]:
            row = {**head, "mode": speed["mode"], "status": speed["status"], "flags": sorted({*result["flags"], *speed.get("flags", ())})}
            if speed["status"] == "measured":
                ratio = speed["speedup"]["median"]
                row |= {"speedup": ratio, "deviation": max(ratio, 1 / ratio) - 1, "low": speed["speedup"]["low"]}
                row |= {"high": speed["speedup"]["high"], "faster": speed["speedup"]["low"] > 1 + speed["noise_floor"]}
                row |= {name: speed[name] for name in ("noise_floor", "group_offset", "group_offset_applied", "reference_slowdown")}
                row |= {name: speed[name] for name in ("rounds", "calls_per_block", "hand_off_us", "copies_us")}
                row["candidate_us"] = speed["candidate_us"]["median"]
            else:
                row["why"] = speed.get("why") or speed.get("reason") or str(result["verdict"])[:300]
            found.append(row)
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """By mode, whether the promise is kept."""
    modes = {}
    for mode, promised in ACCEPTANCE.items():
        deviations = sorted(row["deviation"] for row in found if row["mode"] == mode and row["status"] == "measured")
        if not deviations:
            continue
        within = sum(value <= promised.most for value in deviations) / len(deviations)
        kept = within >= promised.share and deviations[-1] <= promised.every
        modes[mode] = {
            "n": len(deviations),
            "within": within,
            "limit": promised.most,
            "largest": deviations[-1],
            "largest_allowed": promised.every,
            "kept": kept,
        }
    seconds = [row["seconds"] for row in {row["problem"]: row for row in found}.values()]
    refused = [row["problem"] for row in found if row["verdict"] not in ("correct", "not_run") or row["status"] == "failed"]
    return {
        "modes": modes,
        "problems": len(seconds),
        "seconds_per_problem": sum(seconds) / max(1, len(seconds)),
        "refused": refused,
        "flagged": [f"{row['problem']} {row['mode']}: {', '.join(row['flags'])}" for row in found if "slower_reference" in row["flags"]],
        "called_faster": [f"{row['problem']} {row['mode']}" for row in found if row.get("faster")],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--problem", default="1-87")
    parser.add_argument("--preset", default="pkb")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.results or run(options, Path(folder))
        lines = path.read_text().splitlines() if path.is_file() else []
        results = [item for item in map(json.loads, filter(str.strip, lines)) if item.get("type") == "result"]
    found = rows([result for result in results if result["candidate"]["backend"] == "reference"])
    print("problem   mode        us  speedup   [95 %      ]  floor  offset   slow    K rounds      s")
    for row in found:
        if row["status"] != "measured":
            print(f"{row['problem']:>7} {row['mode']:>6} {row['verdict']}, {row['status']}: {row['why']}")
            continue
        print(
            f"{row['problem']:>7} {row['mode']:>6} {row['candidate_us']:9.1f} {row['speedup']:8.3f} {row['low']:7.3f} {row['high']:6.3f} "
            f"{row['noise_floor']:6.1%} {row['group_offset']:7.3f} {row['reference_slowdown']:6.2f} {row['calls_per_block']:4} "
            f"{row['rounds']:6} {row['seconds']:6.1f} {' '.join(row['flags'])}"
        )
    total = summary(found)
    print(json.dumps(total, indent=2))
    if options.out:
        options.out.write_text(json.dumps({"summary": total, "rows": found}, indent=1) + "\n")
    return 0 if found and not total["refused"] and all(item["kept"] for item in total["modes"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
