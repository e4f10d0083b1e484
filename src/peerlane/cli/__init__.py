"""The command line: one module per verb. torch and the evaluator are imported by the verbs that need them, when they run.

Exit codes: see :class:`peerlane.cli.exit_codes.ExitCode`.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Annotated

import typer

from peerlane.cli import (
    agent,
    bench,
    bundle,
    calibrate,
    compile_kernels,
    demo,
    docs,
    doctor,
    evaluation,
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
from peerlane.cli.output import print_error
from peerlane.errors import MissingDependency, PeerlaneError, UsageError
from peerlane.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="peerlane",
    help="Judge multi-GPU kernels: are they right, how fast are they against the reference and the hardware, and if they fail, why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"peerlane {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


app.command("doctor")(doctor.doctor)
app.command("list")(list_problems.list_problems)
app.command("show")(show.show)
app.command("eval")(evaluation.evaluate_candidates)
app.command("calibrate")(calibrate.calibrate)
app.command("new")(new.new)
app.command("race")(race.race)
app.command("compile")(compile_kernels.compile_kernels)
app.command("trace")(trace.trace)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("bundle")(bundle.bundle)
app.command("verify")(bundle.verify)
app.add_typer(results.results, name="results")
app.command("demo")(demo.demo)
app.command("selftest")(selftest.selftest)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("agent")(agent.agent)
app.command("metrics")(metrics.metrics)
app.command("prompt")(prompt.prompt)
app.command("docs")(docs.docs)


def main() -> None:
    """Runs the console script. Errors that peerlane raises on purpose end in one block on stderr, without a traceback."""
    try:
        importlib.import_module("numpy")  # before torch, which takes an interrupt in there for a missing numpy
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
    except Exception:
        # A defect of peerlane: with its traceback, and never with an exit code that could be read as a verdict.
        traceback.print_exc()
        print_error("this is a defect of peerlane, please report it")
        sys.exit(ExitCode.HARNESS)
