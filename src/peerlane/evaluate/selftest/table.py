"""The table of the adversarial corpus: which candidates there are, and which verdicts are right for them. Read from ``corpus.toml``."""

import atexit
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from peerlane.common.place import Device, Place
from peerlane.common.version import PACKAGE
from peerlane.errors import UsageError
from peerlane.evaluate.candidates import REFERENCE, SOLUTIONS
from peerlane.results.record import Record, first_fault
from peerlane.results.verdict import Phase

VerdictKind = Literal[
    "correct", "wrong_result", "wrong_type", "build_error", "import_error", "runtime_error", "cuda_error", "out_of_memory", "hang",
    "too_slow", "unstable", "integrity_failure", "track_violation", "not_run",
]  # fmt: skip
Kind = Literal["cheat", "bug", "legitimate"]

FILE = "corpus.toml"
_FOLDER = "corpus"
_KINDS: Mapping[str, Kind] = {"C": "cheat", "B": "bug", "A": "legitimate"}
_ROW = re.compile(r"([CBA])(\d{2})")
_SOLUTION = re.compile(r"p(\d{3})_")
_SOLUTION_ROW = "A18"

Kinds = Annotated[tuple[VerdictKind, ...], Field(min_length=1)]


class Entry(Record):
    """A candidate of the corpus. The comments of ``corpus.toml`` say what the fields mean."""

    model_config = ConfigDict(extra="forbid")  # written by hand

    row: str = Field(pattern=_ROW.pattern)
    file: str
    rule: str
    why: str = Field(min_length=1)
    problem: int = Field(ge=1)
    world_size: int = Field(default=2, ge=2)
    track: Literal["open", "custom"] = "open"
    isolation: Literal["L0", "L1", "L2"] = "L0"
    runs: int = Field(default=1, ge=1)
    phase: Phase | None = None
    flags: tuple[str, ...] = ()
    wins_at_most: str | None = None
    cpu: Kinds | None = None
    cuda: Kinds | None = None
    emulated: Kinds | None = None
    quick: bool = False
    base: str | None = None
    replace: tuple[tuple[str, str], ...] = ()

    @field_validator("*")
    @classmethod
    def _readable(cls, value: Any, info: ValidationInfo) -> Any:
        return value if info.field_name == "replace" else super()._readable(value, info)  # texts of a source keep their line breaks

    @model_validator(mode="before")
    @classmethod
    def _problem_of_file(cls, data: dict[str, Any]) -> dict[str, Any]:
        number = re.match(r"(\d+)_", str(data.get("file")))
        return data if number is None else {"problem": int(number[1]), **data}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.cpu is None and self.cuda is None:
            raise ValueError(f"{self.file} is judged nowhere: expected verdicts under cpu, cuda or both")
        number, row, *_ = [*self.file.split("_"), "", ""]
        if self.file != REFERENCE and self.row != _SOLUTION_ROW and (number, row.upper()) != (str(self.problem), self.row):
            raise ValueError(f"{self.file} should be named {self.problem}_{self.row.lower()}_<what>_<backend>")
        return self

    @property
    def kind(self) -> Kind:
        """The meaning of the row's letter."""
        return _KINDS[self.row[0]]

    def accepted(self, device: Device) -> tuple[VerdictKind, ...]:
        """The verdicts that are right on this device; empty where it is not judged."""
        place = Place.of(device)
        return (self.emulated if place.emulated else self.cuda if place.has_gpus else self.cpu) or ()


