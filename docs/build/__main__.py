"""``python -m docs.build``: writes or checks what is generated in the documentation, or lays out its site."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.build.generated import generated, stale, write
from docs.build.sentences import figures_by_hand
from docs.build.staging import stage
from peerlane.errors import UsageError

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 1 if what is generated is out of date, 2 for a wrong command."""
    parser = argparse.ArgumentParser(prog="python -m docs.build", description=__doc__)
    command = parser.add_mutually_exclusive_group(required=True)
    command.add_argument("--write", action="store_true", help="write what is generated")
    command.add_argument("--check", action="store_true", help="exit with 1 if it does not match its sources")
    command.add_argument("--site", type=Path, metavar="FOLDER", help="copy all pages here, with their pictures, for a site generator")
    options = parser.parse_args(arguments)
    try:
        if options.site is not None:
            print(f"{stage(ROOT, options.site)} pages in {options.site}")
            return 0
        files = generated(ROOT)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    changes = write(ROOT, files) if options.write else stale(ROOT, files)
    print("".join(f"{'written: ' if options.write else ''}{change}\n" for change in changes), end="")
    print(f"{len(files)} files are generated" if options.write or not changes else "run `make docs`")
    by_hand = figures_by_hand(ROOT)
    print("".join(f"{line}\n" for line in by_hand), end="")
    if by_hand:
        print("take the figure from results: docs/build/sections.py names what a page can show between markers")
    return int(options.check and bool(changes or by_hand))


if __name__ == "__main__":
    sys.exit(main())
