"""Twenty and more shapes of replies, and what is taken from each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerlane.generate.reply import extract, extract_code

CODE = "def solution(x):\n    return x\n"
OTHER = "def helper(x):\n    return x\n"
NESTED = 'TEXT = """\n```\nnot the end?\n```\n"""\n\n\ndef solution(x):\n    return x\n'

SHAPES: dict[str, tuple[str, str | None]] = {
    "one block": (f"```python\n{CODE}```", CODE),
    "prose around": (f"Here it is.\n\n```python\n{CODE}```\n\nIt is fast.", CODE),
    "language py": (f"```py\n{CODE}```", CODE),
    "language Python 3, capitals": (f"```Python3\n{CODE}```", CODE),
    "no language": (f"```\n{CODE}```", CODE),
    "language with a file name": (f"```python:candidate.py\n{CODE}```", CODE),
    "language with attributes": (f'```python {{title="a"}}\n{CODE}```', CODE),
    "tildes": (f"~~~python\n{CODE}~~~", CODE),
    "four backticks, three inside": (f"````python\n{NESTED}````", NESTED),
    "two blocks, the last one counts": (f"```python\n{OTHER}```\nBetter:\n```python\n{CODE}```", CODE),
    "draft, then final, both define it": (f"```python\n{CODE.replace('x', 'y')}```\n```python\n{CODE}```", CODE),
    "usage example behind it": (f"```python\n{CODE}```\nUse:\n```python\nprint(1)\n```", CODE),
    "shell command behind it": (f"```python\n{CODE}```\n```bash\ntorchrun x.py\n```", CODE),
    "CUDA block before it": (f"```cpp\n__global__ void k() {{}}\n```\n```python\n{CODE}```", CODE),
    "only CUDA": ("```cpp\nint solution = 3;\n```", None),
    "cut within the only block": (f"```python\n{CODE}", None),
    "cut within the second block": (f"```python\n{CODE}```\nFaster:\n```python\ndef solution(", CODE),
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
    "Python cannot read it": ("```python\ndef solution(x:\n    return x\n```", "def solution(x:\n    return x\n"),
    "no block, all is code": (CODE, CODE),
    "no block, prose": ("I cannot help with that; def solution is hard.", None),
    "refusal": ("I'm sorry.", None),
    "empty": ("", None),
    "empty block": ("```python\n```", None),
    "Windows lines": (f"```python\n{CODE}```".replace("\n", "\r\n"), CODE),
    "indented in a list": ("1. Code:\n   ```python\n   def solution(x):\n       return x\n   ```", CODE),
    "quoted": ("> ```python\n> def solution(x):\n>     return x\n> ```", CODE),
    "reasoning holds a draft": (f"<think>\n```python\ndef solution(a): pass\n```\n</think>\n```python\n{CODE}```", CODE),
    "reasoning without its opening tag": (f"hm\n```python\ndef solution(a): pass\n```\n</think>\n```python\n{CODE}```", CODE),
    "only reasoning, then nothing": (f"<think>\n```python\n{CODE}```\n</think>\nDone.", None),
    "assigned instead of defined": ("```python\nsolution = max\n```\n```python\nprint(solution)\n```", "solution = max\n"),
    "blank lines at both ends": (f"```python\n\n\n{CODE}\n\n```", CODE),
    "trailing blanks behind the fence": (f"```python  \n{CODE}```  \n", CODE),
    "inline backticks in prose": (f"Use ```solution``` as in\n```python\n{CODE}```", CODE),
}


@pytest.mark.parametrize(("reply", "code"), SHAPES.values(), ids=SHAPES.keys())
def test_shape(reply: str, code: str | None) -> None:
    assert extract_code(reply) == code


@pytest.mark.parametrize(
    ("reply", "stop_reason", "status"),
    [
        (f"```python\n{CODE}", "", "truncated"),
        (f"```python\n{CODE}", "max_tokens", "truncated"),
        ("<think>\nWhat would", "", "truncated"),
        ("First I would", "max_tokens", "truncated"),
        ("First I would", "length", "truncated"),
        ("```python\nprint(1)\n```", "max_tokens", "truncated"),
        ("```python\nprint(1)\n```", "stop", "no_code"),
        ("I will not.", "stop", "no_code"),
        (f"```python\n{CODE}```\nIt is fast bec", "max_tokens", "code"),
    ],
)
def test_a_cut_reply_without_code_is_truncated(reply: str, stop_reason: str, status: str) -> None:
    assert extract(reply, stop_reason).status == status


@given(st.text(max_size=200))
def test_any_reply_gives_code_or_none(reply: str) -> None:
    found = extract_code(reply)
    assert found is None or found.endswith("\n")


@given(st.text(alphabet=st.characters(blacklist_characters="`~\r", blacklist_categories=["Cs"]), max_size=60))
def test_prose_around_a_block_does_not_matter(prose: str) -> None:
    if "</think" not in prose:
        assert extract_code(f"{prose}\n```python\n{CODE}```\n{prose}") == CODE
