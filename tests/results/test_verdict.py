"""Records that contradict themselves cannot be constructed."""

import json
import math
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from peerlane.results.record import Record
from peerlane.results.result import CaseEvidence, Result
from peerlane.results.speed_record import Estimate, NotMeasured
from peerlane.results.verdict import ARGUMENT, CHANGED, Verdict
from sample_results import again, estimate, measured, on_cpu, own_audit, result

VERDICT: TypeAdapter[Record] = TypeAdapter(Verdict)
FAILED = {"phase": "first_call", "rank": 1, "message": "ValueError: no"}
WRONG = {
    "case": "1/small/ragged/w2", "phase": "correctness", "rank": 0, "slot": 2, "output": "sum", "error_over_tolerance": 3.5,
    "detail": "elementwise", "wrong_ranks": [0],
}  # fmt: skip
VERDICTS: dict[str, dict[str, Any]] = {
    "correct": {},
    "wrong_result": WRONG,
    "wrong_type": {"case": "1/small/ragged/w2", "rank": 0, "detail": "got float64"},
    "build_error": FAILED,
    "import_error": FAILED,
    "runtime_error": FAILED,
    "cuda_error": FAILED,
    "out_of_memory": FAILED,
    "hang": {"phase": "exit", "ranks": [0, 3], "deadline_s": 5.0},
    "too_slow": {"phase": "correctness", "limit_s": 60.0, "calls_s": 55.0},
    "unstable": {"case": "1/small/ragged/w2", "rank": 0, "output": "sum", "detail": "late", "wrong_slots": 1, "compared_slots": 8},
    "integrity_failure": {"phase": "timing", "what": "the clock"},
    "track_violation": {"what": "calls NCCL"},
    "harness_error": {"phase": "spawn", "message": "no memory"},
    "not_run": {"missing": "a GPU"},
}
OPTIONAL = {("build_error", "rank"), ("import_error", "rank"), ("runtime_error", "rank"), ("cuda_error", "rank"), ("out_of_memory", "rank")}
REQUIRED = [(kind, name) for kind, fields in VERDICTS.items() for name in fields if (kind, name) not in OPTIONAL]


def verdict(kind: str, **changes: Any) -> Any:
    return VERDICT.validate_python({"kind": kind, **VERDICTS[kind], **changes})


TRACEBACK = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 2500, in _run_ninja_build
    subprocess.run(command, check=True)  # error: is what it raises
subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.

The above exception was the direct cause of the following exception:

RuntimeError: Error building extension 'x': [1/3] nvcc -Werror=all-warnings -Xcompiler -Wno-error=unused -c cuda.cu -o cuda.cuda.o
FAILED: cuda.cuda.o
"""
STOPPED = "ninja: build stopped: subcommand failed."


@pytest.mark.parametrize(
    ("error", "rest"),
    [
        ('cuda.cu(12): error: no instance of overloaded function "f" matches the argument list', "cuda.cu(13): error: expected a ;"),
        ("/tmp/main.cpp:3:10: fatal error: no_such.h: No such file or directory", "compilation terminated."),
        ('cuda.cu(7): error #20: identifier "b" is undefined', '1 error detected in the compilation of "cuda.cu".'),
        ("ptxas error   : Entry function 'f' uses too much shared data (0x10000 bytes, 0xc000 max)", ""),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_1'", ""),
        ("main.o: in function f: undefined reference to `g()'", "collect2: error: ld returned 1 exit status"),
    ],
)
def test_a_build_error_gives_the_first_error_of_the_compiler(error: str, rest: str) -> None:
    made = verdict("build_error", phase="build", rank=None, message=f"{TRACEBACK}cuda.cu(3): warning: unused\n{error}\n{rest}\n{STOPPED}\n")
    assert made.reason == f"build: {error}"
    assert made.message.endswith(f"{STOPPED}\n")


ILLEGAL = """torch.AcceleratorError: CUDA error: an illegal memory access was encountered
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

