"""The protocol, over HTTP on loopback, with a stand-in for the evaluator."""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

import peerlane as pl
from e2e.runs import wait_for
from peerlane.errors import UsageError
from peerlane.evaluate.candidates import candidate_text
from peerlane.service import node_check
from peerlane.service.adapters.reward import RewardSettings
from peerlane.service.app import MOST_BODY_BYTES
from peerlane.service.client import Client, ServiceFault
from peerlane.service.queue import JobQueue
from peerlane.service.server import listen
from peerlane.service.settings import Tokens
from service.stand_in import OTHER, TOKEN, TOKENS, Running, serving

RIGHT = "def solution(tensor): ..."


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("service"), queue_limit=100_000) as found:
        yield found


def http(running: Running, token: str = TOKEN) -> httpx.Client:
    return httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {token}"}, timeout=30)


def client(running: Running, **options: Any) -> Client:
    return Client(running.url, TOKEN, **{"presets": ("small",), "modes": (), **options})


def job(source: str = RIGHT, **fields: Any) -> dict[str, Any]:
    return {"problem": 1, "source": source, "preset": "small", **fields}


def test_results_are_stored_records_and_equal_requests_one_job(running: Running) -> None:
    source = f"{RIGHT}  # stored"
    with client(running) as judge:
        first, twin = judge.evaluate(1, source, name="one"), judge.evaluate(1, source, name="two", priority=3)
    assert first.correct and first.track == "custom" and (first.candidate.name, twin.candidate.name) == ("one", "two")
    assert twin == first.model_copy(update={"candidate": first.candidate.model_copy(update={"name": "two"})})
    assert running.judged[source] == 1 and first.environment["software"]["torch"]
    with http(running) as raw:
        found = raw.post("/v1/jobs", json=job(source, modes=())).json()
    assert pl.Result.model_validate({**found["result"], "environment": found["environment"]}).identity == first.identity


