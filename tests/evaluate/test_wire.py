"""The wire: what is sent is what is read, every request has a handler, and nothing that a candidate answers gets past its declaration."""

import inspect
import json
from typing import Any

import pytest

from peerlane.errors import ProtocolError
from peerlane.evaluate import messages, wire
from peerlane.evaluate.messages import REQUESTS, PerRank, Request
from peerlane.evaluate.rank_interface import BuilderInterface, CandidateInterface, EmulatedInterface, TrustedInterface
from peerlane.evaluate.ranks.builder import Builder
from peerlane.evaluate.ranks.candidate import CandidateRank
from peerlane.evaluate.ranks.emulated import EmulatedCandidate
from peerlane.evaluate.ranks.rank import RankProcess
from peerlane.evaluate.ranks.serve import _error
from peerlane.evaluate.ranks.trusted import TrustedRank
from peerlane.evaluate.wire import MOST_EVENTS, MOST_FINDINGS, MOST_NAMES
from peerlane.evaluate.wire_format import reader_of
from peerlane.results.feedback import feedback
from peerlane.results.verdict import RuntimeFailure

CASE = wire.CaseId(1, "small", "37x53 bf16", 2, 1)
LAYOUT = wire.CaseLayout({"kind": "cpu", "size": 4096, "offset": 0}, [{"kind": "list", "items": []}], [{}], 512, 256, {"tp": [[0, 1]]})
PLAN = wire.BlockPlan(4, ((1, 1, 3),))
EVENT, STAMP = ("gemm", 7, 5, 9), ("wait", "storer", 5, 1, 2)
PLAIN_RECORDING = wire.Recording({"cuLaunchKernel": 1}, {"gemm": 2}, ["begin", "end"], 0, 900, [], None, None)
TIMELINE = wire.Recording({}, {}, ["begin", "end"], 0, 900, [], [EVENT], [STAMP])
SCORE = wire.SlotScore(0, None, 0.5, "output", "differs", (1, 2), 1.0, 2.0, (("loss", 5),))
REGION = wire.OutOfBounds(3, "argument tensor", "0 bytes behind its end")


def ask(op: str, *arguments: Any) -> Request[Any]:
    """Makes a request by the name of its operation."""
    kinds = TrustedInterface, CandidateInterface, EmulatedInterface, BuilderInterface
    return Request(next(getattr(kind, op) for kind in kinds if hasattr(kind, op)), *arguments)


RUN, RACES, CODE = ask("run_block"), ask("report_races"), ask("list_loaded_code", True)
CALL = ask("call", "case", "candidate", [0, 1])
RECORDED = ask("call", "case", "candidate", [0], "mark")
ON_TIMELINE = ask("call", "case", "candidate", [0], "mark", True)
STRESS = ask("call_under_stress", "case", [1, 0], [(0, "host", 1.5)], [1], [0], ((0, 1, 0),))
PROFILE = ask("profile_block", "case", 1, "mark", True)
KERNEL = wire.LoadedKernel("gemm", "triton", ["tma"])
FINDING = wire.RaceFinding("race", "", 0, 3, "rank 0 reads", "text")
LAUNCHES = {"launches": {}, "sources": [], "kernels": None, "collectives": {}}