"""
WAITED = "arena: rank 0 (caller) waited for rank 1 longer than 10 s (block 0, slot 2, expected 3, seen 2); see what rank 1 does meanwhile"


@pytest.mark.parametrize(
    ("kind", "text", "line"),
    [
        ("runtime_error", "ValueError: shapes differ\n\nfrom user code:\n  see above", "ValueError: shapes differ"),
        ("out_of_memory", "MemoryError: too much\nsee the manual", "MemoryError: too much"),
        ("cuda_error", ILLEGAL, ILLEGAL.splitlines()[0]),
        ("cuda_error", f"{ILLEGAL}\n{WAITED}", WAITED),
    ],
)
@pytest.mark.parametrize("before", ["", "KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n"])
def test_the_reason_is_the_first_line_of_an_exception(kind: str, text: str, line: str, before: str) -> None:
    message = f'Traceback (most recent call last):\n  File "/tmp/1_x_cuda.py", line 7, in solution\n    f()\n{before}{text}\n'
    assert verdict(kind, message=message).reason == f"rank 1, first_call: 1_x_cuda.py:7: {line}"


def test_the_reason_is_the_last_line_where_no_compiler_speaks() -> None:
    assert verdict("build_error", message=f"{TRACEBACK}{STOPPED}\n").reason == f"rank 1, first_call: {STOPPED}"
    assert verdict("runtime_error", message="x.cu(1): error: quoted\nValueError: no").reason == "rank 1, first_call: ValueError: no"


def test_all_kinds_are_here() -> None:
    union, _ = get_args(Verdict)
    assert {member.model_fields["kind"].default for member in get_args(union)} == set(VERDICTS)


@pytest.mark.parametrize("kind", VERDICTS)
def test_valid_verdict(kind: str) -> None:
    made = verdict(kind)
    assert made.kind == kind and made.reason.strip()
    assert VERDICT.validate_json(made.model_dump_json()) == made
    with pytest.raises(ValidationError):
        made.kind = "correct"
    assert verdict(kind, score=1.0) == made, "a reader ignores what it does not know"


@pytest.mark.parametrize(
    ("index", "got", "expected", "end"),
    [
        ((2, 0), 1.5, 2.5, "elementwise at [2, 0]: got 1.5, expected 2.5"),
        ((2,), 7.0, None, "elementwise at [2]: got 7"),
        ((2,), None, 7.0, "elementwise at [2]: expected 7"),
        ((2,), float("nan"), float("inf"), "elementwise at [2]: got nan, expected inf"),
        ((2,), None, None, "elementwise"),
        ((), 1.0, 2.0, "elementwise"),
        (None, 1.0, None, "elementwise"),
        (None, None, None, "elementwise"),
    ],
)
def test_a_wrong_result_says_what_it_knows(index: Any, got: float | None, expected: float | None, end: str) -> None:
    assert verdict("wrong_result", index=index, got=got, expected=expected).reason.endswith(f"; {end}")


def test_a_failure_names_the_case_that_ran_and_its_dtype() -> None:
    """Cases of ``small`` run with every preset, so the preset does not say it."""
    ran = {"case": "1/small/ragged_fp32/w2", "dtype": "float32"}
    assert verdict("runtime_error", **ran).reason == "rank 1, first_call, case 1/small/ragged_fp32/w2 (float32): ValueError: no"
    assert verdict("hang", phase="stress", **ran).reason.startswith("stress, case 1/small/ragged_fp32/w2 (float32): rank(s) 0, 3 not done")


def test_a_limit_of_gloo_is_called_one() -> None:
    message = "ValueError: ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (2, 3), got (3))"
    assert verdict("runtime_error", message=message).reason.endswith("got (3)) (a limit of gloo on CPU ranks; NCCL may accept it)")


@pytest.mark.parametrize(
    "line", ["PermissionError: [Errno 13] Permission denied: '/tmp/x'", "OSError: [Errno 30] Read-only file system: '/x'"]
)
def test_where_a_confined_candidate_may_write_is_told(line: str) -> None:
    assert "below its working directory and tempfile.gettempdir()" in verdict("import_error", message=line).reason
    assert "gettempdir" not in verdict("import_error", message="FileNotFoundError: [Errno 2] No such file or directory: 'x'").reason


def test_a_changed_argument_is_not_called_a_wrong_output() -> None:
    made = verdict("wrong_result", output=f"{ARGUMENT}`tensor`", detail=CHANGED, error_over_tolerance=float("inf"))
    place = "(rank 0, case 1/small/ragged/w2, slot 2)"
    assert made.reason.startswith(f"argument `tensor` was changed, which the problem does not allow {place}; clone it first: .float()")


@pytest.mark.parametrize(("kind", "name"), REQUIRED)
def test_required_field(kind: str, name: str) -> None:
    fields = {key: value for key, value in VERDICTS[kind].items() if key != name}
    with pytest.raises(ValidationError, match=name):
        VERDICT.validate_python({"kind": kind, **fields})


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("wrong_result", {"error_over_tolerance": 1.0}),
        ("wrong_result", {"error_over_tolerance": float("nan")}),
        ("wrong_result", {"wrong_ranks": []}),
        ("wrong_result", {"rank": -1}),
        ("wrong_result", {"slot": -1}),
        ("wrong_result", {"phase": "lunch"}),
        ("wrong_type", {"detail": ""}),
        ("runtime_error", {"message": ""}),
        ("cuda_error", {"rank": -1}),
        ("hang", {"ranks": []}),
        ("hang", {"deadline_s": 0}),
        ("unstable", {"wrong_slots": 0}),
        ("integrity_failure", {"what": ""}),
        ("track_violation", {"what": ""}),
        ("harness_error", {"message": ""}),
        ("not_run", {"missing": ""}),
    ],
)
def test_impossible_value(kind: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        verdict(kind, **change)


def test_unknown_kind() -> None:
    with pytest.raises(ValidationError, match="kind"):
        VERDICT.validate_python({"kind": "excellent"})


def evidence(**changes: Any) -> CaseEvidence:
    return result().correctness[0].model_copy(update=changes)


WHY = "no GPU"


@pytest.mark.parametrize(
    "changes",
    [
        {"correctness": ()},
        {"correctness": (evidence(slots=0),)},
        {"correctness": (evidence(max_error_over_tolerance=1.01),)},
        {"speed": ()},
        {"speed": (measured("eager", 40.0, 20.0),)},
        {"speed": (measured("graph", 40.0, 20.0), measured("eager", 40.0, 20.0))},
        {"speed": (*result().speed, NotMeasured(mode="graph", why=WHY))},
        {"modes": ("eager",)},
        {"modes": ()},
        {"track": "custom"},
        {"track": "custom", "audit": own_audit(complete=False)},
        {"track": "custom", "audit": own_audit(unrecorded_collectives=1)},
        {"track": "custom", "audit": own_audit(operators={"c10d::allreduce_": 1})},
        {"track": "custom", "audit": own_audit(kernels={"nccl": 1, "own": 1})},
        *({"verdict": verdict(kind)} for kind in VERDICTS if kind != "correct"),
        *({"verdict": verdict(kind), "speed": on_cpu().speed} for kind in VERDICTS if kind != "correct"),
    ],
    ids=lambda changes: "-".join([*changes, getattr(changes.get("verdict"), "kind", "")]),
)
def test_inconsistent_result(changes: dict[str, Any]) -> None:
    """A correct result has evidence, in the custom track that of an audit too, and a word on the speed in every mode; any other has no
    speed at all."""
    with pytest.raises(ValidationError):
        result(**changes)


@pytest.mark.parametrize("kind", VERDICTS)
def test_consistent_result(kind: str) -> None:
    item = on_cpu() if kind == "correct" else result(verdict=verdict(kind), speed=())
    assert item.correct == (kind == "correct")
    assert again(item) == item


@pytest.mark.parametrize("name", [name for name, field in Result.model_fields.items() if field.is_required()])
def test_required_field_of_a_result(name: str) -> None:
    fields = json.loads(result().model_dump_json())
    del fields[name]
    with pytest.raises(ValidationError, match=name):
        Result.model_validate(fields)


@pytest.mark.parametrize(("median", "low", "high"), [(1.0, 1.1, 1.2), (1.0, 0.8, 0.9), (0.0, 0.0, 0.0), (1.0, -1.0, 2.0)])
def test_estimate_is_ordered_and_positive(median: float, low: float, high: float) -> None:
    with pytest.raises(ValidationError):
        Estimate(median=median, low=low, high=high, n=5)


def test_faster_means_beyond_the_noise() -> None:
    """The interval's lower end decides, and it must clear the noise floor."""
    speed = measured("eager", 40.0, 38.0, noise_floor=0.05)
    assert not speed.faster
    assert speed.model_copy(update={"noise_floor": 0.03}).faster
    assert not speed.model_copy(update={"speedup": estimate(1.2, spread=0.3), "noise_floor": 0.0}).faster


def test_numbers_that_json_has_no_word_for_survive_a_file() -> None:
    """Any reader of JSON can read the file, and a NaN of a candidate is still one."""
    made = verdict("wrong_result", error_over_tolerance=math.inf, got=math.nan, expected=-math.inf)
    text = made.model_dump_json()
    assert "Infinity" not in text and "NaN" not in text
    read = json.loads(text)
    assert (read["error_over_tolerance"], read["got"], read["expected"]) == (None, "nan", "-inf")
    again = VERDICT.validate_python(read)
    assert (again.error_over_tolerance, again.expected) == (math.inf, -math.inf) and math.isnan(again.got)
    with pytest.raises(ValidationError):
        estimate(math.inf)
