"""Replies of many shapes, and what is taken from each. Most shapes are those with which other harnesses lost or cut a right answer."""

import ast
import textwrap
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peerlane.evaluate.candidates import MOST_BYTES
from peerlane.generate.reply import extract, extract_code

CODE = "def solution(x):\n    return x\n"
OTHER = "def helper(x):\n    return x\n"
NESTED = 'TEXT = """\n```\nnot the end?\n```\n"""\n\n\ndef solution(x):\n    return x\n'
INDENTED = 'def solution(x):\n    """Adds.\n\n    ```python\n    solution(1)\n    ```\n    """\n    return x\n'
COMMENTED = "# ```python\n# solution(1)\n# ```\ndef solution(x):\n    return x\n"
THINKS = "END = '</think>'\n\n\ndef solution(x):\n    return x\n"
WHOLE = "import torch\n\nN = 4\n\n\ndef kernel(x):\n    return x * N\n\n\ndef solution(x):\n    return kernel(torch.abs(x))\n"
EXCERPT = "def solution(x):\n    return kernel(x)\n"
BROKEN = "def solution(x:\n    return x\n"

SHAPES: dict[str, tuple[str, str | None]] = {
    "one block": (f"```python\n{CODE}```", CODE),
    "prose around": (f"Here it is.\n\n```python\n{CODE}```\n\nIt is fast.", CODE),
    "language py": (f"```py\n{CODE}```", CODE),
    "language Python 3, capitals": (f"```Python3\n{CODE}```", CODE),
    "language with a version": (f"```python3.12\n{CODE}```", CODE),
    "language with options behind a comma": (f"```py,linenos\n{CODE}```", CODE),
    "language in braces": (f"```{{.python}}\n{CODE}```", CODE),
    "no language": (f"```\n{CODE}```", CODE),
    "language text": (f"```text\n{CODE}```", CODE),
    "language with a file name": (f"```python:candidate.py\n{CODE}```", CODE),
    "a file name as the language": (f"```candidate.py\n{CODE}```", CODE),
    "language with attributes": (f'```python {{title="a"}}\n{CODE}```', CODE),
    "tildes": (f"~~~python\n{CODE}~~~", CODE),
    "tildes, backticks inside": (f"~~~python\n{NESTED}~~~", NESTED),
    "four backticks, three inside": (f"````python\n{NESTED}````", NESTED),
    "closing fence longer than the opening one": (f"```python\n{CODE}`````", CODE),
    "fences in a string at column 0": (f"```python\n{NESTED}```", NESTED),
    "fences in a docstring": (f"```python\n{INDENTED}```\nDone.", INDENTED),
    "fences in comments": (f"```python\n{COMMENTED}```", COMMENTED),
    "fences in a docstring, then a usage block": (f"```python\n{INDENTED}```\nUse:\n```python\nprint(1)\n```", INDENTED),
    "two blocks, the last one counts": (f"```python\n{OTHER}```\nBetter:\n```python\n{CODE}```", CODE),
    "draft, then final, both define it": (f"```python\n{CODE.replace('x', 'y')}```\n```python\n{CODE}```", CODE),
    "whole file, then its core alone": (f"```python\n{WHOLE}```\nThe core of it:\n```python\n{EXCERPT}```", WHOLE),
    "its core, then the whole file": (f"```python\n{EXCERPT}```\nAll of it:\n```python\n{WHOLE}```", WHOLE),
    "an excerpt alone": (f"```python\n{EXCERPT}```", EXCERPT),
    "usage example behind it": (f"```python\n{CODE}```\nUse:\n```python\nprint(1)\n```", CODE),
    "shell command behind it": (f"```python\n{CODE}```\n```bash\ntorchrun x.py\n```", CODE),
    "CUDA block before it": (f"```cpp\n__global__ void k() {{}}\n```\n```python\n{CODE}```", CODE),
    "only CUDA": ("```cpp\nint solution = 3;\n```", None),
    "cut within the only block": (f"```python\n{CODE}", None),
    "cut within the second block": (f"```python\n{CODE}```\nFaster:\n```python\ndef solution(", CODE),
    "first block not closed, second one is": (f"```python\n{OTHER}\n```python\n{CODE}```", CODE),
    "block that does not define it": (f"```python\n{OTHER}```", None),
    "a lone statement": ("```python\nprint(1)\n```", None),
    "usage behind it imports it": (f"```python\n{CODE}```\nUse it:\n```python\nfrom my_kernel import solution\n\nsolution(1)\n```", CODE),
    "nothing but an import of it": ("```python\nfrom my_kernel import solution\n```", None),
    "an attribute of it is set behind it": (f"```python\n{CODE}```\n```python\nimport m\nm.solution = 1\nsolution.x = 2\n```", CODE),
    "its signature is repeated behind it": (f"```python\n{CODE}```\n```python\ndef solution(x): ...\n```", CODE),
    "a coroutine, which will be judged": ("```python\nasync def solution(x):\n    return x\n```", "async def solution(x):\n    return x\n"),
    "defined under a condition": (
        "```python\nif True:\n    def solution(x):\n        return x\n```",
        "if True:\n    def solution(x):\n        return x\n",
    ),
    "a method of that name": ("```python\nclass A:\n    def solution(self):\n        return 1\n```", None),
    "Python cannot read it": (f"```python\n{BROKEN}```", BROKEN),
    "Python cannot read it, usage behind it": (f"```python\n{BROKEN}```\n```python\nprint(1)\n```", BROKEN),
    "no block, all is code": (CODE, CODE),
    "no block, all is code with fences in it": (NESTED, NESTED),
    "no block, code behind a thought": (f"<think>\nhm\n</think>\n\n{CODE}", CODE),
    "no block, prose": ("I cannot help with that; def solution is hard.", None),
    "refusal": ("I'm sorry.", None),
    "empty": ("", None),
    "empty block": ("```python\n```", None),
    "Windows lines": (f"```python\n{CODE}```".replace("\n", "\r\n"), CODE),
    "byte-order mark before the fence": (f"\ufeff```python\n{CODE}```", CODE),
    "byte-order mark before bare code": (f"\ufeff{CODE}", CODE),
    "byte-order mark within the fence": (f"```python\n\ufeff{CODE}```", CODE),
    "zero-width space before both fences": (f"See:\n\u200b```python\n{CODE}\u200b```", CODE),
    "indented in a list": ("1. Code:\n   ```python\n   def solution(x):\n       return x\n   ```", CODE),
    "behind the dash of a list": (f"- ```python\n{textwrap.indent(CODE, '  ')}  ```", CODE),
    "quoted": ("> ```python\n> def solution(x):\n>     return x\n> ```", CODE),
    "quoted, with a blank line": ("> ```python\n> A = 1\n>\n> solution = A\n> ```", "A = 1\n\nsolution = A\n"),
    "opened in the middle of a line": (f"Final answer: ```python\n{CODE}```", CODE),
    "closed on the last line of code": (f"```python\n{CODE.rstrip()}```", CODE),
    "closed on the last line of code, prose behind it": (f"```python\n{CODE.rstrip()}``` It is fast.\n\nUse:\n```bash\nrun\n```", CODE),
    "opened and closed within lines": (f"Answer: ```python\n{CODE.rstrip()}```", CODE),
    "prose behind the closing fence": (f"```python\n{CODE}```This is fast.", CODE),
    "within a block of Markdown": (f"````markdown\nHere:\n```python\n{CODE}```\n````", CODE),
    "within a block of Markdown with as many backticks": (f"```markdown\nHere:\n```python\n{CODE}```\n```\n", CODE),
    "reasoning holds a draft": (f"<think>\n```python\ndef solution(a): pass\n```\n</think>\n```python\n{CODE}```", CODE),
    "reasoning holds a draft without an end": (f"<think>\n```python\ndef solution(\n</think>\n```python\n{CODE}```", CODE),
    "reasoning without its opening tag": (f"hm\n```python\ndef solution(a): pass\n```\n</think>\n```python\n{CODE}```", CODE),
    "only reasoning, then nothing": (f"<think>\n```python\n{CODE}```\n</think>\nDone.", None),
    "a second thought behind the code": (f"<think>a</think>\n```python\n{CODE}```\n<think>right</think>\nDone.", CODE),
    "the fence behind the tag": (f"<think>a</think>```python\n{CODE}```", CODE),
    "the tag in a string of the code": (f"```python\n{THINKS}```", THINKS),
    "the tag in prose behind the code": (f"```python\n{CODE}```\nIt prints no `</think>`.", CODE),
    "the tag in bare code": (THINKS, THINKS),
    "assigned instead of defined": ("```python\nsolution = max\n```\n```python\nprint(solution)\n```", "solution = max\n"),
    "blank lines at both ends": (f"```python\n\n{CODE}\n```", f"\n{CODE}\n"),
    "trailing blanks behind the fence": (f"```python  \n{CODE}```  \n", CODE),
    "inline backticks in prose": (f"Use ```solution``` as in\n```python\n{CODE}```", CODE),
    "more bytes than a candidate may have": (f"```python\n{CODE}#{'é' * MOST_BYTES}\n```", None),
    "nested too deep for Python": (f"```python\n{CODE}x = {'-' * 3000}1\n```", f"{CODE}x = {'-' * 3000}1\n"),
    "a lone surrogate in prose": (f"\ud800\n```python\n{CODE}```", CODE),
}


