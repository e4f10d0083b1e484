"""The same mathematics under another name: other argument names, order and shapes, so that memory of public problems shows.

``disguised`` makes a problem of another one, whose oracle, error model and inputs it uses. ``disguise_source`` writes the file of such a
problem. Names, order of arguments and shapes follow from the seed; the prose is written anew in WORDS.
"""

import ast
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerlane.common.files import write_atomically
from peerlane.common.syntax import parse
from peerlane.errors import UsageError
from peerlane.problems.contract.registry import get
from peerlane.problems.contract.spec import Preset, Problem
from peerlane.problems.contract.tree import Tree
from peerlane.problems.reference_source import reference_source

FIRST = 2000
"""A disguised problem has the original's number and this."""
_NAMES = ("field", "plan", "rule", "chart", "level", "mark", "series", "grid", "share", "scope")


@dataclass(frozen=True)
class Words:
    """A disguised problem's prose. ``{0}``, ``{1}``, ... in the summary stand for the original's arguments, in its order."""

    slug: str
    title: str
    summary: str


WORDS = {
    1: Words(
        "merge_readings",
        "Pooled readings of all stations",
        "Station r has {0}, of the same shape everywhere. Each station gets the elementwise total over all stations, as new "
        "storage of the same shape and dtype. Any order of additions and any accumulator will do.",
    ),
    7: Words(
        "district_totals",
        "District totals",
        "{0} has W m entries along its first axis. Station r returns entries r m to (r + 1) m of the elementwise total over all"
        " stations, in the same dtype. {0} must stay as it is. Any order of additions will do.",
    ),
    8: Words(
        "parcel_rounds",
        "Parcels for every depot",
        "{0} consists of W parcels of equal length along its first axis, one for each depot. Depot r returns, in the order of "
        "senders, the parcels that are meant for r, without changing a bit.",
    ),
    9: Words(
        "slope_and_offset",
        "Sensitivities of a slope and an offset",
        "{0} and {1} are (rows, features); stations may have different numbers of rows. All stations return two vectors of "
        "length features: the column sums of {1} * {0} over the rows of all stations, in the promoted dtype, and those of {1}, "
        "in its dtype.",
    ),
    12: Words(
        "strips_times_plan",
        "A matrix in strips, times a local plan",
        "A matrix X (rows, K) lies in strips of K / W columns, {0} on station r being strip r. Each station returns X @ {1}, "
        "with its own {1} (K, columns), accumulated in float32 in any order and rounded once.",
    ),
    13: Words(
        "joint_forecast",
        "Sum of local products",
        "All stations return the same bits: the sum over stations of {0} @ {1}, in their dtype. The inner dimension may differ "
        "from station to station. Local products may be rounded to the dtype or kept wider, and added in any order.",
    ),
    18: Words(
        "scale_to_unit_power",
        "Unit power over split channels",
        "Channels are split evenly over stations; {0} (..., channels / W) is one part. The power of a row is the mean of the "
        "squares of all its channels, in float32. A station returns its part divided by the root of power + {2}, rounded to its"
        " dtype, then times {1}, in the promoted dtype.",
    ),
    45: Words(
        "averaged_unit_rows",
        "Averages, then rows of unit power",
        "{0} is W equal chunks of rows, each as long as {1}. Station r averages chunk r over all stations, in the dtype of {0}."
        " It divides each row by the root of the row's mean square plus {2}, multiplies by {1} in float32, and returns (rows, "
        "length of {1}) in the dtype of {0}.",
    ),
    58: Words(
        "pairing_cost",
        "Cost of mismatched pairs",
        "{0} and {1} (B, D) are a station's B pairs. Of each own row of {0} with each row of {1} of every station (of {4}, or "
        "all), let z = {2} times their inner product, plus {3}. A station returns 1/B times the sum of log(1 + exp(z)), but "
        "with -z for its own matching pairs, accumulated in float32, as a scalar in the dtype of {0}. z may be rounded to that "
        "dtype.",
    ),
    73: Words(
        "surprise_of_labels",
        "Surprise of labels among split scores",
        "Scores {0} (..., V) of classes are split: station r has classes r V to (r + 1) V. {1} (...) holds a class for each "
        "row, the same on all stations of {2} (all, if None). With l the scores less the row's largest over all classes, return"
        " log(sum of exp(l)) minus the l of the labelled class, in the dtype of {0}; for a label outside all classes the first "
        "term alone. {0} may be overwritten.",
    ),
}
"""by number, the ten problems that can be disguised"""