def test_what_is_refused_and_why(running: Running) -> None:
    with http(running, "no-token") as raw:
        for method, path in (
            ("POST", "/v1/jobs"),
            ("GET", "/v1/jobs/x"),
            ("DELETE", "/v1/jobs/x"),
            ("GET", "/metrics"),
            ("GET", "/v1/node"),
        ):
            answer = raw.request(method, path)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert raw.get("/health").status_code == 200

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * (MOST_BODY_BYTES // 50)

    with http(running) as raw:
        assert raw.post("/v1/jobs", content=b"x" * (MOST_BODY_BYTES + 1)).status_code == 413
        assert raw.post("/v1/jobs", content=chunks()).status_code == 413
        for wrong, field in (
            ({"problem": 999}, "problem"),
            ({"preset": "huge"}, "preset"),
            ({"preset": "production"}, "preset"),
            ({"modes": ["fast"]}, "modes.0"),
            ({"world_size": 8}, "world_size"),
            ({"name": "a/b"}, "name"),
            ({"surprise": 1}, "surprise"),
            ({"timeout": 0}, "timeout"),
            ({"problem": True}, "problem"),
            ({"problem": "1"}, "problem"),
            ({"rerun": 1}, "rerun"),
        ):
            answer = raw.post("/v1/jobs", json=job(**wrong))
            assert answer.status_code == 422 and [item["field"] for item in answer.json()["fields"]] == [field], answer.text
        assert raw.get("/v1/jobs/x?wait=soon").json()["fields"][0]["field"] == "wait"
        assert (
            raw.get("/v1/jobs/x").status_code == 404 and raw.get("/nowhere").status_code == 404 and raw.put("/v1/jobs").status_code == 405
        )
    with client(running) as judge, pytest.raises(UsageError, match="problem 999"):
        judge.evaluate(999, RIGHT)
    with Client(running.url, "no-token") as judge, pytest.raises(UsageError, match="PEERLANE_TOKEN"):
        judge.node()


def test_only_its_owner_has_a_job_judged_again(running: Running) -> None:
    source = f"{RIGHT}  # owned"
    with http(running) as owner, http(running, OTHER) as other:
        key = owner.post("/v1/jobs", json=job(source, modes=(), name="private")).json()["id"]
        mine = owner.get(f"/v1/jobs/{key}", params={"wait": 20}).json()
        assert mine["state"] == "done" and mine["result"]["candidate"]["name"] == "private"
        first = other.post("/v1/jobs", json=job(source, modes=())).json()
        assert first["result"]["candidate"].pop("name") == "candidate" and mine["result"]["candidate"].pop("name") and first == mine
        first["result"]["candidate"]["name"] = "candidate"
        answer = other.post("/v1/jobs", json=job(source, modes=(), rerun=True))
        assert answer.status_code == 403 and "another token" in answer.json()["error"]
        assert other.get(f"/v1/jobs/{key}").json() == first and running.judged[source] == 1
        assert owner.post("/v1/jobs", json=job(source, modes=(), rerun=True)).status_code == 202
        assert owner.get(f"/v1/jobs/{key}", params={"wait": 20}).json()["state"] == "done" and running.judged[source] == 2
    with Client(running.url, OTHER, presets=("small",), modes=()) as judge:
        with pytest.raises(UsageError, match="another token"):
            judge.evaluate(1, source, rerun=True)
        assert judge.evaluate(1, source).correct and running.judged[source] == 2


def test_a_full_queue_and_a_full_share_are_told(tmp_path: Path) -> None:
    with serving(tmp_path, queue_limit=4, share=0.5) as running, http(running) as one, http(running, OTHER) as two:
        slow = one.post("/v1/jobs", json=job("# sleep 60")).json()["id"]
        wait_for(lambda: one.get(f"/v1/jobs/{slow}").json()["state"] == "running", 10, "the slow job")
        mine = [one.post("/v1/jobs", json=job(f"# {number}")) for number in range(3)]
        assert [answer.status_code for answer in mine] == [202, 202, 429] and "share" in mine[2].json()["error"]
        assert int(mine[2].headers["retry-after"]) >= 1
        theirs = [two.post("/v1/jobs", json=job(f"# two {number}")) for number in range(3)]
        assert [answer.status_code for answer in theirs] == [202, 202, 429] and "queue is full" in theirs[2].json()["error"]
        assert one.post("/v1/jobs", json=job("# 1")).status_code == 202, "what is accepted is accepted again"
        assert one.get(f"/v1/jobs/{mine[1].json()['id']}").json()["ahead"] == 1
        one.delete(f"/v1/jobs/{slow}")
        done = one.get(f"/v1/jobs/{mine[0].json()['id']}", params={"wait": 20}).json()
        assert done["state"] == "done", "the slow job made way"


def test_a_queue_that_is_full_for_now_costs_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client comes back until it gets in."""
    monkeypatch.setattr("peerlane.service.app._AGAIN_S", 0)
    with serving(tmp_path, queue_limit=2) as running, client(running) as judge:

        async def all_of() -> list[pl.Result]:
            return await asyncio.gather(*[judge.evaluate_async(1, f"# sleep 0.02 {number}") for number in range(24)])

        results = asyncio.run(all_of())
        assert all(result.correct for result in results) and len(running.judged) == 24 and set(running.judged.values()) == {1}
        assert running.service.responses["/v1/jobs", 429] > 0


def test_stages_come_as_events(running: Running) -> None:
    with http(running) as raw:
        key = raw.post("/v1/jobs", json=job("# sleep 0.3 events")).json()["id"]
        with raw.stream("GET", f"/v1/jobs/{key}/events") as stream:
            seen = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: ")]
    assert seen[-1]["state"] == "done" and seen[-1]["result"]["verdict"]["kind"] == "correct"
    assert "correctness" in [item.get("stage") for item in seen if item["state"] == "running"]


def test_a_poll_ends_with_the_job_or_with_its_time(running: Running) -> None:
    with http(running) as raw:
        key = raw.post("/v1/jobs", json=job("# sleep 0.6 poll")).json()["id"]
        begin = time.monotonic()
        assert raw.get(f"/v1/jobs/{key}", params={"wait": 0.1}).json()["state"] in ("queued", "running")
        assert time.monotonic() - begin < 0.5
        assert raw.get(f"/v1/jobs/{key}", params={"wait": 30}).json()["state"] == "done"
        assert time.monotonic() - begin < 10


def test_a_cancelled_task_ends_its_evaluation(running: Running) -> None:
    """At once, unless another task waits for the same."""
    source = "# sleep 3 cancelled"

    async def cancel(also: bool) -> bool:
        with client(running) as judge:
            task, twin = (asyncio.create_task(judge.evaluate_async(1, source)) for _ in range(2))
            before = running.judged[source]
            while running.judged[source] == before:
                await asyncio.sleep(0.01)
            task.cancel()
            if also:
                twin.cancel()
            found = await asyncio.gather(task, twin, return_exceptions=True)
            assert isinstance(found[0], asyncio.CancelledError)
            return isinstance(found[1], pl.Result)

    begin = time.monotonic()
    assert not asyncio.run(cancel(also=True)) and time.monotonic() - begin < 2.5
    assert asyncio.run(cancel(also=False))


def test_a_job_that_another_call_still_wants_is_judged(running: Running) -> None:
    """The other call was under way, so that nobody knew yet that it wants the job."""
    source = "# sleep 1 taken back"
    with client(running) as judge, ThreadPoolExecutor(1) as threads:
        wanted = threads.submit(judge.evaluate, 1, source)
        wait_for(lambda: running.judged[source] > 0 and bool(judge._wanted), 10, "a running job")
        judge._take_back(*next(iter(judge._wanted)))
        assert wanted.result(20).correct


def test_failures_of_the_machine_are_no_verdict(running: Running) -> None:
    """A harness error is tried again, and a result that says nothing gives no reward; the request may be repeated."""
    with client(running) as judge:
        assert judge.evaluate(1, "# harness once").correct and running.judged["# harness once"] == 2
        assert judge.evaluate(1, "# harness").reward("correct") is None and running.judged["# harness"] == 3
        assert judge.evaluate(1, "# busy").reward("correct") is None and running.judged["# busy"] == 3
        assert judge.evaluate(1, "# not run").reward("correct") is None and running.judged["# not run"] == 1
        assert judge.evaluate(1, "# not run").verdict.kind == "not_run" and running.judged["# not run"] == 2
        with pytest.raises(ServiceFault, match="the stand-in fell over"):
            judge.evaluate(1, "# raise")
        assert judge.evaluate(1, "# wrong").reward("correct") == 0.0


def test_the_example_of_the_page_runs(running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PEERLANE_TOKEN", TOKEN)
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text(encoding="utf-8")
    source = page.partition("<!-- client:begin -->\n```python\n")[2].partition("```")[0]
    exec(source.replace("http://127.0.0.1:8300", running.url), {})
    assert capsys.readouterr().out == "correct 1.0\n"


def test_metrics_count_what_happened(running: Running) -> None:
    with http(running) as raw:
        raw.post("/v1/jobs", json=job("# wrong metrics"))
        answer = raw.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert float(values['peerlane_verdicts_total{kind="correct"}']) >= 1 and float(values["process_cpu_seconds_total"]) > 0
    assert float(values['peerlane_responses_total{route="/v1/jobs",status="202"}']) >= 1
    for name in ("waiting", "judging"):
        buckets = [int(value) for key, value in values.items() if key.startswith(f"peerlane_{name}_seconds_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == int(values[f"peerlane_{name}_seconds_count"]) >= 1


def test_a_client_of_two_services_spreads_its_jobs(running: Running, tmp_path: Path) -> None:
    with serving(tmp_path) as other, Client([running.url, other.url], TOKEN, presets=("small",), modes=()) as judge:
        results = judge.evaluate_all([candidate_text(f"{RIGHT}  # spread {number} # sleep 0.1", 1) for number in range(8)])
        assert all(result.correct for result in results)
        assert sum(other.judged.values()) == sum("spread" in source for source in running.judged) == 4


def test_a_job_goes_on_at_another_service_if_one_is_gone(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerlane.service.client._MOVE_ON_S", 0.1)
    with Client(["http://127.0.0.1:9", running.url], TOKEN, presets=("small",), modes=()) as judge:
        results = judge.evaluate_all([candidate_text(f"{RIGHT}  # gone {number}", 1) for number in range(4)])
    assert all(result.correct for result in results)


def test_a_reward_has_a_time_limit_unless_it_says_another() -> None:
    services = "http://127.0.0.1:9,http://127.0.0.1:10"
    assert RewardSettings(url=services).client()._options["timeout"] == 60.0
    assert RewardSettings(url=services, options={"timeout": 5.0}).client()._options["timeout"] == 5.0


def test_a_node_that_fails_its_check_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = node_check.NodeReport("CPU ranks", ("1_c02_returns_its_input_pytorch: expected wrong_result, got correct",), 6)
    told = f"import sys; sys.stdin.read(); print({json.dumps(json.dumps(report.to_json()))})"
    monkeypatch.setattr(node_check, "command", lambda: [sys.executable, "-c", told])
    with serving(tmp_path, check=True) as running, http(running) as raw:
        wait_for(lambda: raw.get("/health").status_code == 503, 20, "the report")
        assert "1_c02_returns_its_input_pytorch" in raw.get("/health").json()["why"]
        answer = raw.post("/v1/jobs", json=job())
        assert answer.status_code == 503 and "left out" in answer.json()["error"] and answer.headers["retry-after"]
        assert not running.judged


def test_a_node_whose_ranks_fail_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations in a row that fail in the harness; a node that passes goes on."""
    report = json.dumps(node_check.NodeReport("CPU ranks", (), 6).to_json())
    count = tmp_path / "checks"
    told = f"import sys; sys.stdin.read(); open({str(count)!r}, 'a').write('x'); print({report!r})"
    monkeypatch.setattr(node_check, "command", lambda: [sys.executable, "-c", told])
    with serving(tmp_path / "folder", check=True) as running, client(running) as judge:
        assert judge.evaluate(1, RIGHT).correct and count.read_text() == "x"
        assert judge.evaluate(1, "# harness").verdict.kind == "harness_error"
        assert judge.evaluate(1, f"{RIGHT}  # next").correct and count.read_text() == "xx"


def test_a_full_disk_costs_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of the file are limited, which sqlite answers as it does a full disk: to add, to take and to finish a job."""
    monkeypatch.setattr("peerlane.service.node._DISK_S", 0.05)
    with serving(tmp_path) as running, http(running) as raw, client(running) as judge:
        slow = raw.post("/v1/jobs", json=job("# sleep 0.5 finish")).json()["id"]
        waits = raw.post("/v1/jobs", json=job("# waits")).json()["id"]
        limit_pages(running, 1)
        refused = raw.post("/v1/jobs", json=job("# too large " + "x" * 900_000))
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "full" in refused.json()["error"], refused.text
        time.sleep(1.0)  # the slow one has ended and cannot be stored
        health = raw.get("/health")
        assert health.status_code == 503 and "database or disk is full" in health.json()["why"]
        assert "peerlane_node_ready 0" in raw.get("/metrics").text
        limit_pages(running, 1 << 30)
        for key in (slow, waits):
            assert raw.get(f"/v1/jobs/{key}", params={"wait": 20}).json()["state"] == "done"
        assert raw.get("/health").json() == {"condition": "ready", "why": None}
        assert judge.evaluate(1, "# after").correct and set(running.judged.values()) == {1}


def limit_pages(running: Running, most: int) -> None:
    """Lets the queue's file have so many pages, or those that it has."""
    running.service.queue._db.execute(f"pragma max_page_count = {most}")


def test_a_result_that_cannot_be_stored_costs_no_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerlane.service.node._DISK_S", 0.3)
    with serving(tmp_path) as running, http(running) as raw:
        key = raw.post("/v1/jobs", json=job("# not stored once")).json()["id"]
        wait_for(lambda: raw.get("/health").status_code == 503, 10, "the fault")
        assert "No space left on device" in raw.get("/health").json()["why"]
        found = raw.get(f"/v1/jobs/{key}", params={"wait": 20}).json()
        assert (found["state"], found["tries"]) == ("done", 1) and running.judged["# not stored once"] == 2


def test_a_service_whose_loop_is_dead_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def die(queue: JobQueue) -> None:
        raise AssertionError("a defect of the queue")

    with serving(tmp_path) as running, http(running) as raw:
        monkeypatch.setattr(JobQueue, "take", die)
        raw.post("/v1/jobs", json=job())
        wait_for(lambda: not running.is_up(), 10, "the end of the service")
    assert isinstance(running.service.node.ended_by, AssertionError) and running.service.node.condition != "ready"
    assert "a defect of the queue" in capfd.readouterr().err


def test_nobody_listens_to_the_world_without_a_token() -> None:
    with pytest.raises(UsageError, match="PEERLANE_TOKEN"):
        listen("0.0.0.0", 0, Tokens())
    listen("0.0.0.0", 0, TOKENS).close()


def break_off(server: socket.socket) -> None:
    """Answers every request with less than it announces."""
    with contextlib.suppress(OSError):
        while True:
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")


def test_a_service_that_is_not_there_is_told() -> None:
    with Client("http://127.0.0.1:9", TOKEN, patience=0.3) as judge, pytest.raises(ServiceFault, match="does not answer"):
        judge.evaluate(1, RIGHT)
    with socket.create_server(("127.0.0.1", 0)) as server:  # killed in the middle of an answer
        threading.Thread(target=break_off, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with Client(url, TOKEN, patience=0.3) as judge, pytest.raises(ServiceFault, match=r"IncompleteRead|reset by peer"):
            judge.evaluate(1, RIGHT)
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:8300"):
        Client("localhost")


OPERATIONS = (
    "POST /v1/jobs", "GET /v1/jobs/{id}", "DELETE /v1/jobs/{id}", "GET /v1/jobs/{id}/events", "GET /v1/node", "GET /metrics", "GET /health",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_openapi_document_is_kept(operation: str, running: Running) -> None:
    """Requests made from the document, good and bad, get the answers that it promises."""
    document = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    method, path = operation.split()

    @given(case=strategies.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]).flatmap(document[path][method].as_strategy))
    @settings(max_examples=10, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        # What the schema cannot say: which problems and presets there are.
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30, excluded_checks=[positive_data_acceptance])

    check()
