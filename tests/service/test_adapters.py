"""Adapters on a service of stand-ins, by the calls that trainers make. test_trainers.py runs them in the trainers themselves."""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import peerlane as pl
from peerlane.common.version import PACKAGE
from peerlane.errors import HarnessError, UsageError
from peerlane.results.reader import as_document
from peerlane.results.verdict import HarnessFailure
from peerlane.service.adapters import harbor, verl
from peerlane.service.adapters.nemo_rl import environment_class
from peerlane.service.adapters.reward import URL, RewardSettings, reply_text, reward_of
from peerlane.service.adapters.trl import reward_function
from peerlane.service.adapters.verifiers import named_rewards
from peerlane.service.client import ServiceFault
from sample_results import on_cpu, result, wrong
from service.stand_in import TOKEN, Running, serving

SMALL = {"presets": ("small",), "modes": ()}
ROOT = Path(__file__).parents[2]
CALLED = "def solution(tensor):\n    return tensor  # right by a tool\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("service")) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv(URL, running.url)
        patch.setenv("PEERLANE_TOKEN", TOKEN)
        yield running


def reply(comment: str = "") -> str:
    return f"Here it is:\n```python\ndef solution(tensor):\n    return tensor  # {comment}\n```\n"


REPLIES = {
    reply("right"): 1.0,
    reply("wrong"): 0.0,
    "I cannot do this.": 0.0,
    reply("harness"): None,
    reply("not run"): None,
    reply("raise"): None,
}


def test_trl_gets_none_where_there_is_no_verdict(service: Running) -> None:
    """The call that TRL 1.16 makes: columns of the data set as lists, further keywords; conversations as lists of messages."""
    judge = reward_function(RewardSettings(options=SMALL))
    others = {"completion_ids": [[1]] * len(REPLIES), "trainer_state": None, "log_extra": None, "log_metric": None}
    texts = list(REPLIES)
    found = asyncio.run(judge(prompts=[""] * len(texts), completions=texts, problem=[1] * len(texts), **others))
    assert found == list(REPLIES.values())
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert asyncio.run(judge(prompts=[""] * len(texts), completions=chats, problem=[1] * len(texts))) == found


def test_verl_gets_a_flag_where_there_is_no_verdict(service: Running) -> None:
    for text, value in REPLIES.items():
        told = asyncio.run(verl.compute_score("peerlane", text, "1", {"index": 0}, options=SMALL))
        assert (told["score"], told["harness_fault"]) == (value or 0.0, float(value is None))


@pytest.fixture
def nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its interfaces, for the package cannot be installed from PyPI."""
    interfaces = ModuleType("nemo_rl.environments.interfaces")
    fields = ["observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers"]
    vars(interfaces).update(EnvironmentInterface=object, EnvironmentReturn=namedtuple("EnvironmentReturn", fields))
    for name, module in (("nemo_rl", interfaces), ("nemo_rl.environments", interfaces), (interfaces.__name__, interfaces)):
        monkeypatch.setitem(sys.modules, name, module)


def test_nemo_rl_gets_rewards_observations_and_flags(service: Running, nemo_rl: None) -> None:
    environment = environment_class()({"options": SMALL})
    logs = [[{"role": "user", "content": "write"}, {"role": "assistant", "content": text}] for text in REPLIES]
    found = environment.step(logs, [{"problem": 1, "index": 7}] * len(REPLIES))
    assert found.rewards.tolist() == [value or 0.0 for value in REPLIES.values()] and found.terminateds.all()
    assert [item["harness_fault"] for item in found.metadata] == [value is None for value in REPLIES.values()]
    assert found.metadata[0]["index"] == 7 and "verdict: wrong_result" in found.observations[1]["content"]
    assert environment.global_post_process_and_metrics({"total_reward": found.rewards})[1] == {
        "mean_reward": pytest.approx(1 / len(REPLIES))
    }


def test_verifiers_gets_named_rewards_or_an_error(service: Running) -> None:
    settings = RewardSettings(options=SMALL)
    assert asyncio.run(named_rewards(1, reply("right"), settings)) == {"correct": 1.0, "fast": 0.0}
    assert asyncio.run(named_rewards(1, reply("wrong"), settings)) == {"correct": 0.0, "fast": 0.0}
    with pytest.raises(ServiceFault, match="no verdict"):
        asyncio.run(named_rewards(1, reply("harness"), settings))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of inspect
def test_inspect_scores_the_task_that_its_entry_point_names(service: Running, tmp_path: Path) -> None:
    """The real library, with its mock of a model; a sample without a verdict is an error and not a 0."""
    from importlib.metadata import entry_points

    from inspect_ai import eval as inspect_eval
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    module = next(found for found in entry_points(group="inspect_ai") if found.name == "peerlane").load()
    texts = [reply("right inspect"), reply("wrong inspect"), reply("harness inspect")]
    outputs = [ModelOutput.from_content("mockllm/model", text) for text in texts]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    task = module.kernels(problems="1", preset="small", shots=0)
    model = get_model("mockllm/model", custom_outputs=outputs)
    (log,) = inspect_eval(task, model=model, epochs=3, log_dir=str(tmp_path), fail_on_error=False, max_samples=1, display="none")
    samples = log.samples or []
    found = [sample.scores["peerlane"].value["correct"] for sample in samples if sample.scores]
    assert sorted(found) == [0, 1] and len([sample for sample in samples if sample.error]) == 1


def test_replies_of_all_shapes_are_read() -> None:
    assert reply_text("a") == reply_text([{"content": "a"}]) == reply_text({"content": [{"type": "text", "text": "a"}]}) == "a"
    assert reply_text([]) == "" and reply_text(None) == ""


def odd_replies() -> list[str]:
    """200 replies as models in training write them: cut, looping, without text, with bytes that no encoding has."""
    draw = random.Random(7)
    parts = [
        "```",
        "```python\n",
        "~~~",
        "\n",
        "def solution(tensor):\n    return tensor  # right\n",
        "def solution(",
        '"""',
        "<think>",
        "</think>",
    ]
    parts += ["\ud800", "\x00", "\ufeff", "\r", "é", "None", "{", "I cannot", "solution = ", "(" * 300, "-" * 3000 + "1", "#" * 5000]
    code = "```python\ndef solution(tensor):\n    return tensor  # right {}\n```"
    fixed = [
        "",
        "\ud800",
        code.format("\ud800"),
        code.format("\x00"),
        code.format("a" * (2 << 20)),
        code.format("é" * ((2 << 20) - 99)),
        "x" * (3 << 20),
    ]
    return fixed + ["".join(draw.choices(parts, k=draw.randrange(12))) for _ in range(200 - len(fixed))]


