"""What a provider answers besides replies: a sentence each, and no sample of the model."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import Peerlane
from generate.fake_provider import FakeServer
from peerlane.cli.exit_codes import ExitCode
from peerlane.generate.extra import require_models_extra
from peerlane.generate.run_folder import RunFolder, SampleRecord

require_models_extra()  # says what to install

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("model_surroundings")]  # warnings of other people's packages

CODE = "def solution(*args):\n    return args[0]\n"
PROXY = "<html><body>proxy error</body></html>"


def ask(peerlane: Peerlane, folder: Path, url: str, *more: Any, code: int = ExitCode.OK) -> str:
    words = ["generate", "1", "--model", "openai-api/fake/model-x", "--base-url", url, "--hardware", "h200x4", "--out", folder]
    return peerlane(*words, "--connections", 1, "--retries", 1, *more, code=code).err


def records(folder: Path) -> list[SampleRecord]:
    run = RunFolder.open(folder)
    return [run.sample(key) for key in run.sample_keys()]


def fault(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    return {"status": status, "body": {"error": {"message": message, "type": "invalid_request_error", "code": code}}}


TOO_LONG = fault(400, "This model's maximum context length is 8192 tokens, but 9000 were asked for.", "context_length_exceeded")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (TOO_LONG, "the prompt does not fit the model's context"),
        (fault(401, "Incorrect API key provided"), "401: Incorrect API key provided"),
        (fault(403, "Country not supported"), "403: Country not supported"),
        (fault(404, "The model `model-x` does not exist"), "404: The model `model-x` does not exist"),
        (fault(500, "out of cards"), "500: out of cards"),
        ({"status": 200, "body": PROXY, "type": "text/html"}, f"no JSON: {PROXY}"),
        ({"status": 502, "body": PROXY, "type": "text/html"}, f"502: {PROXY}"),
    ],
)
def test_a_providers_fault_is_a_sentence_and_no_sample(answer: dict[str, Any], sentence: str, tmp_path: Path, peerlane: Peerlane) -> None:
    with FakeServer(lambda messages, tools: answer) as server:
        said = ask(peerlane, tmp_path / "run", server.url, code=ExitCode.CHECK_FAILED)
    assert f"001/0: {sentence}" in said and "Future" not in said and max(map(len, said.splitlines())) < 340
    assert records(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (fault(400, "Your request was flagged by our usage policy.", "content_policy_violation"), "refused"),
        ({"text": None, "refusal": "I must not."}, "refused"),
        ({"text": None}, "empty"),
        ({"text": "", "reasoning": "Done."}, "empty"),
        ({"text": f"```python\n{CODE}"}, "code"),
        ({"tool": "write", "args": {"source": CODE}}, "code"),
    ],
)
def test_a_reply_without_text_is_a_sample(answer: dict[str, Any], status: str, tmp_path: Path, peerlane: Peerlane) -> None:
    with FakeServer(lambda messages, tools: answer) as server:
        ask(peerlane, tmp_path / "run", server.url)
        assert len(server.requests) == 1
    (record,) = records(tmp_path / "run")
    assert record.status == status
    if status == "code":
        assert (tmp_path / "run" / "001" / "0" / "candidate.py").read_text() == CODE
        assert CODE.splitlines()[0] in (tmp_path / "run" / "001" / "0" / "reply.md").read_text()


def test_an_address_without_a_server_ends_the_run_at_once(tmp_path: Path, peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch) -> None:
    from tenacity import wait_fixed

    monkeypatch.setattr("inspect_ai.model._retry.wait_exponential_jitter", lambda *_, **__: wait_fixed(30))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        began = time.monotonic()
        said = ask(peerlane, tmp_path / "run", url, "--samples", 3, "--retries", 8, code=ExitCode.USAGE)
    assert time.monotonic() - began < 25 and f"connection refused: {url}" in said


def test_every_retry_is_a_line(tmp_path: Path, peerlane: Peerlane) -> None:
    replies = iter([fault(500, "out of cards"), fault(429, "slow down")])
    with FakeServer(lambda messages, tools: next(replies, {"text": f"```python\n{CODE}```"})) as server:
        said = ask(peerlane, tmp_path / "run", server.url, "--retries", 3)
    assert "tried again: 500: out of cards" in said and "tried again: 429: slow down" in said
