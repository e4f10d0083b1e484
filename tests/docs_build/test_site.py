"""The documentation as a site: all links lead somewhere, problems are in its navigation, and models find an index."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.build.navigation import BEGIN, END, filled
from docs.build.staging import broken_links, stage
from peerlane import problems
from peerlane.errors import UsageError

ROOT = Path(__file__).parents[2]


def checkout(root: Path, page: str) -> Path:
    for folder in ("docs", "examples", "results", "src/peerlane/solutions"):
        (root / folder).mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"):
        (root / name).write_text("text\n")
    (root / "docs" / "page.md").write_text(page)
    return root


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout") / "build" / "site"
    assert stage(ROOT, folder) > 100
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_an_index_for_models(site: Path) -> None:
    assert "\n![Speedups of all problems" in (site / "docs/measurements.md").read_text() and (site / "docs/images/solutions.svg").is_file()
    assert (site / "docs/problems/p013_gemm_allreduce.svg").is_file() and not (site / "docs/build").exists()
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# peerlane" and lines[2].startswith("> ")
    targets = [match[1] for line in lines if (match := re.match(r"- \[.+\]\((.+/)\): .", line))]
    pages = [site / f"{target.rstrip('/')}.md" for target in targets]
    assert len(targets) > 40 and all(page.is_file() or (page.with_suffix("") / "README.md").is_file() or page.stem == "." for page in pages)


@pytest.mark.slow
def test_the_built_site_needs_no_network_and_finds_every_page(site: Path) -> None:
    home = site.parents[1]
    (home / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    done = subprocess.run([Path(sys.executable).with_name("zensical"), "build", "--strict"], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.parent.relative_to(home / "site").as_posix(): page.read_text() for page in (home / "site").rglob("index.html")}
    found = {item["location"].partition("#")[0].rstrip("/") or "." for item in json.loads((home / "site/search.json").read_text())["items"]}
    assert found == pages.keys() and "docs/problems/p013_gemm_allreduce" in found
    assert [name for name, text in pages.items() if re.search(r'<(script|img|link)[^>]* (src|href)="?https?://', text)] == []


def test_problems_are_in_the_navigation_by_category() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert filled(text, problems.suite()) == text, "run `make docs`"
    assert filled(f"nav:\n{BEGIN}old\n{END}rest\n", problems.select("2,54")) == (
        f"nav:\n{BEGIN}      - Collective:\n"
        '          - "2 allgather": docs/problems/p002_allgather.md\n'
        "      - Context parallel:\n"
        f'          - "54 ring_attention": docs/problems/p054_ring_attention.md\n{END}rest\n'
    )
    with pytest.raises(UsageError, match="put both comments back"):
        filled("nav:\n", problems.suite())


def test_every_page_of_the_site_is_in_its_navigation_or_linked(tmp_path: Path) -> None:
    listed = (ROOT / "mkdocs.yml").read_text() + (ROOT / "docs/README.md").read_text()
    folders = [ROOT / "docs", ROOT / "docs/models", ROOT / "docs/device"]
    assert [page.name for folder in folders for page in folder.glob("*.md") if page.name not in listed] == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [("[gone](nowhere.md)", "docs/page.md: nowhere.md"), ("[source](../src/peerlane)", "docs/page.md: ../src/peerlane")],
)
def test_a_page_that_the_site_cannot_show_is_refused(page: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem):
        stage(checkout(tmp_path / "checkout", page), tmp_path / "site")


def test_no_page_links_out_of_the_site() -> None:
    assert broken_links(ROOT) == []


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="may be replaced"):
        stage(ROOT, tmp_path)
    assert (tmp_path / "thesis.txt").exists()