async def inspected(problem: int, reply: str, settings: RewardSettings) -> float:
    """Returns the score that Inspect gives a reply."""
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Target

    from peerlane.service.adapters.inspect_task import kernel_scorer

    state = SimpleNamespace(metadata={"problem": problem}, output=ModelOutput.from_content("mock/model", reply))
    score: Any = await kernel_scorer(settings)(state, Target(""))  # type: ignore[arg-type]
    return float(score.value["correct"])


@pytest.mark.filterwarnings("ignore")  # of inspect
def test_odd_replies_get_a_reward_from_every_adapter(service: Running, nemo_rl: None) -> None:
    """A reward that is a number for every reply, the same of all adapters: one odd reply must not end a training run."""
    replies, settings = odd_replies(), RewardSettings(options=SMALL)
    numbers = [1] * len(replies)
    shown = asyncio.run(reward_function(settings)(prompts=numbers, completions=replies, problem=numbers))
    assert len(replies) == 200 and set(shown) == {0.0, 1.0}
    logs = [[{"role": "assistant", "content": reply}] for reply in replies]
    assert environment_class()({"options": SMALL}).step(logs, [{"problem": 1}] * 200).rewards.tolist() == shown

    async def of_the_others() -> list[list[float]]:
        scores = await asyncio.gather(*[verl.compute_score("peerlane", reply, "1", {}, options=SMALL) for reply in replies])
        named = await asyncio.gather(*[named_rewards(1, reply, settings) for reply in replies])
        inspect = await asyncio.gather(*[inspected(1, reply, settings) for reply in replies])
        return [[item["score"] for item in scores], [item["correct"] for item in named], inspect]

    assert asyncio.run(of_the_others()) == [shown] * 3


@pytest.mark.parametrize(
    ("given", "value", "verdict"),
    [
        ({"role": "assistant", "content": None}, 0.0, "empty"),
        ([], 0.0, "empty"),
        (None, 0.0, "empty"),
        ("", 0.0, "empty"),
        ({"content": 7}, 0.0, "empty"),
        ({"content": [None, {"type": "text", "text": None}]}, 0.0, "empty"),
        ({"content": None, "refusal": "I must not."}, 0.0, "refused"),
        ([{"content": "```python\ndef solution(t):\n    return t  # \ud800\n```"}], 0.0, "no_code"),
        (f"```python\ndef solution(t):\n    return t\n{'#' * (2 << 20)}\n```", 0.0, "no_code"),
        (f"```python\ndef solution(t):\n    return t  # right\n#{'é' * 1_040_000}\n```", 1.0, "correct"),
        ({"content": None, "tool_calls": [{"function": {"name": "write", "arguments": json.dumps({"file": CALLED})}}]}, 1.0, "correct"),
        ({"content": None, "tool_calls": [{"function": {"name": "write", "arguments": "{"}}, None, 7]}, 0.0, "empty"),
    ],
)
def test_every_shape_of_a_message_gets_a_reward(service: Running, given: Any, value: float, verdict: str) -> None:
    found = asyncio.run(reward_of(1, given, RewardSettings(options=SMALL)))
    assert (found.value, found.verdict) == (value, verdict) and found.feedback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "speed"}, "kind='speed': expected one of correct, log_speedup, fast_p"),
        ({"kind": "log_speedup", "options": {"modes": ()}}, "needs a speed, and modes=() measures none"),
        ({"p": -1.0}, "p=-1.0"),
        ({"options": {"preset": "small"}}, "unknown options: preset"),
        ({"options": {"presets": ("small", "pkb")}}, "expected one preset"),
    ],
)
def test_settings_that_cannot_work_fail_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        RewardSettings(**arguments)
    assert message in str(error.value)


