"""Keeps peerlane's own answers out of a candidate's reach."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from peerlane.sandbox.hidden_files import PACKAGES


def _is_answer(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in PACKAGES)


class _Refuse(MetaPathFinder, InspectLoader):
    """Refuses to import answers, except the modules whose source was handed over."""

    def __init__(self, granted: Mapping[str, str]) -> None:
        self._granted = granted

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in self._granted:
            return importlib.util.spec_from_loader(fullname, self)
        if _is_answer(fullname):
            raise ImportError(
                f"{fullname} is out of a candidate's reach: it holds answers. The kit's primitives in peerlane.device may be used"
            )
        return None

    def get_source(self, fullname: str) -> str:
        return self._granted[fullname]

    def is_package(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in self._granted)


def refuse_answers(granted: Mapping[str, str]) -> None:
    """Keeps this process from importing peerlane's answers from now on, and drops those that it has.

    ``granted``: sources of those that may be imported all the same, by module (``hidden_files.family_sources``)."""
    for name in [name for name in sys.modules if _is_answer(name)]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Refuse(granted))
