"""Pages of Markdown on a terminal."""

from __future__ import annotations

from peerlane.report.markdown import for_terminal
from peerlane.report.tables import TextTable

PAGE = """# Title

See [the glossary](../glossary.md#slot).

| case | us |
| --- | ---: |
| `a\\|b` | 1.5 |

```mermaid
flowchart LR
    in(["arguments, on each of 4 ranks"])
    s0{{"all-reduce<br/>1 MB out"}}
    in --> s0
```
"""


def test_a_page_becomes_text_tables_and_lists() -> None:
    above, table, below = for_terminal(PAGE)
    assert isinstance(above, str) and "See the glossary." in above
    assert isinstance(table, TextTable) and table.rows == [("a|b", "1.5")] and table.right == {"us"}
    assert isinstance(below, str) and "1. arguments, on each of 4 ranks\n2. all-reduce, 1 MB out\n" in below
    assert "mermaid" not in below


def test_an_empty_page_has_no_parts() -> None:
    assert for_terminal("") == []