def test_a_cut_reply_is_truncated() -> None:
    found = asyncio.run(reward_of(1, "```python\ndef solution(x):", RewardSettings(url="http://127.0.0.1:1")))
    assert (found.value, found.verdict) == (0.0, "truncated") and "ends before" in found.feedback


def test_a_service_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL, raising=False)
    with pytest.raises(UsageError, match=URL):
        asyncio.run(reward_of(1, reply(), RewardSettings()))


def test_harbor_rewards_are_finite_numbers_or_nothing() -> None:
    def told(item: pl.Result) -> dict[str, float]:
        return harbor.harbor_reward(as_document([item]))

    assert told(on_cpu()) == {"reward": 1.0, "correct": 1.0} and told(wrong()) == {"reward": 0.0, "correct": 0.0}
    assert told(result())["log_speedup"] > 1
    with pytest.raises(HarnessError, match="no verdict"):
        told(on_cpu(verdict=HarnessFailure(phase="spawn", message="no ranks"), speed=()))


def test_the_image_of_an_agent_holds_no_answers(tmp_path: Path) -> None:
    """The command of the Dockerfile, on a copy of the package with what a wheel adds to it; the evaluator's audit works without them."""
    package = tmp_path / "peerlane"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for source, target in (("examples", "examples"), ("tests/adversarial/corpus", "evaluate/selftest/corpus")):
        shutil.copytree(ROOT / source, package / target, dirs_exist_ok=True)
    (task,) = harbor.export_harbor(tmp_path / "tasks", "1", harbor.HarborSettings(hardware="h200x4"))
    (line,) = [line for line in (task / "environment" / "Dockerfile").read_text().splitlines() if line.startswith("RUN pip install")]
    command = line.partition(" && ")[2]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], env=environment, cwd=tmp_path, check=True, timeout=60)
    left = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    assert "evaluate/evaluator.py" in left and (ROOT / "src" / "peerlane" / "solutions").is_dir()
    assert not [name for name in left if name.startswith(("solutions/", "ops/", "nn/", "examples/", "evaluate/selftest/corpus/"))]
    for answer in (PACKAGE / "solutions").rglob("p0*.py"):
        assert not [name for name in left if Path(name).name == answer.name and (package / name).read_text() == answer.read_text()]
    program = (
        "from peerlane.evaluate.audit.library import library_kernels as found; import peerlane; print(peerlane.__file__, len(found()))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True, timeout=120, capture_output=True, text=True
    )
    path, count = shown.stdout.split()
    assert path.startswith(str(package)) and int(count) > 10


@pytest.mark.slow
def test_harbor_tasks_run_without_containers(tmp_path: Path) -> None:
    """The files of the export, their absolute paths in a folder: the oracle's script, then the verifier's, on CPU ranks."""
    settings = harbor.HarborSettings(gpus=0, preset="small", track="open", device="cpu", world_size=2)
    (task,) = harbor.export_harbor(tmp_path / "tasks", "1", settings)
    toml = tomllib.loads((task / "task.toml").read_text())
    assert toml["schema_version"] == "1.4" and toml["verifier"]["environment_mode"] == "separate" and toml["metadata"]["problem"] == 1
    assert "/app/candidate.py" in (task / "instruction.md").read_text()
    for name in ("app", "logs/verifier"):
        (tmp_path / name).mkdir(parents=True)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(script: Path) -> int:
        text = script.read_text().replace("/app/", f"{tmp_path}/app/").replace("/logs/", f"{tmp_path}/logs/")
        return subprocess.run(["bash", "-c", text], env=environment, capture_output=True, timeout=120, check=False).returncode

    assert run(task / "solution" / "solve.sh") == 0
    solution = next((ROOT / "src" / "peerlane" / "solutions").glob("p001_*.py"))
    assert (tmp_path / "app" / "candidate.py").read_text() == solution.read_text()
    (tmp_path / "app" / "candidate.py").write_text((ROOT / "examples" / "pytorch" / "1_allreduce_pytorch.py").read_text())
    assert run(task / "tests" / "test.sh") == 0
    assert json.loads((tmp_path / "logs" / "verifier" / "reward.json").read_text()) == {"reward": 1.0, "correct": 1.0}
