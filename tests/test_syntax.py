"""Python's parser for several threads."""

import ast

import pytest

from peerlane.common.syntax import UNREADABLE, parse


def test_a_text_is_read_again_after_an_error_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = ast.parse, [2]

    def disturbed(source: str) -> ast.Module:
        if left[0]:
            left[0] -= 1
            raise SystemError("AST constructor recursion depth mismatch (before=36, after=32)")
        return real(source)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert ast.dump(parse("x = 1")) == ast.dump(real("x = 1"))


@pytest.mark.parametrize("text", ["x =", "x = '\0'", "(" * 500 + ")" * 500, "-" * 200_000 + "1"])
def test_a_bad_text_raises_what_callers_expect(text: str) -> None:
    with pytest.raises(UNREADABLE):
        parse(text)
