"""What authors of problems import: the contract, drawing of inputs, trees of tensors, comparison with the oracle."""

from peerlane.problems.contract import traffic
from peerlane.problems.contract.cost import Cost, Step, Steps, step
from peerlane.problems.contract.draw import INTEGER, RANDOM, BlockGenerators, Draw, constant, seeded_generator
from peerlane.problems.contract.judge import compare_close, compare_exact, expected_leaves, plainly, rounded, same_bits, score
from peerlane.problems.contract.proof import FromProof
from peerlane.problems.contract.spec import (
    UNIT_ROUNDOFF,
    Algorithm,
    AlternativeSolution,
    AnswerContext,
    Case,
    CaseSpec,
    Expected,
    GroupLayout,
    Inputs,
    KnownWrongAnswer,
    Preset,
    Problem,
    Score,
    Tolerance,
    Where,
    case,
    exactly,
    node_and_rail,
    preset,
)
from peerlane.problems.contract.tree import GroupRef, Tree, describe, leaves, linear_over, map_leaves, resolve_groups, tensor_descriptions
from peerlane.problems.contract.wrong_answers import (
    alternatives,
    any_order,
    except_for,
    grouped,
    is_excused,
    known_wrong_answers,
    names_of,
    small_cases,
    transport_faults,
    where,
    wrong,
)

__all__ = [
    "INTEGER", "RANDOM", "UNIT_ROUNDOFF", "Algorithm", "AlternativeSolution", "AnswerContext", "BlockGenerators", "Case", "CaseSpec",
    "Cost", "Draw", "Expected", "FromProof", "GroupLayout", "GroupRef", "Inputs", "KnownWrongAnswer", "Preset", "Problem", "Score", "Step",
    "Steps", "Tolerance", "Tree", "Where", "alternatives", "any_order", "case", "compare_close", "compare_exact", "constant", "describe",
    "exactly", "except_for", "expected_leaves", "grouped", "is_excused", "known_wrong_answers", "leaves", "linear_over", "map_leaves",
    "names_of", "node_and_rail", "plainly", "preset", "resolve_groups", "rounded", "same_bits", "score", "seeded_generator", "small_cases",
    "step", "tensor_descriptions", "traffic", "transport_faults", "where", "wrong",
]  # fmt: skip