EXCHANGES: list[tuple[Request[Any], Any]] = [
    (ask("initialize"), 17),
    (ask("export_arena"), wire.ExportedArena({"kind": "cpu"}, 7)),
    (ask("import_arena", {"kind": "cpu"}), 7),
    (ask("use_device"), None),
    (ask("exit"), None),
    (ask("prepare_block", "case", "graph", "reference", PLAN), "no capture"),
    (ask("warm_up_block"), None),
    (ask("ready_block", 3), None),
    (ask("run_block"), wire.BlockRun(12.5, 3.0, 4)),
    (ask("take_secret", "abc"), ""),
    (ask("open_case", "case", CASE, 4, 512.0, True), wire.OpenedCase(LAYOUT, 0.1, 0.05)),
    (ask("close_case", "case"), None),
    (ask("generate_inputs", "case", 1, ["random"]), None),
    (ask("publish_inputs", "case", 1), None),
    (ask("undo_swaps", "case"), None),
    (ask("time_copies", "case"), wire.CopiesTime(1.5, 0.5)),
    (ask("keep_device_busy", 0.5), None),
    (ask("collect_outputs", "case", [0], [1], [{"kind": "tensor"}], []), 4096),
    (ask("discard_outputs", "case"), None),
    (ask("judge_outputs", "case", True, [1, 0]), wire.Judgement([SCORE, wire.SlotScore(1, mismatch="a list")], ["weight"], REGION)),
    (ask("save_output", "case", 1), None),
    (ask("compare_output", "case"), wire.OutputComparison(None, None)),
    (ask("measure_margins", CASE), {"faults": []}),
    (ask("load_sm_holder", "f0VMRg=="), None),
    (ask("attach_case", "case", 1, "default", LAYOUT), None),
    (ask("detach_case", "case"), None),
    (ask("load_reference", 1, "default"), None),
    (ask("load_candidate", "a.py", "pass", None, 1, "default", {"peerlane.solutions": ""}), None),
    (CALL, wire.Called([{}, {}], False, [], 2)),
    (RECORDED, wire.Called([{}], True, [PLAIN_RECORDING], 0)),
    (ON_TIMELINE, wire.Called([{}], True, [TIMELINE], 0)),
    (STRESS, [{}, {}]),
    (ask("describe_outputs", "case", 1), [{}]),
    (ask("recopy_output", "case", 1), None),
    (PROFILE, wire.ProfiledBlock(TIMELINE, [{}])),
    (ask("list_loaded_code", True), wire.LoadedCode([KERNEL], [], ["tile 128"], ["0123456789abcdef"])),
    (ask("probe_profiler", "mark"), PLAIN_RECORDING),
    (ask("list_connections"), [wire.Connection("127.0.0.1:5", "127.0.0.1:6", 7)]),
    (
        ask("report_races"),
        wire.RaceReport([FINDING], {"gather": 4}, [], ["gather: 8 registers"], {"dist.all_reduce": 2}, ["same_value"]),
    ),
    (ask("build_candidate", "a.py", "pass", "/cache", {}, True, False, False), wire.Built("OSError: no CUDA_HOME", True)),
]


def sent(message: messages.Message) -> messages.Message:
    """What arrives of a message."""
    arrived: messages.Message = json.loads(json.dumps(message))
    return arrived


@pytest.mark.parametrize(("request_", "answer"), EXCHANGES, ids=[request_.op for request_, _ in EXCHANGES])
def test_what_is_sent_is_what_is_read(request_: Request[Any], answer: Any) -> None:
    assert messages.read_request(sent(messages.request_message(request_))) == (request_.declaration, request_.arguments)
    assert read(request_, sent(messages.answer_message(request_.declaration, answer))) == answer


def read(request_: Request[Any], message: messages.Message) -> Any:
    answer = messages.read_answer(request_, message)
    assert isinstance(answer, messages.Answer)
    return answer.value


def test_every_request_is_exchanged_above_and_served() -> None:
    processes: dict[type[RankProcess], dict[str, Any]] = {
        TrustedRank: {}, CandidateRank: {}, Builder: {"timed_ranks": 0}, EmulatedCandidate: {"emulated_ranks": 2, "schedules": 1},
    }  # fmt: skip
    served = [kind({"device": "cpu", "world_size": 2, **config}, 0, -1).handlers for kind, config in processes.items()]
    assert {request_.op for request_, _ in EXCHANGES} == {*REQUESTS} == {op for handlers in served for op in handlers}


def test_emulated_ranks_take_the_arguments_of_a_call() -> None:
    """They answer for all ranks at once, so that their method overrides nothing."""
    declared, theirs = inspect.signature(CandidateRank.call).parameters, inspect.signature(EmulatedCandidate.call).parameters
    assert [*declared.values()] == [*theirs.values()]


