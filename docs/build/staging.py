"""The documentation as a site: a folder of pages that a static site generator builds, with the same relative links as in the repository."""

import posixpath
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from docs.build.figures import COMMENTED, pictures
from peerlane.errors import UsageError

PARTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "docs", "examples", "results", "src/peerlane/solutions")
"""What the site holds of the repository; a link to anything else is broken there."""


INDEX = "llms.txt"
ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+)\) \| (.+) \|$")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


def stage(root: Path, folder: Path) -> int:
    """Copies the pages of the repository at ``root`` into ``folder``, which it replaces, and draws their pictures; returns the number of
    pages.

    Raises UsageError if ``folder`` holds anything but an earlier site, or if a page links to a file that the site does not hold.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "docs").is_dir():
        raise UsageError(f"{folder} is not empty and holds no earlier site: name a folder that may be replaced")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in PARTS:
        if (root / part).is_dir():
            shutil.copytree(root / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "build"))
        else:
            shutil.copy(root / part, folder / part)
    drawn = {folder / path: draw for path, draw in pictures(root).items()}
    pages = sorted(folder.rglob("*.md"))
    for page in pages:
        page.write_text(COMMENTED.sub(r"\1", page.read_text(encoding="utf-8")), encoding="utf-8")
    if broken := [f"{page.relative_to(folder)}: {link}" for page in pages for link in _broken_links(page, drawn)]:
        raise UsageError("links that lead out of the site: " + "; ".join(broken))
    for path, draw in drawn.items():
        draw(path)
    (folder / INDEX).write_text(index_for_models(folder), encoding="utf-8")
    return len(pages)


def index_for_models(folder: Path) -> str:
    """Returns the index of the site at ``folder`` for language models (llmstxt.org): the tables of docs/README.md as lists of links, then
    every other page but those of problems, with its first sentence."""
    lines = ["# peerlane", "", "> Test, time and write multi-GPU kernels; compare them with NCCL and with the hardware limit."]
    listed = {"docs/README.md"}
    for line in (folder / "docs" / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        elif row := ROW.match(line):
            title, target, purpose = row.groups()
            listed.add(page := posixpath.normpath(f"docs/{target}"))
            lines.append(f"- [{title}]({_address(page)}): {_plain(purpose)}")
    lines += ["", "## More", ""]
    for file in sorted((folder / "docs").rglob("*.md")):
        if (page := file.relative_to(folder).as_posix()) not in listed and file.parent.name != "problems":
            title, paragraph = file.read_text(encoding="utf-8").split("\n\n")[:2]
            lines.append(f"- [{title.removeprefix('# ')}]({_address(page)}): {_plain(paragraph).partition('. ')[0].rstrip('.')}")
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    """Returns a text on one line, without the targets of its links."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.split()))


def _address(page: str) -> str:
    """Returns where the site has a page: a folder with the page's name, or for a README the folder that it describes."""
    path = page.removesuffix(".md").removesuffix("README")
    return f"{path.rstrip('/')}/" if path.strip("/") else "./"


def _broken_links(page: Path, drawn: Collection[Path]) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    places = {link: Path(posixpath.normpath(page.parent / link)) for link in links}
    return [link for link, place in places.items() if not place.is_file() and place not in drawn]
