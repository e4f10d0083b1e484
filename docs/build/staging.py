"""The documentation as a site: a folder of pages that a static site generator builds, with the same relative links as in the repository."""

import posixpath
import re
import shutil
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
    if broken := broken_links(root):
        raise UsageError("links that lead out of the site: " + "; ".join(broken))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in PARTS:
        if (root / part).is_dir():
            shutil.copytree(root / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "build"))
        else:
            shutil.copy(root / part, folder / part)
    pages = list(folder.rglob("*.md"))
    for page in pages:
        page.write_text(COMMENTED.sub(r"\1", page.read_text(encoding="utf-8")), encoding="utf-8")
    for path, draw in pictures(root).items():
        draw(folder / path)
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


def broken_links(root: Path) -> list[str]:
    """Returns the links to files that the site of the repository at ``root`` does not hold, each behind its page."""
    held, broken = set(pictures(root)), []
    for part in PARTS:
        held |= {file.relative_to(root) for file in (root / part, *(root / part).rglob("*")) if file.is_file()}
    held -= {file for file in held if file.is_relative_to("docs/build")}
    for page in sorted(file for file in held if file.suffix == ".md"):
        text = COMMENTED.sub(r"\1", (root / page).read_text(encoding="utf-8"))
        for link in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)):
            if "://" not in link and not link.startswith("mailto:") and Path(posixpath.normpath(page.parent / link)) not in held:
                broken.append(f"{page}: {link}")
    return broken
