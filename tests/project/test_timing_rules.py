"""The table of timing settings in docs/judging.md is that of the code."""

import ast
from pathlib import Path

from peerlane import settings

PAGE = Path(__file__).parents[2] / "docs" / "judging.md"
MOST_SETTINGS = 8


def rows() -> list[str]:
    tree = ast.parse(Path(settings.__file__).read_text())
    (body,) = (item.body for item in tree.body if isinstance(item, ast.ClassDef) and item.name == "TimingRules")
    found, rules = [], settings.TimingRules()
    for field, reason in zip(body[1::2], body[2::2], strict=True):
        assert isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name), "settings and reasons alternate"
        assert isinstance(reason, ast.Expr) and isinstance(reason.value, ast.Constant)
        value = getattr(rules, field.target.id)
        shown = ", ".join(f"{mode} {number:g}" for mode, number in value.items()) if isinstance(value, dict) else f"{value:g}"
        found.append(f"| `{field.target.id}` | {shown} | {reason.value.value} |")
    return found


def test_the_page_shows_all_settings_with_their_reasons() -> None:
    table = PAGE.read_text().split("<!-- timing-rules:begin -->\n")[1].split("\n<!-- timing-rules:end -->")[0]
    assert table.splitlines()[2:] == rows() and len(rows()) <= MOST_SETTINGS
