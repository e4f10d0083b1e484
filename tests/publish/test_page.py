"""The page without a browser: complete, inert and self-contained. tests/publish/test_browser.py opens it in one."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from peerlane.errors import UsageError
from peerlane.generate.board import boards
from peerlane.publish.gather import gather
from peerlane.publish.page import INLINE_CANDIDATES, render_page, write_page
from peerlane.publish.page.detail import provenance
from peerlane.publish.page.plot_data import fast_p
from peerlane.publish.page.view import View
from peerlane.results.result import CandidateInfo, ProblemInfo
from peerlane.results.speed_record import NotMeasured
from peerlane.results.verdict import CudaError
from sample_results import ENVIRONMENT, VIRTUAL, measured, on_cpu, result, text_of, wrong
from sample_runs import CODE, make_run, reference_results

ROOT = Path(__file__).parents[2]
HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{ 7*7 }}"


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of scripts and of the rest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        script = bool(self.tags) and self.tags[-1][0] == "script" and self.cdata_elem == "script"
        (self.scripts if script else self.text).append(data)


def data_of(html: str) -> list[dict[str, object]]:
    return json.loads(Elements(html).scripts[0])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "a", "model-a", range(1, 13), 3)
    make_run(folder / "b", "model-b", range(1, 13), kind="agent", good=0.8)
    make_run(folder / "virtual", "model-a", range(1, 5), environment=VIRTUAL)
    (folder / "references.jsonl").write_text(text_of(*reference_results(range(1, 13))))
    return folder


def test_a_page_of_runs_has_every_section(runs: Path) -> None:
    html = render_page(gather([runs]), "The title").html
    text = "".join(Elements(html).text)
    headings = (
        "Leaderboard", "Speedup of each task", "Share of the bound against message size", "Tasks above a speedup", "How samples ended",
        "Categories", "How data moved", "Progress of agents", "Against the roofline",
    )  # fmt: skip
    assert [heading for heading in headings if heading not in text] == []
    first = data_of(html)[0]
    assert sorted(first["authors"]) == ["model-a", "model-b"]  # type: ignore[call-overload]
    assert all(first[name] for name in ("fast", "speeds", "verdicts", "mechanisms", "steps", "reached"))
    assert "torch 2.11.0" in text and "peerlane 0.1.0" in text and "pass@3" in text


def test_virtual_nodes_are_never_ranked_with_nodes(runs: Path) -> None:
    found = boards(gather([runs]).samples)
    assert [board.setting.node_class.kind for board in found] == ["node", "virtual"]
    assert {sample.setting.node_class.kind for sample in found[0].samples} == {"node"}
    html = render_page(gather([runs]), "t").html
    assert html.count("Virtual node: several ranks share a GPU.") == 1


def test_the_leaderboard_counts_what_the_metrics_count(tmp_path: Path) -> None:
    results = make_run(tmp_path / "a", "m", range(1, 9), 2, good=0.6)
    (board,) = boards(gather([tmp_path]).samples)
    (row,) = View(0, board, 0).rows
    correct = sum(item.correct for item in results)
    assert len(row.entry.samples) == 16 and row.entry.unjudged == 0 and len(row.entry.attempted) == 8
    assert row.pass_at[1].value == pytest.approx(correct / 16)
    low = [speedup.low for item in results if item.correct and (speedup := item.speedup("graph")) is not None]
    fast = row.fast["graph"]
    assert fast.value == pytest.approx(sum(value > 1 for value in low) / 16)
    at_one = [point["share"] for point in fast_p(board) if point["mode"] == "graph" and point["p"] == 1.0]
    assert at_one == [pytest.approx(fast.value)]


def candidate(name: str) -> CandidateInfo:
    return CandidateInfo(name=name, labels={"model": "m"}, sha256=name * 64, backend="cuda")


def problem(number: int, slug: str) -> ProblemInfo:
    return ProblemInfo(id=number, slug=slug, variant="default")


def test_means_name_what_they_are_taken_over(tmp_path: Path) -> None:
    """Of four tasks one is four times as fast, one half as fast, one wrong, and one correct but not timed."""
    modes, not_timed = ("graph",), NotMeasured(mode="graph", why="the reference cannot be captured")
    found = [
        result(candidate=candidate("a"), modes=modes, speed=(measured("graph", 40.0, 10.0),)),
        result(candidate=candidate("b"), problem=problem(2, "allgather"), modes=modes, speed=(measured("graph", 20.0, 40.0),)),
        wrong(candidate=candidate("c"), problem=problem(3, "broadcast"), modes=modes),
        result(candidate=candidate("d"), problem=problem(4, "reduce"), modes=modes, speed=(not_timed,)),
    ]
    (tmp_path / "results.jsonl").write_text(text_of(*found))
    gathered = gather([tmp_path])
    (row,) = View(0, boards(gathered.samples)[0], 0).rows
    mean, fallback = row.mean["graph"], row.with_fallback["graph"]
    assert row.timed["graph"] == 2
    assert mean.value == pytest.approx(2**0.5) and fallback.value == pytest.approx(4**0.25)
    text = "".join(Elements(render_page(gathered, "t").html).text)
    for words in ("4 of 4", "2 of 4 timed", "1.41xgeometric mean of 2 timed tasks, graph", "1 of 4tasks faster than the reference, graph"):
        assert words in text, words


def test_provenance_has_nccls_settings_and_the_prompts(tmp_path: Path) -> None:
    slow = {**ENVIRONMENT, "variables": {"NCCL_ALGO": "Ring", "NCCL_VERSION": "2.28.3-1"}}
    make_run(tmp_path / "run", "m", (1, 2), environment=slow, good=1.0, prompt_version="7-0a1b2c3d")
    (board,) = boards(gather([tmp_path]).samples)
    facts = dict(provenance(board, board.samples))
    assert facts["NCCL"] == "2.28.9, NCCL_ALGO=Ring" and facts["prompt"] == "m: prompt 7-0a1b2c3d"


def test_a_page_opens_on_the_node_with_most_problems(tmp_path: Path) -> None:
    two = {**ENVIRONMENT, "gpus": ENVIRONMENT["gpus"][:2]}  # type: ignore[index]
    make_run(tmp_path / "few", "m", (1, 2), 6)
    make_run(tmp_path / "many", "m", range(1, 6), environment=two)
    make_run(tmp_path / "virtual", "m", range(1, 9), environment=VIRTUAL)
    assert [(board.setting.node_class.gpus, board.setting.node_class.kind) for board in boards(gather([tmp_path]).samples)] == [
        (2, "node"),
        (4, "node"),
        (4, "virtual"),
    ]


def test_sizes_of_a_sweep_are_bytes_and_in_order(tmp_path: Path) -> None:
    sizes = ("1mib", "2kib", "16kib")
    found = [result(candidate=candidate(str(n)), preset=f"sweep_{size}") for n, size in enumerate(sizes)]
    (tmp_path / "results.jsonl").write_text(text_of(*found))
    html = render_page(gather([tmp_path]), "t").html
    assert re.findall(r">sweep_(\w+)<", html) == ["2kib", "16kib", "1mib"]
    sizes_of = {row["task"]: row["bytes"] for row in data_of(html)[0]["reached"]}  # type: ignore[attr-defined]
    assert sizes_of["1 allreduce, 1mib"] == 1.5 * 2**20, "an all-reduce of four ranks moves 2 * 3/4 of its size"


def test_the_page_gives_both_denominators_of_multicast(tmp_path: Path) -> None:
    off = {**ENVIRONMENT, "variables": {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}}
    candidates = [CandidateInfo(name=str(n), labels={"model": "m"}, sha256=f"{n}" * 64, backend="cuda") for n in range(4)]
    crashed = {"verdict": CudaError(phase="first_call", rank=0, message="illegal address"), "speed": (), "flags": ("needs_multicast",)}
    found = [result(candidate=candidates[0], environment=off), wrong(candidate=candidates[1], environment=off)]
    found += [result(candidate=item, environment=off, **crashed) for item in candidates[2:]]
    (tmp_path / "results.jsonl").write_text(text_of(*found))
    gathered = gather([tmp_path])
    (row,) = View(0, boards(gathered.samples)[0], 0).rows
    assert row.entry.needs_multicast == 2 and row.pass_at[1].value == 0.25 and row.without_multicast[1].value == 0.5
    text = "".join(Elements(render_page(gathered, "t").html).text)
    assert "2 need multicast" in text and re.search(r"50.?% of the rest", text) and "None of them counts as right." in text
    assert "NVLS of NCCLoff" in text and "multicast of symmetric memoryoff" in text


def test_provenance_of_older_results_says_unknown(runs: Path) -> None:
    assert "NVLS of NCCLunknown" in "".join(Elements(render_page(gather([runs]), "t").html).text)


def test_hostile_names_and_code_are_inert(tmp_path: Path) -> None:
    make_run(tmp_path / "run", HOSTILE, (1, 2), code=f"# {HOSTILE.replace('{', '{{').replace('}', '}}')}\n" + CODE, name=HOSTILE)
    page = render_page(gather([tmp_path]), HOSTILE)
    found = Elements(page.html)
    assert [tag for tag, _ in found.tags].count("script") == 6 and "img" not in {tag for tag, _ in found.tags}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert HOSTILE in "".join(found.text) and data_of(page.html)[0]["authors"] == [HOSTILE]
    hrefs = [attributes["href"] for tag, attributes in found.tags if tag == "a"]
    assert hrefs and all(re.fullmatch(r"#[a-z0-9-]+", str(href)) for href in hrefs)


def test_traces_are_embedded_as_images(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "m", (1,), good=1.0)
    (tmp_path / "run" / "001" / "0" / "trace").mkdir()
    (tmp_path / "run" / "001" / "0" / "trace" / "candidate.graph.svg").write_text("<svg onload='alert(1)'/>")
    (image,) = [attributes for tag, attributes in Elements(render_page(gather([tmp_path]), "t").html).tags if tag == "img"]
    kind, _, data = str(image["src"]).partition(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(data) == b"<svg onload='alert(1)'/>"


def test_code_cannot_hide_text(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "m", (1,), code="# \u202e reversed \u2066\n" + CODE)
    html = render_page(gather([tmp_path]), "t").html
    assert "\u202e" not in html and "\\u202e" in "".join(Elements(html).text)


def test_the_policy_allows_own_scripts_and_fetches_nothing(runs: Path) -> None:
    html = render_page(gather([runs]), "t").html
    found = [attributes for _, attributes in Elements(html).tags]
    policy = next(str(item["content"]) for item in found if item.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "unsafe-inline" not in policy.partition("script-src")[2]
    for script in re.findall(r"<script>(.*?)</script>", html, re.DOTALL):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert not [
        attributes for _, attributes in Elements(html).tags if "src" in attributes or str(attributes.get("href", "#"))[:4] == "http"
    ]


def test_many_candidates_have_pages_of_their_own(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "m", range(1, 69), 3)
    page = write_page(gather([tmp_path]), tmp_path / "out" / "page.html", "t")
    assert len(page.beside) == 204 > INLINE_CANDIDATES and "def solution" not in page.html
    links = re.findall(r'href="(page_candidates/c\d+\.html)"', page.html)
    assert len(links) == 204 and all((tmp_path / "out" / link).is_file() for link in links)
    own = (tmp_path / "out" / links[0]).read_text()
    assert "solution" in own and 'href="../page.html#candidates"' in own and "<script" not in own and "default-src 'none'" in own


def test_code_is_shown_only_if_it_is_what_was_judged(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "m", (1, 2), good=1.0)
    shown = render_page(gather([tmp_path / "run"]), "t").html
    gone = CandidateInfo(name="x", path="gone/x.py", sha256="2" * 64, backend="cuda")
    (tmp_path / "one.jsonl").write_text(text_of(result(candidate=gone)))
    missing = render_page(gather([tmp_path / "one.jsonl"]), "t").html
    assert 'class="code"' in shown and 'class="code"' not in missing and "was not at hand" in missing
    assert '<span class="kr">__global__</span>' in shown and '<span class="kn">import</span>' in shown, (
        "device code in strings is highlighted too"
    )
    assert data_of(missing)[0]["authors"] == ["gone"]


def test_on_cpu_ranks_nothing_speaks_of_speed(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(text_of(on_cpu(), wrong(device="cpu", environment=ENVIRONMENT)))
    html = render_page(gather([tmp_path]), "t").html
    text = "".join(Elements(html).text)
    assert "Speed needs GPUs" in text and "fast_1" not in text and "Not shown: speedups and the roofline" in text
    assert 'data-plot="fast"' not in html and 'data-plot="reached"' not in html


def test_committed_results_give_a_page_without_an_empty_section() -> None:
    gathered = gather([ROOT / "results"])
    page = render_page(gathered, "Committed results")
    for board, view in zip(boards(gathered.samples), data_of(page.html), strict=True):
        assert view["reached"] or not board.modes or board.setting.node_class.kind == "virtual", board.title  # which has no roofline
        all_correct = all(sample.correct for sample in board.samples)
        assert bool(view["verdicts"]) is not all_correct and (view["fast"] or not board.modes or not board.samples), board.title
    assert not gathered.notes


def test_what_cannot_be_shown_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        gather([tmp_path / "nothing"])
    with pytest.raises(UsageError, match="was judged: expected results"):
        gather([tmp_path])
    (tmp_path / "results.jsonl").write_text(text_of(result()))
    with pytest.raises(UsageError, match=r"ends in \.html"):
        write_page(gather([tmp_path]), tmp_path / "page.htm", "t")


def test_latency_bound_tasks_are_told_apart_on_a_board(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "m", [1, 25])
    (board, *_) = boards(gather([tmp_path / "run"]).samples)
    sizes = {name: size for name, (size, _) in View(0, board, 0).kinds.items()}
    assert sizes == {"bound below 20 us (latency)": 1, "bound by bandwidth or compute": 1}
