"""Puts one fault at a time into a copy of the source and runs the quick tests of its room: which faults do they catch?

`make mutants` runs the table of ``mutants.toml``. ``python tests/mutants.py stress`` runs the rows whose file or text holds that word.
Exit code 0: all are caught; 1: some are not; 2: the table does not fit the source, or tests fail without any fault."""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", "dist", "site", ".*_cache", "demo-results", "peerlane-results")
LIMIT_S = 600.0  # a fault may make a test wait for ever
QUICK = "not slow and not long"


@dataclass(frozen=True)
class Mutant:
    """A fault: ``new`` in the place of ``old``, which stands once in ``file``; and the tests that should catch it."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def name(self) -> str:
        """The file, and the first words of what is replaced."""
        return f"{self.file.removeprefix('src/peerlane/')}: {' '.join(self.old.split())[:70]}"

    def stale(self) -> str | None:
        """Says why the row does not fit the source; None: it does."""
        found = (ROOT / self.file).read_text(encoding="utf-8").count(self.old) if (ROOT / self.file).is_file() else 0
        return None if found == 1 and self.old != self.new else f"its text stands {found} times there: expected once; mend the row"


class Copy:
    """A copy of the source, in which faults take turns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
        subprocess.run([sys.executable, "-m", "compileall", "-q", "src"], cwd=folder, check=False)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",  # that of a fault would be taken for the source's
            "PEERLANE_CACHE_DIR": str(folder / "cache"),
        }

    def passes(self, tests: str) -> bool:
        """Returns whether these tests pass as the copy is now."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", QUICK, *tests.split()]
        try:
            done = subprocess.run(command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode not in (0, 1, 2):  # of pytest: passed, failed, could not be imported
            print(f"{tests}: expected tests that run, pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}", file=sys.stderr)
            raise SystemExit(2)
        return done.returncode == 0

    def catches(self, mutant: Mutant) -> bool:
        """Returns whether the tests fail with the fault."""
        path = self.folder / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        try:
            return not self.passes(mutant.tests)
        finally:
            path.write_text(source, encoding="utf-8")


def read_table() -> list[Mutant]:
    """Returns the rows of ``mutants.toml``."""
    return [Mutant(**row) for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["mutant"]]


def main() -> int:
    """Runs the rows that the command line asks for and prints a line for each; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only rows whose file or text holds this")
    parser.add_argument("--side-by-side", type=int, default=2, help="copies that faults take turns in")
    asked = parser.parse_args()
    chosen = [row for row in read_table() if asked.word in row.file + row.old]
    if wrong := [f"{row.name}: {why}" for row in chosen if (why := row.stale())]:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="peerlane-mutants-") as folder, ThreadPoolExecutor(asked.side_by_side) as threads:
        copies: Queue[Copy] = Queue()
        for number in range(asked.side_by_side):
            copies.put(Copy(Path(folder, str(number))))

        def on_a_copy(row: Mutant | str) -> bool:
            copy = copies.get()
            try:
                return copy.passes(row) if isinstance(row, str) else copy.catches(row)
            finally:
                copies.put(copy)

        whole = sorted({row.tests for row in chosen})
        if broken := [tests for tests, passes in zip(whole, threads.map(on_a_copy, whole), strict=True) if not passes]:
            print("tests fail without any fault: " + "; ".join(broken), file=sys.stderr)
            return 2
        caught = []
        for row, found in zip(chosen, threads.map(on_a_copy, chosen), strict=True):
            caught.append(found)
            print(f"{'caught    ' if found else 'NOT CAUGHT'} {row.name}", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{sum(caught)} of {len(chosen)} faults are caught, in {used.ru_utime + used.ru_stime:.0f} CPU seconds")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
