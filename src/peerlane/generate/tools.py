"""The tools of an agent. They work on the file that it wrote last; candidates run in the evaluator's ranks only."""

import ast
from collections.abc import Callable
from pathlib import Path

from inspect_ai.tool import ToolDef, ToolError

from peerlane import problems
from peerlane.common.syntax import UNREADABLE, parse
from peerlane.generate.judging import Judge, Judged
from peerlane.generate.samples import MODES

_NOTES = Path(__file__).parent / "prompts" / "notes"
_MOST_CHARACTERS = 6000


class Workbench:
    """The file that an agent works on, and what was found out about it. ``keep`` hears of everything that was judged."""

    def __init__(self, problem: int, judge: Judge, keep: Callable[[str, str, Judged], None]) -> None:
        self.problem, self.submitted = problem, False
        self.source: str | None = None
        self.judge, self._keep = judge, keep

    def written(self) -> str:
        """Returns the file; raises ToolError if there is none."""
        if self.source is None:
            raise ToolError("no file yet: call write first")
        return self.source

    async def measure(self, tool_name: str, modes: tuple[str, ...]) -> str:
        """Has the file judged, keeps the result, and returns what its author may know."""
        source = self.written()
        judged = await self.judge.judge(self.problem, source, modes)
        self._keep(tool_name, source, judged)
        return judged.feedback[:_MOST_CHARACTERS]


def check_source(problem: int, source: str) -> str:
    """Returns remarks on a file that is not run; raises ToolError for one that Python cannot read or that lacks ``solution``."""
    try:
        tree = parse(source)
    except SyntaxError as error:
        raise ToolError(f"candidate.py:{error.lineno}:{error.offset}: SyntaxError: {error.msg}") from None
    except UNREADABLE as error:
        raise ToolError(f"candidate.py: {error}") from None
    wanted = problems.get(problem).parameters
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "solution":
            names = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
            if node.args.vararg is None and len(names) < len(wanted):
                raise ToolError(f"candidate.py:{node.lineno}: solution takes {', '.join(names)}: expected {', '.join(wanted)}")
            return "The file is valid Python and defines solution. Device code is compiled by test and time."
    if any(isinstance(node, ast.Assign | ast.ImportFrom) and "solution" in ast.unparse(node) for node in tree.body):
        return "The file is valid Python and binds solution. Device code is compiled by test and time."
    raise ToolError(f"candidate.py defines no solution: expected a function with the parameters {', '.join(wanted)}")


def notes() -> list[str]:
    """Returns the topics of ``lookup``."""
    return sorted(path.stem for path in _NOTES.glob("*.md"))


def workbench_tools(bench: Workbench) -> list[ToolDef]:
    """Returns the tools write, compile, race, test, time, trace, lookup and submit."""

    async def write(source: str) -> str:
        """Replace the candidate file.

        Args:
            source: The whole file, which defines solution.
        """
        bench.source = source if source.endswith("\n") else source + "\n"
        return f"{len(bench.source.splitlines())} lines written"

    async def compile() -> str:
        """Check the file without running it. Takes no GPU."""
        return check_source(bench.problem, bench.written())

    async def race() -> str:
        """Run a file that uses the device kit (peerlane.device), Triton or a CUDA extension on emulated ranks, under many schedules:
        right or wrong, races, deadlocks and addresses out of bounds, each with its source lines. Takes no GPU."""
        return (await bench.judge.race(bench.problem, bench.written()))[:_MOST_CHARACTERS]

    async def test() -> str:
        """Run the file on all ranks: right or wrong, where and why."""
        return await bench.measure("test", ())

    async def time() -> str:
        """Run the file on all ranks and time it against the reference and the hardware, eagerly and as a CUDA graph."""
        return await bench.measure("time", MODES)

    async def trace() -> str:
        """Record what the file does when, on every rank: hidden communication, idle time, longest kernels."""
        return (await bench.judge.trace(bench.problem, bench.written()))[:_MOST_CHARACTERS]

    async def lookup(topic: str) -> str:
        """Read a note.

        Args:
            topic: One of cuda, kit, mistakes, symmetric_memory.
        """
        if topic not in notes():
            raise ToolError(f"no note on {topic!r}: expected one of {', '.join(notes())}")
        return (_NOTES / f"{topic}.md").read_text()

    async def submit() -> str:
        """End the work. The best candidate that was tested or timed counts; a file that was not is judged now."""
        bench.written()
        bench.submitted = True
        return "submitted"

    return [ToolDef(tool) for tool in (write, compile, race, test, time, trace, lookup, submit)]
