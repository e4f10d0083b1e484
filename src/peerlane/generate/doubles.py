"""Models that answer without any network: ``peerlane/expert``, ``peerlane/reference`` and ``peerlane/broken``.

expert answers with the package's solutions: the upper line of every plot. reference answers with the problem's own reference. broken makes
one mistake a problem, by its number, so that the totals of a run are known; see :data:`BROKEN`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelOutput, ModelUsage, modelapi
from inspect_ai.tool import ToolChoice, ToolInfo

from peerlane import problems
from peerlane.common.version import PACKAGE
from peerlane.errors import UsageError
from peerlane.problems.reference_source import reference_source

_PROBLEM = re.compile(r"^Problem (\d+):", re.MULTILINE)
_CHARACTERS_PER_TOKEN = 4


def expert_source(number: int) -> str | None:
    """Returns the package's solution of a problem, or None if it has none."""
    paths = list((PACKAGE / "solutions").rglob(f"p{number:03d}_*.py"))
    return paths[0].read_text() if paths else None


def reference_candidate(number: int) -> str:
    """Returns the source of a candidate that is the problem's reference."""
    return f"{reference_source(problems.get(number))}\n\nsolution = reference\n"


def _perturbed(number: int) -> str:
    return f"""{reference_source(problems.get(number))}


def perturbed(value):
    if isinstance(value, torch.Tensor):
        return value + 1 if value.dtype != torch.bool else ~value
    if isinstance(value, dict):
        return {{key: perturbed(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return type(value)(map(perturbed, value))
    return value


def solution(*args):
    return perturbed(reference(*args))
"""


def _block(source: str) -> str:
    return f"Here is the file.\n\n```python\n{source}```\n"


BROKEN: tuple[tuple[str, Callable[[int], str]], ...] = (
    ("correct", lambda number: _block(reference_candidate(number))),
    ("wrong_result", lambda number: _block(_perturbed(number))),
    ("wrong_type", lambda number: _block("def solution(*args):\n    return 'text'\n")),
    ("runtime_error", lambda number: _block("def solution(*args):\n    raise ValueError('broken on purpose')\n")),
    ("no_code", lambda number: _block("def answer(*args):\n    return args\n")),
    ("import_error", lambda number: _block("def solution(*args:\n")),
    ("refused", lambda number: "I cannot write this kernel."),
    ("truncated", lambda number: _block(reference_candidate(number)).partition("\ndef ")[0]),
)
"""Verdict in the open track, and the reply: problem n gets entry (n - 1) mod 8. In the custom track, "correct" breaks the rules."""


def broken_reply(number: int) -> str:
    """Returns the reply of ``peerlane/broken`` to a problem."""
    return BROKEN[(number - 1) % len(BROKEN)][1](number)


def _expert_reply(number: int) -> str:
    source = expert_source(number)
    return _block(source) if source is not None else "The package has no solution of this problem yet."


_REPLIES: Mapping[str, Callable[[int], str]] = {
    "expert": _expert_reply,
    "reference": lambda number: _block(reference_candidate(number)),
    "broken": broken_reply,
}


@modelapi(name="peerlane")
class Double(ModelAPI):
    """A model that answers from a table instead of a network. As an agent it writes its answer, has it tested, and submits."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008
        **arguments: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if model_name not in _REPLIES:
            raise UsageError(f"--model peerlane/{model_name}: expected one of {', '.join(f'peerlane/{name}' for name in _REPLIES)}")

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Returns the reply to the problem that the conversation names."""
        from peerlane.generate.reply import extract

        text = "\n".join(message.text for message in input)
        match = _PROBLEM.search(text)
        reply = _REPLIES[self.model_name](int(match[1])) if match else "I see no problem."
        name = f"peerlane/{self.model_name}"
        source, status = extract(reply)
        done = sum(message.role == "tool" for message in input)
        if tools and source is not None:
            calls: list[tuple[str, dict[str, str]]] = [("write", {"source": source}), ("test", {}), ("submit", {})]
            tool, arguments = calls[min(done, len(calls) - 1)]
            output = ModelOutput.for_tool_call(name, tool, arguments)
        else:
            output = ModelOutput.from_content(name, reply, stop_reason="max_tokens" if status == "truncated" else "stop")
        # Without counts inspect_ai would fetch the table of a tokenizer.
        sizes = [len(text) // _CHARACTERS_PER_TOKEN, len(reply) // _CHARACTERS_PER_TOKEN]
        output.usage = ModelUsage(input_tokens=sizes[0], output_tokens=sizes[1], total_tokens=sum(sizes))
        return output