def disguised(number: int, reference: Callable[..., Tree], order: Sequence[int], seed: int) -> Problem:
    """Returns problem ``number`` in other words.

    Args:
        reference: the original's, with other names and another order of parameters.
        order: for each parameter of ``reference`` without a default, the place of the same argument in the original.
        seed: chooses the shapes among those of the original's other presets.
    """
    original, words = get(number), WORDS[number]
    place = [order.index(i) for i in range(len(order))]
    names = tuple(inspect.signature(reference).parameters)
    renamed = dict(zip(original.parameters, [names[i] for i in place] + list(names[len(order) :]), strict=True))

    def ours(args: Sequence[Any]) -> tuple[Any, ...]:
        return (*(args[i] for i in order), *args[len(order) :])

    def theirs(inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        return [(*(args[i] for i in place), *args[len(place) :]) for args in inputs]

    return replace(
        original,
        id=FIRST + number,
        slug=words.slug,
        title=words.title,
        origin="a problem of the suite in other words",
        summary=words.summary.format(*(f"`{renamed[name]}`" for name in original.parameters)),
        reference=reference,
        inputs=lambda case, rank, draw: ours(original.inputs(case, rank, draw)),
        oracle=lambda case, inputs, rank: original.oracle(case, theirs(inputs), rank),
        presets=_presets(original, random.Random(f"{seed} {number}")),
        updates=tuple(renamed[name] for name in original.updates),
        mutates=frozenset(renamed[name] for name in original.mutates),
        known_wrong_answers=(),
        alternative_solutions=(),
        excused={},
        notes=(),
        speed_note="",
    )


def _presets(original: Problem, draw: random.Random) -> tuple[Preset, ...]:
    """Returns ``small``, in another order, and ``pkb``, which gets the shapes of another preset of the original."""
    small, public = original.preset("small"), original.preset("pkb")
    cases = [spec for spec in small.cases if spec.variant == "default"]
    draw.shuffle(cases)
    others = [
        preset
        for preset in original.presets
        if preset.family in ("sweep", "production") and preset.cases[0].params != public.cases[0].params
    ]
    chosen = draw.choice(others)
    timed = replace(chosen.cases[0], label=f"shape_{draw.randrange(100, 1000)}")
    return replace(small, about="other dtypes, odd sizes, unusual values", cases=tuple(cases)), Preset("pkb", "the timed shape", (timed,))


def disguise_source(number: int, seed: int) -> str:
    """Returns the file of a disguised problem; raises UsageError for a problem without words in WORDS."""
    if number not in WORDS:
        raise UsageError(f"problem {number} cannot be disguised: expected one of {', '.join(map(str, WORDS))}")
    original, draw = get(number), random.Random(f"{seed} {number} names")
    tree = parse(reference_source(original))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "reference")
    arguments, free = function.args.args, len(function.args.args) - len(function.args.defaults)
    order = list(range(free))
    draw.shuffle(order)
    function.args.args = [*(arguments[i] for i in order), *arguments[free:]]
    names = dict(zip([item.arg for item in arguments], draw.sample(_NAMES, len(arguments)), strict=True))
    local = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names |= {name: f"a{i}" for i, name in enumerate(dict.fromkeys(name for name in local if name not in names))}
    helpers = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node is not function]
    public = {name: f"step_{i}" for i, name in enumerate(helpers)}
    _Rename({**public, **names}).visit(function)
    for node in tree.body:
        if node is not function:
            _Rename(public).visit(node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None and len(node.body) > 1:
            del node.body[0]
    words, body = WORDS[number], ast.unparse(tree)
    made = f"PROBLEM = disguised({number}, reference, {tuple(order)}, {seed})"
    return f'"""Problem {FIRST + number}: {words.title}."""\n\n{body}\n\n\nfrom peerlane.problems.disguise import disguised\n\n{made}\n'


def write_disguises(seed: int, folder: Path) -> Path:
    """Writes the files of all ten into a folder of problems, which it returns."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, words in WORDS.items():
        write_atomically(folder / f"p{FIRST + number}_{words.slug}.py", disguise_source(number, seed).encode())
    return folder


class _Rename(ast.NodeTransformer):
    """Renames functions, parameters and variables; attributes and keywords of calls keep theirs."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self._names.get(node.arg, node.arg)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self._names.get(node.name, node.name)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.name = self._names.get(node.name, node.name)
        self.generic_visit(node)
        return node
