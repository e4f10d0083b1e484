"""The command line: one module per verb. torch and the evaluator are imported by the verbs that need them, when they run.

Exit codes: see :class:`peerlane.cli.exit_codes.ExitCode`.
"""

import errno
import importlib
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from peerlane.cli import (
    agent,
    bench,
    bundle,
    calibrate,
    compile_kernels,
    demo,
    doctor,
    evaluation,
    export,
    generate,
    list_problems,
    metrics,
    new,
    prompt,
    race,
    report,
    results,
    selftest,
    serve,
    show,
    trace,
)
from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import completed, example
from peerlane.cli.output import print_error
from peerlane.common.version import __version__
from peerlane.errors import MissingDependency, PeerlaneError, UsageError

__all__ = ["app", "main"]


class _Headed(typer.core.TyperGroup):
    """A group whose help lists its commands under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each heading, in the order in which the headings come."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None
            heading = str(getattr(command, "rich_help_panel", None) or "Commands")
            sections.setdefault(heading, []).append((name, command.get_short_help_str(formatter.width)))
        longest = max(len(name) for name in self.list_commands(ctx))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(longest), line) for name, line in rows])


app = typer.Typer(
    name="peerlane",
    cls=_Headed,
    help="Judge multi-GPU kernels: are they right, how fast are they against the reference and the hardware, and if they fail, why.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=example("peerlane demo"),
    context_settings={"help_option_names": ["-h", "--help"]},
)


_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_WITHOUT_TORCH = ("list", "show")
"""Commands that usually need no torch; where they do, the problems import numpy first."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"peerlane {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if context.invoked_subcommand not in _WITHOUT_TORCH:
        importlib.import_module("numpy")  # before torch, which takes an interrupt in there for a missing numpy


_COMMANDS: dict[str, dict[str, tuple[Callable[..., None], str, str]]] = {
    "Start here": {
        "doctor": (doctor.doctor, "Say what this machine has and what is missing.", "doctor"),
        "list": (list_problems.list_problems, "List the problems.", "list --category tensor_parallel"),
        "show": (show.show, "Show one problem: signature, shapes, error model, limit.", "show gemm_allreduce"),
        "demo": (demo.demo, "Judge a few examples, right and wrong, in half a minute.", "demo"),
    },
    "Write a kernel": {
        "new": (new.new, "Write a candidate that is correct from the start.", "new 36 --backend kit"),
        "eval": (
            evaluation.evaluate_candidates,
            "Judge candidates: right or wrong and why, how fast.",
            "eval examples/pytorch/1_allreduce_pytorch.py --preset small --world-size 2",
        ),
        "race": (race.race, "Find races and deadlocks of a kernel, without a GPU.", "race examples/cuda/1_allreduce_cuda.py"),
        "compile": (
            compile_kernels.compile_kernels,
            "Compile kernels: registers, shared memory, SASS.",
            "compile examples/cuda/1_allreduce_cuda.py --gpu h200",
        ),
        "trace": (trace.trace, "Draw what every rank does when.", "trace examples/pytorch/13_gemm_allreduce_pytorch.py --preset small"),
    },
    "Read results": {
        "report": (report.report, "Print stored results as a table.", "report peerlane-results"),
        "noise": (report.noise, "Print how far the reference is from itself.", "noise peerlane-results"),
        "plot": (report.plot, "Draw times of a sweep against size.", "plot peerlane-results --out sweep.pdf"),
        "page": (report.page, "Write a page of results for others.", "page peerlane-results --out page.html"),
        "bundle": (bundle.bundle, "Pack a judged run into one file.", "bundle runs/broken"),
        "verify": (bundle.verify, "Judge the candidates of a bundle anew.", "verify runs/broken.peerlane.zip --sample 5"),
    },
    "Score a model": {
        "prompt": (prompt.prompt, "Print the text that a model gets for a problem.", "prompt 13 --backend triton"),
        "generate": (
            generate.generate,
            "Ask a model for candidates, one reply each.",
            "generate 1-8 --model peerlane/broken --track open --out runs/broken",
        ),
        "agent": (agent.agent, "Let a model work on problems with tools.", "agent 1 --model peerlane/expert --out runs/agent"),
        "metrics": (metrics.metrics, "Count what models solved, with intervals.", "metrics runs/broken"),
    },
    "Operate": {
        "serve": (serve.serve, "Judge candidates that arrive over HTTP.", "serve --port 8300"),
        "bench": (bench.bench, "Measure how fast data moves between GPUs.", "bench mechanisms"),
        "calibrate": (calibrate.calibrate, "Measure how far references are from the exact answers.", "calibrate --problem 1"),
        "selftest": (selftest.selftest, "Judge the corpus of cheats and bugs.", "selftest --quick"),
    },
}
"""Each command with its line in ``--help`` and the example of its own help, by the heading there."""

for _heading, _listed in _COMMANDS.items():
    for _name, (_function, _line, _example) in _listed.items():
        app.command(_name, rich_help_panel=_heading, short_help=_line, epilog=example(f"peerlane {_example}"))(completed(_function))
app.add_typer(
    export.export, name="export", rich_help_panel="Score a model", short_help="Write the suite, or scores, for the Hugging Face Hub."
)
app.add_typer(results.results, name="results", rich_help_panel="Read results", short_help="Print the JSON Schema of results.")


def main() -> None:
    """Runs the console script. Errors that peerlane raises on purpose end in one block on stderr, without a traceback."""
    try:
        app(prog_name="peerlane")
    except KeyboardInterrupt:
        print_error("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    except SystemExit as ended:
        if ended.code == ExitCode.INTERRUPTED:
            print_error("interrupted; results that were finished are kept")
        raise
    except (UsageError, MissingDependency) as error:
        print_error(str(error))
        sys.exit(ExitCode.USAGE)
    except PeerlaneError as error:
        print_error(f"{type(error).__name__}: {error}")
        sys.exit(ExitCode.HARNESS)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_FAULTS:
            print_error(f"cannot write {error.filename or 'a file'}: {error.strerror}; results that were finished are kept")
            sys.exit(ExitCode.HARNESS)
        # A defect of peerlane: with its traceback, and never with an exit code that could be read as a verdict.
        traceback.print_exc()
        print_error("this is a defect of peerlane, please report it")
        sys.exit(ExitCode.HARNESS)