def test_ranks_of_one_process_are_asked_and_answer_together() -> None:
    requests = [ask("detach_case", space) for space in "ab"]
    declaration = requests[0].declaration
    assert messages.read_request(sent(messages.request_message(requests))) == (declaration, [{"space": "a"}, {"space": "b"}])
    calls = [ask("call", "case", "candidate", [0])] * 2
    answers = [wire.Called([{"kind": "value", "value": rank}], False, [], 0) for rank in range(2)]
    for answer, expected in ((PerRank(answers), answers), (answers[0], [answers[0]] * 2)):
        result = messages.read_answers(calls, sent(messages.answer_message(calls[0].declaration, answer)))
        assert isinstance(result, messages.Answer) and result.value == expected


def called(**changes: Any) -> messages.Message:
    return {"outputs": [{}], "aliased": False, "recordings": [recording()], "collectives": 0, **changes}


def recording(**changes: Any) -> messages.Message:
    plain = {"host": {"a": 1}, "device": {}, "marks": [], "collectives": 0, "functions": 0, "replaced": [], "events": None, "roles": None}
    return {**plain, **changes}


def profiled(**changes: Any) -> messages.Message:
    return {"recording": recording(**{"events": [[*EVENT]], **changes}), "outputs": [{}]}


def finding(**changes: Any) -> messages.Message:
    return {"findings": [{**vars(FINDING), **changes}], **LAUNCHES}


MALFORMED: list[tuple[Request[Any], Any]] = [
    *(
        (RUN, {"events_us": value, "launch_us": 0.0, "collectives": 0})
        for value in (None, "3", True, -1.0, float("nan"), float("inf"), 2**60)
    ),
    *((RUN, {"events_us": 1.0, "launch_us": 0.0, "collectives": value}) for value in (None, True, -1, 1.5, 2**53, int("9" * 4000))),
    *((RUN, message) for message in ({}, {"events_us": 1.0}, {"events_us": 1.0, "collectives": 0, "more": 1})),
    *((ask("exit"), {"more": value}) for value in (1, None)),
    *((RECORDED, called(outputs=value)) for value in (None, {}, [], [{}, {}])),
    *((RECORDED, called(aliased=value)) for value in (None, 0, "no")),
    *((RECORDED, called(recordings=value)) for value in (None, [], [recording()] * 2, [None], [[]])),
    *((RECORDED, called(recordings=[recording(host=value)])) for value in (None, [1], {"x": -1}, {"x": True}, {"x": 2**53}, {"x": 1.5})),
    (RECORDED, called(recordings=[recording(device={"x" * 301: 1})])),
    (RECORDED, called(recordings=[recording(device={str(number): 1 for number in range(MOST_NAMES + 1)})])),
    *((RECORDED, called(recordings=[recording(replaced=value)])) for value in (None, "x", [[]])),
    *((RECORDED, called(recordings=[recording(marks=value)])) for value in (None, True, "yes", ["x"] * 5, [1], ["x" * 301])),
    *((RECORDED, called(recordings=[recording(functions=value)])) for value in (None, True, -1)),
    (RECORDED, called(recordings=[recording(collectives=True)])),
    (RECORDED, called(recordings=[recording(events=[])])),
    *((ON_TIMELINE, called(recordings=[recording(events=value)])) for value in (None, "none")),
    *((PROFILE, profiled(events=[value])) for value in ({}, ["k", 7, 5], ["k", 7, 9, 5], [7, 7, 5, 9], ["k", 7, 5, True])),
    *((PROFILE, profiled(events=[value])) for value in (["k", 7, 5, 1 << 64], ["k" * 5_000, 7, 5, 9], ["k", -2, 5, 9], "wait")),
    (PROFILE, profiled(events=[[*EVENT]] * (MOST_EVENTS + 1))),
    *((PROFILE, profiled(roles=[value])) for value in (["wait", "storer", 5, 9], ["wait", "s" * 50, 5, 1, 2], ["wait", "storer", 5, 3, 2])),
    (PROFILE, {**profiled(), "outputs": []}),
    (STRESS, {"answer": [{}]}),
    *((ask("describe_outputs", "case", 2), {"answer": value}) for value in (None, {}, [{}], [{}] * 3)),
    *((RACES, finding(**{word: 3})) for word in ("kind", "memory", "summary", "text")),
    *((RACES, finding(**change)) for change in ({"text": " "}, {"rank": -1}, {"schedules": 1.0}, {"more": 1})),
    (RACES, {"findings": [vars(FINDING)] * (MOST_FINDINGS + 1), **LAUNCHES}),
    *((RACES, {"findings": [], **LAUNCHES, "launches": value}) for value in (None, [], {"a": -1})),
    *((CODE, {"kernels": value, "unknown": [], "choices": [], "sources": []}) for value in (None, [3], [{"name": "k"}])),
    (CODE, {"kernels": [{**vars(KERNEL), "origin": "x"}], "unknown": [], "choices": [], "sources": []}),
    (CODE, {"kernels": [], "unknown": [], "choices": [3], "sources": []}),
    (ask("prepare_block", "case", "eager", "candidate", PLAN), {"answer": 3}),
]


