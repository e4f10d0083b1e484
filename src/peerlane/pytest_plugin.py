"""A plug-in of pytest: options for tests with ``@peerlane.race``, and what their kernels need of a GPU at the end of the run.

Loads nothing but the standard library until such a test runs.
"""

from typing import Any

from peerlane import testing


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("peerlane", "multi-GPU kernels on emulated ranks")
    group.addoption(
        "--race-schedules", type=int, metavar="N", help="schedules of every test with @peerlane.race, instead of its own number"
    )
    group.addoption("--race-seed", type=int, default=0, metavar="N", help="what the schedules are drawn from (0)")
    group.addoption("--race-gpu", choices=("h100", "h200", "b200"), help="give every emulated rank the SMs of this GPU, and compile for it")


def pytest_configure(config: Any) -> None:
    testing.settings.schedules = config.getoption("--race-schedules")
    testing.settings.seed = config.getoption("--race-seed")
    testing.settings.gpu = config.getoption("--race-gpu")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not (testing.settings.kernels or testing.settings.not_compiled):
        return
    terminalreporter.section("kernels on emulated ranks")
    for text in testing.settings.kernels:
        terminalreporter.line(text)
    if testing.settings.not_compiled:
        terminalreporter.line("not compiled for a GPU: there is no NVRTC here, which needs no GPU: pip install 'peerlane[cuda]'")
