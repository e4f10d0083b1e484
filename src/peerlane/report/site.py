"""The documentation as a site: a folder of pages that a static site generator builds, with the same relative links as in the repository."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

from peerlane.errors import UsageError

PARTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "docs", "examples", "results")
"""What the site holds of the repository; a link to anything else is broken there."""

FLOWCHART = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
NODE = re.compile(r'^\s*(\w+)(\(\[|\[|\{\{)"(.*)"(?:\]\)|\]|\}\})$', re.MULTILINE)
SHAPES = {"([": "end", "[": "work", "{{": "transfer"}
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


def stage(root: Path, folder: Path) -> int:
    """Copies the pages of the repository at ``root`` into ``folder``, which it replaces; returns the number of pages.

    Raises UsageError if ``folder`` holds anything but an earlier site, or if a page links to a file that the site does not hold.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "docs").is_dir():
        raise UsageError(f"{folder} is not empty and holds no earlier site: name a folder that may be replaced")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in PARTS:
        copy = shutil.copytree if (root / part).is_dir() else shutil.copy
        copy(root / part, folder / part)
    pages = sorted(folder.rglob("*.md"))
    for page in pages:
        page.write_text(FLOWCHART.sub(lambda chart: _chain(chart[1]), page.read_text(encoding="utf-8")), encoding="utf-8")
    if broken := [f"{page.relative_to(folder)}: {link}" for page in pages for link in _broken_links(page)]:
        raise UsageError("links that lead out of the site: " + "; ".join(broken))
    return len(pages)


def _chain(chart: str) -> str:
    """Renders a linear Mermaid flowchart as a row of HTML boxes, so that no script has to be fetched to see it."""
    nodes = NODE.findall(chart)
    if not nodes or chart.count("-->") != len(nodes) - 1:
        raise UsageError(f"a flowchart of the site must be one chain, got:\n{chart}")
    items = [f'<li class="{SHAPES[shape]}">{"<br>".join(map(html.escape, label.split("<br/>")))}</li>' for _, shape, label in nodes]
    return '<ol class="chain">\n' + "\n".join(items) + "\n</ol>"


def _broken_links(page: Path) -> list[str]:
    links = LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    return [link for link in links if "://" not in link and not link.startswith("mailto:") and not (page.parent / link).is_file()]