@pytest.mark.parametrize(("reply", "code"), SHAPES.values(), ids=SHAPES.keys())
def test_shape(reply: str, code: str | None) -> None:
    assert extract_code(reply) == code


@pytest.mark.parametrize(
    ("reply", "stop_reason", "status"),
    [
        (f"```python\n{CODE}", "", "truncated"),
        (f"```python\n{CODE}", "max_tokens", "truncated"),
        (f"```python\n{CODE}", "stop", "code"),
        (CODE, "max_tokens", "truncated"),
        ("```python\nx = (1,", "stop", "no_code"),
        ("<think>\nWhat would", "", "truncated"),
        ("<think>\nWhat would", "stop", "empty"),
        (f"<think>\n```python\n{CODE}```\nOr", "length", "truncated"),
        ("First I would", "max_tokens", "truncated"),
        ("First I would", "length", "truncated"),
        ("", "max_tokens", "truncated"),
        ("```python\nprint(1)\n```", "max_tokens", "truncated"),
        ("```python\nprint(1)\n```", "stop", "no_code"),
        ("First I would", "stop", "no_code"),
        (f"```python\n{CODE}```\nIt is fast bec", "max_tokens", "code"),
        ("", "stop", "empty"),
        (" \n\ufeff", "", "empty"),
        ("<think>\nAll of it.\n</think>\n", "stop", "empty"),
        ("I will not.", "stop", "refused"),
        ("I\u2019m sorry, but I can\u2019t help with that.", "", "refused"),
        ("<think>\nMay I?\n</think>\nI cannot help with this.", "stop", "refused"),
        ("The request was flagged.", "content_filter", "refused"),
        ("", "content_filter", "refused"),
        ("I cannot test it here:\n```python\nprint(1)\n```", "stop", "no_code"),
        (f"I cannot test it here, and so {'I reason. ' * 80}", "stop", "no_code"),
    ],
)
def test_status_of_a_reply_without_code(reply: str, stop_reason: str, status: str) -> None:
    assert extract(reply, stop_reason).status == status


