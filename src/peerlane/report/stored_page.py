"""The page that `peerlane show` prints, taken from the documentation's page of the problem: nothing is imported or computed for it."""

import re

from peerlane.common.problem_files import OWN_FOLDER, index_entries, problem_files
from peerlane.common.version import PACKAGE

_FOLDERS = (OWN_FOLDER / "pages", PACKAGE.parents[1] / "docs" / "problems")
"""Where the documentation's pages are: in an installed package, and in a checkout."""
_SOLUTION = "## Our solution\n\n"
_LINK_TO_SOURCE = re.compile(r"\[Read its source\]\(\S*\)\.\n\n")
_FOLD = re.compile(r"<details markdown>\n<summary>(.*?)</summary>\n\n(.*?)\n</details>\n", re.DOTALL)


def stored_page(number: int) -> str | None:
    """Returns the page of a problem of the suite as :func:`peerlane.report.problem_page.page` makes it; None if it has to be made."""
    file = problem_files()[number]
    entry = next((entry for entry in index_entries() or () if entry["id"] == number), None)
    if entry is None or not file.path.is_relative_to(OWN_FOLDER):
        return None
    path = next((path for folder in _FOLDERS if (path := folder / f"{file.path.stem}.md").is_file()), None)
    if path is None:
        return None
    _, heading, summary, rest = path.read_text(encoding="utf-8").split("\n\n", 3)
    _, _, sections = rest.partition(_SOLUTION)
    unfolded = _FOLD.sub(r"## \1\n\n\2", _LINK_TO_SOURCE.sub("", sections, count=1))
    return f"{heading}\n\n{summary}\n\n```python\n{entry['signature']}\n```\n\n{_SOLUTION}{unfolded}"
