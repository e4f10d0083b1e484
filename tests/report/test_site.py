"""The documentation as a site: all links lead somewhere, and flowcharts need no script."""

from pathlib import Path

import pytest

from peerlane.errors import UsageError
from peerlane.report.site import stage

ROOT = Path(__file__).parents[2]


def checkout(root: Path, page: str) -> Path:
    for folder in ("docs", "examples", "results"):
        (root / folder).mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"):
        (root / name).write_text("text\n")
    (root / "docs" / "page.md").write_text(page)
    return root


def test_the_site_has_every_page_and_flowcharts_need_no_script(tmp_path: Path) -> None:
    assert stage(ROOT, tmp_path / "site") > 100
    page = (tmp_path / "site/docs/problems/p012_allgather_gemm.md").read_text()
    assert "mermaid" not in page and '<li class="transfer">all-gather<br>' in page


def test_every_page_of_the_site_is_in_its_navigation_or_linked(tmp_path: Path) -> None:
    listed = (ROOT / "mkdocs.yml").read_text() + (ROOT / "docs/README.md").read_text()
    folders = [ROOT / "docs", ROOT / "docs/models", ROOT / "docs/device"]
    assert [page.name for folder in folders for page in folder.glob("*.md") if page.name not in listed] == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("[gone](nowhere.md)", "docs/page.md: nowhere.md"),
        ("[source](../src/peerlane)", "docs/page.md: ../src/peerlane"),
        ('```mermaid\nflowchart LR\n    a["x"]\n    b["y"]\n```', "one chain"),
    ],
)
def test_a_page_that_the_site_cannot_show_is_refused(page: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem):
        stage(checkout(tmp_path / "checkout", page), tmp_path / "site")


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="may be replaced"):
        stage(ROOT, tmp_path)
    assert (tmp_path / "thesis.txt").exists()