@pytest.mark.parametrize(("request_", "message"), MALFORMED)
def test_what_is_not_as_declared_is_refused_by_name(request_: Request[Any], message: Any) -> None:
    with pytest.raises(ProtocolError, match=f"the answer to {request_.op} is malformed: ") as caught:
        messages.read_answer(request_, {"ok": True, **message})
    assert len(str(caught.value)) < 300, "it quotes nothing of what it refuses"


@pytest.mark.parametrize("message", [{}, {"ok": 1}, {"ok": "true"}, {"ok": False}, {"ok": None, "error": {"kind": "hang", "message": ""}}])
def test_what_is_neither_an_answer_nor_an_error_is_refused(message: messages.Message) -> None:
    for read in (lambda: messages.read_answer(CALL, dict(message)), lambda: messages.read_answers([CALL], dict(message))):
        with pytest.raises(ProtocolError, match="neither ok nor an error"):
            read()


def test_an_error_keeps_its_kind_its_end_and_its_rank() -> None:
    """Also of a rank that was made to send all of it."""
    error = messages.RankError("cuda_error", "x" * 50_000 + "end", 3)
    uncut = {"ok": False, "error": {"kind": error.kind, "message": error.text, "rank": error.rank}}
    for message in (messages.error_message(error), uncut):
        found = messages.read_answer(CALL, sent(message))
        assert isinstance(found, messages.RankError) and (found.kind, found.rank) == ("cuda_error", 3)
        assert len(found.text) == messages.ERROR_CHARACTERS and found.text.endswith("end")
    assert messages.read_answer(CALL, {"ok": False, "error": {"kind": "not_run", "message": [], "rank": "x"}}) == messages.RankError(
        "not_run", "no message", None
    )


@pytest.mark.parametrize(
    ("kind", "value", "passes"),
    [
        (int, 1, True),
        (int, True, False),
        (int, 1.0, False),
        (bool, True, True),
        (bool, 1, False),
        (float, 1, True),
        (float, True, False),
        (float, 2**53, False),
        (str, "a", True),
        (str, 1, False),
        (tuple[int, ...], [True], False),
        (list[int], [1, 2], True),
    ],
)
def test_a_boolean_is_no_number_and_a_number_no_boolean(kind: Any, value: Any, passes: bool) -> None:
    if passes:
        assert list(reader_of(kind)(value)) == value if isinstance(value, list) else reader_of(kind)(value) == value
    else:
        with pytest.raises(ProtocolError, match="expected"):
            reader_of(kind)(value)


@pytest.mark.parametrize("said", ["boom " + "x" * 50_000 + " end", "boom\n" + "line\n" * 20_000 + "end"])
def test_a_long_exception_keeps_its_type_and_its_end(said: str) -> None:
    try:
        raise RuntimeError(said)
    except RuntimeError as error:
        found = messages.read_answer(CALL, sent(messages.error_message(_error(error, "runtime_error"))))
    assert isinstance(found, messages.RankError)
    assert "RuntimeError: boom" in found.text and found.text.endswith("end")
    shown = feedback(RuntimeFailure(phase="first_call", rank=0, message=found.text), (), (), (), "")
    assert "RuntimeError: boom" in shown
