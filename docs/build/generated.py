"""All files of a checkout that are generated: pages of problems, the command line, tables, small pictures, and the site's navigation."""

from collections.abc import Mapping
from pathlib import Path

from docs.build import architecture, command_reference, navigation, pages, sections, tutorial_figures
from docs.build.evidence import packaged, read_evidence
from peerlane import problems
from peerlane.common.problem_files import INDEX
from peerlane.common.version import PACKAGE
from peerlane.report.catalogue import index


def generated(root: Path) -> dict[Path, str]:
    """Returns path in the checkout at ``root`` -> contents, of everything that is generated there."""
    evidence = read_evidence(root)
    return {
        **pages.pages(problems.suite(None), evidence),
        **packaged(evidence),
        INDEX.relative_to(PACKAGE.parents[1]): index(problems.suite(None)),
        **sections.documents(root),
        **command_reference.page(),
        architecture.PICTURE: architecture.architecture(root),
        **tutorial_figures.pictures(root),
        **navigation.file(root, problems.suite()),
    }


def stale(root: Path, files: Mapping[Path, str]) -> list[str]:
    """Returns the files below ``root`` that are missing or differ from ``files``, and the pages of no problem, each with the reason."""
    missing = [f"{path}: missing" for path in files if not (root / path).is_file()]
    different = [
        f"{path}: differs from its source"
        for path, text in files.items()
        if (root / path).is_file() and (root / path).read_text(encoding="utf-8") != text
    ]
    return missing + different + [f"{path}: belongs to no problem" for path in _left_over(root, files)]


def write(root: Path, files: Mapping[Path, str]) -> list[str]:
    """Writes the files below ``root``, and removes the pages of no problem; returns what changed."""
    changes = stale(root, files)
    for path in _left_over(root, files):
        (root / path).unlink()
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return changes


def _left_over(root: Path, files: Mapping[Path, str]) -> list[Path]:
    """Returns the pages of no problem; none where ``files`` are not those of problems."""
    if not any(path.parent == pages.FOLDER for path in files):
        return []
    return [path for file in sorted((root / pages.FOLDER).glob("*.md")) if (path := file.relative_to(root)) not in files]