def test_code_in_a_tool_call_counts_where_the_text_has_none() -> None:
    assert extract("", "tool_calls", ["13", CODE]) == (CODE, "code")
    assert extract("See:", "tool_calls", [f"```python\n{CODE}```"]) == (CODE, "code")
    assert extract(f"```python\n{OTHER}{CODE}```", "tool_calls", [CODE]).source == OTHER + CODE
    assert extract("", "tool_calls", ["13"]) == (None, "empty")


def indented(prefix: str) -> Callable[[str], str]:
    return lambda code: "".join(
        f"{prefix}{line}".rstrip(" ") + "\n" if line == "" else f"{prefix}{line}\n" for line in code.split("\n")[:-1]
    )


LIST, QUOTE = indented("    "), indented("> ")
STYLES: dict[str, Callable[[str], str]] = {
    "bare": lambda code: code,
    "bare behind a thought": lambda code: f"<think>\nhm\n</think>\n\n{code}",
    "backticks": lambda code: f"Here:\n\n```python\n{code}```\n\nIt is fast.",
    "no language": lambda code: f"```\n{code}```",
    "version and options": lambda code: f"```python3.12,linenos\n{code}```\n",
    "four backticks": lambda code: f"````python\n{code}````",
    "tildes": lambda code: f"~~~py\n{code}~~~\nDone.",
    "list": lambda code: f"1. Code:\n    ```python\n{LIST(code)}    ```\n2. Done.",
    "quote": lambda code: f"> ```python\n{QUOTE(code)}> ```\n",
    "thought with a draft": lambda code: f"<think>\n```python\ndef solution(a): pass\n```\n</think>\n```python\n{code}```",
    "mid-line and a mark": lambda code: f"\ufeffFinal answer: ```python\n{code}```",
    "usage behind it": lambda code: f"```python\n{code}```\nUse:\n```python\nfrom candidate import solution\n```\n```bash\nrun\n```",
}
LINES = [
    "```", "```python", "    ```", "~~~", "````", "> ```", "</think>", "<think>", "", "  ", "it's", "\ufeff```", "def solution(y):",
    "é ```",
]  # fmt: skip
STATEMENTS = [
    "import torch", "A = 1", "# ```", "# </think>", "B = '```'", "C = '</think>'", "", "    ", "if A:\n    A = 2", "x = (\n~~~\n1)",
]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Programs whose strings and comments hold what ends blocks and thoughts elsewhere."""
    text = st.lists(st.sampled_from(LINES), max_size=5).map("\n".join)
    before = draw(st.lists(st.sampled_from(STATEMENTS) | text.map(lambda lines: f'S = r"""{lines}\n"""'), max_size=4))
    inside = f'    r"""{draw(text)}\n    """\n'
    behind = draw(st.lists(st.sampled_from(STATEMENTS), max_size=2))
    return "\n".join(["import os", *before, f"def solution(x):\n{inside}    return x", *behind, "os = 1", ""])


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@given(programs())
@example(INDENTED)
@example(NESTED)
@settings(max_examples=40)
def test_a_program_comes_back_byte_for_byte(style: Callable[[str], str], program: str) -> None:
    ast.parse(program)
    assert extract(style(program), "stop") == (program, "code")


@pytest.mark.parametrize(
    "part",
    [
        "```\n", "```python\n", "```\nx y\n", '```\n"""a\n', "```cpp\n</think>\n", "<think>\n", "</think>", "~~~py\n(\n", "> ```\n",
        "a ```python\n(", "```md\n",
    ],
)  # fmt: skip
def test_a_hostile_reply_takes_no_long_time(part: str) -> None:
    began = time.process_time()
    extract(part * (100_000 // len(part)))
    assert time.process_time() - began < 20


@given(
    st.text(max_size=200) | st.lists(st.sampled_from([*LINES, *STATEMENTS, CODE, "(", '"""']), max_size=12).map("\n".join),
    st.sampled_from(["", "stop", "length"]),
)
def test_any_reply_gives_code_or_another_status(reply: str, stop_reason: str) -> None:
    source, status = extract(reply, stop_reason)
    assert (source is None) == (status != "code") and (source is None or source.endswith("\n"))


@given(st.text(alphabet=st.characters(blacklist_characters="`~\r", blacklist_categories=["Cs"]), max_size=60))
def test_prose_around_a_block_does_not_matter(prose: str) -> None:
    if "<" not in prose:
        assert extract_code(f"{prose}\n```python\n{CODE}```\n{prose}") == CODE
