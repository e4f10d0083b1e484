"""How long it takes to say that a candidate fails: forty of the corpus, each wrong in another way, in one run; compiling apart.

    python tests/gpu/time_failures.py [--device cpu] [--world-size 4] [--candidates 40] [--preset small] [--out FILE]

Prints every verdict with the time it took, and the averages. Exits with 1 if one is not what the corpus expects, or if the average
without builds is beyond the limit.
"""

import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from check_verdicts import Watch
from harness import script

from peerlane.evaluate import EvaluationPlan, evaluate
from peerlane.evaluate.candidates import candidate_file
from peerlane.evaluate.selftest.table import Corpus, Entry, load
from peerlane.hardware.environment import record
from peerlane.settings import SELFTEST_DEADLINES

LIMIT_S = 5.0


def failing(corpus: Corpus, device: str, world_size: int, count: int) -> list[Entry]:
    """So many of the corpus that fail on this device, evenly from its rows."""
    accepted = [(entry, entry.accepted(device)) for entry in corpus.entries]  # type: ignore[arg-type]
    bad = [entry for entry, kinds in accepted if kinds and not {"correct", "not_run"} & set(kinds) and entry.world_size <= world_size]
    return [bad[number * len(bad) // count] for number in range(min(count, len(bad)))]


def main() -> int:
    """Runs what the command line asks for; the exit status."""
    parser = script(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--candidates", type=int, default=40)
    parser.add_argument("--preset", default="small")
    options = parser.parse_args()
    corpus = load()
    entries = failing(corpus, options.device, options.world_size, options.candidates)
    known = {entry.file: entry for entry in entries}
    watch = Watch(lambda result: known[result.candidate.name].accepted(options.device))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / corpus.folder.name
        shutil.copytree(corpus.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))  # some write beside themselves
        folder.parent.chmod(0o755)  # ranks may run as another user
        plan = EvaluationPlan(
            candidates=[replace(candidate_file(folder / f"{entry.file}.py"), track=entry.track) for entry in entries],
            presets=(options.preset,),
            world_sizes=(options.world_size,),
            device=options.device,
            deadlines=SELFTEST_DEADLINES,
        )
        evaluate(plan, watch)
    seconds = [row["seconds"] - row["build_s"] for row in watch.timed]
    wrong = [row["candidate"] for row in watch.timed if not row["expected"]]
    mean_s = statistics.fmean(seconds)
    print(f"{len(seconds)} candidates, without builds {mean_s:.1f} s each on average, {max(seconds):.1f} s at most")
    print(f"not as expected: {', '.join(wrong) or 'none'}")
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": record(), "mean_s": mean_s, "candidates": watch.timed}, indent=1) + "\n")
    return int(bool(wrong) or mean_s > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
