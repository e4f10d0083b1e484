"""The emulator without the GPU's compiler beside it, for folders whose tests are about what happens in the emulator."""

import pytest

from peerlane.emulator import gpu_code, ranks


@pytest.fixture(autouse=True)
def one_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated code is not compiled for a GPU as well, which takes as long again; tests of the kernels' registers compile it.

    Tests marked ``two_compilers`` see what the GPU's compiler says."""
    if request.node.get_closest_marker("two_compilers") is None:
        for module in (gpu_code, ranks):
            monkeypatch.setattr(module, "compiler_is_here", lambda: False)