class _Document(Record):
    rules: dict[str, str]
    rows: dict[str, str]
    candidate: tuple[Entry, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        used = {entry.row for entry in self.candidate}
        if strange := sorted(used ^ set(self.rows)):
            raise ValueError(f"rows without a candidate, or candidates without a row: {', '.join(strange)}")
        if strange := sorted({entry.rule for entry in self.candidate} ^ set(self.rules)):
            raise ValueError(f"rules without a candidate, or candidates without a rule: {', '.join(strange)}")
        files = [entry.file for entry in self.candidate]
        if repeated := sorted({file for file in files if files.count(file) > 1}):
            raise ValueError(f"files that appear twice: {', '.join(repeated)}")
        return self


@dataclass(frozen=True)
class Corpus:
    """The table, and where its files are.

    Attributes:
        rules: name -> title.
        rows: id -> what a candidate of that row does.
        entries: in the table's order.
        folder: holds ``<file>.py`` for every entry but the reference; a copy that ends with this process.
    """

    rules: Mapping[str, str]
    rows: Mapping[str, str]
    entries: tuple[Entry, ...]
    folder: Path

    def path(self, entry: Entry) -> Path | None:
        """Returns the candidate's file; None for the reference."""
        if entry.file == REFERENCE:
            return None
        return (PACKAGE / SOLUTIONS if entry.row == _SOLUTION_ROW else self.folder) / f"{entry.file}.py"

    def honest(self, world_size: int) -> "Corpus":
        """Returns the legitimate candidates and peerlane's own solutions, for so many ranks."""
        entries = [
            entry.model_copy(update={"world_size": world_size, "cpu": entry.cpu if entry.cpu != ("not_run",) else None})
            for entry in self.entries
            if entry.kind == "legitimate"
        ]
        return replace(
            self, rows={**self.rows, _SOLUTION_ROW: "one of peerlane's own solutions"}, entries=(*entries, *_solutions(world_size))
        )

    def select(self, rows: str | None = None, *, quick: bool = False) -> tuple[Entry, ...]:
        """Returns the entries of some rows (``"C01-C10,B14"``; None: all), perhaps of the quick set only; raises :class:`UsageError`."""
        selected_rows = set(self.rows) if rows is None else _parse_rows(rows, self.rows)
        selected = tuple(entry for entry in self.entries if entry.row in selected_rows and (entry.quick or not quick))
        if not selected:
            raise UsageError(f"no candidate of rows {rows} belongs to the quick set; leave out --quick")
        return selected


def load(root: Path | None = None) -> Corpus:
    """Loads the corpus in a folder that holds ``corpus.toml`` and ``corpus/``; by default the one that came with peerlane.

    Raises :class:`UsageError` for a table that is not valid, names a file that is not there, or misses one that is.
    """
    root = root or corpus_home()
    path = root / FILE
    try:
        document = _Document.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the table {path}: {error}") from None
    except ValidationError as error:
        raise UsageError(f"{path} is not a valid table: {first_fault(error, 'the whole')}") from None
    listed = {entry.file for entry in document.candidate if entry.base is None} - {REFERENCE}
    there = {item.stem for item in (root / _FOLDER).glob("*.py")}
    if strange := sorted(listed ^ there):
        raise UsageError(
            f"{path} and the files in {root / _FOLDER} differ: {', '.join(strange)}; every file needs an entry, every entry a file or base"
        )
    folder = Path(tempfile.mkdtemp(prefix="peerlane-table-")) / _FOLDER
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    shutil.copytree(root / _FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for entry in sorted(document.candidate, key=lambda entry: entry.base not in there):  # then those whose base has a base
        if entry.base is not None:
            (folder / f"{entry.file}.py").write_text(_derived(path, entry, folder / f"{entry.base}.py"), encoding="utf-8")
    return Corpus(document.rules, document.rows, document.candidate, folder)


def _derived(table: Path, entry: Entry, base: Path) -> str:
    """Returns the text of an entry's base with the entry's replacements; raises :class:`UsageError` if one does not fit."""
    if not base.is_file():
        raise UsageError(f"{table}: {entry.file}: there is no base {entry.base!r}: expected the name of a file in {_FOLDER}/")
    text = base.read_text(encoding="utf-8")
    for old, new in entry.replace:
        if (count := text.count(old)) != 1:
            raise UsageError(f"{table}: {entry.file}: {old!r} occurs {count} times in {base.name}: expected once; quote more of the line")
        text = text.replace(old, new)
    return text


def _solutions(world_size: int) -> list[Entry]:
    """Returns an entry for each of peerlane's own solutions. CPU ranks cannot run them."""
    found = [(path.stem, match) for path in sorted((PACKAGE / SOLUTIONS).glob("p*.py")) if (match := _SOLUTION.match(path.stem))]
    common = {
        "row": _SOLUTION_ROW,
        "world_size": world_size,
        "rule": "precision",
        "cuda": ("correct",),
        "emulated": ("correct",),
        "why": "it solves its problem",
    }
    return [Entry.model_validate({"file": stem, "problem": int(match[1]), **common}) for stem, match in found]


def corpus_home() -> Path:
    """Returns the folder of the corpus: in the package, as wheels have it, or else in the checkout that the package lies in."""
    room = Path(__file__).resolve().parent
    places = (room, PACKAGE.parents[1] / "tests" / "adversarial")
    home = next((place for place in places if (place / FILE).is_file()), None)
    if home is None:
        raise UsageError(f"there is no {FILE} in {' or '.join(map(str, places))}: install peerlane again, or run it from a whole checkout")
    return home


def _parse_rows(text: str, known: Mapping[str, str]) -> set[str]:
    selected: set[str] = set()
    for part in text.upper().split(","):
        ends = [_ROW.fullmatch(end.strip()) for end in part.split("-")]
        first, last = ends[0], ends[-1]
        if not first or not last or len(ends) > 2 or first[1] != last[1]:
            raise UsageError(f"cannot read rows {text!r}: expected rows and ranges such as C01-C10,B14")
        inside = [row for row in known if row[0] == first[1] and int(first[2]) <= int(row[1:]) <= int(last[2])]
        if not inside:
            raise UsageError(f"the corpus has no row {part.strip()}: it has {_ranges(list(known))}")
        selected.update(inside)
    return selected


def _ranges(rows: Sequence[str]) -> str:
    letters = dict.fromkeys(row[0] for row in rows)
    groups = [[row for row in rows if row[0] == letter] for letter in letters]
    return ", ".join(f"{group[0]}-{group[-1]}" for group in groups)
