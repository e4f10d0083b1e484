"""Opens models by the names of inspect_ai: ``openai/...``, ``anthropic/...``, ``vllm/...``, ``openai-api/<name>/...``, ``peerlane/...``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inspect_ai.model import GenerateConfig, Model, ModelOutput, get_model

from peerlane.errors import UsageError
from peerlane.generate import doubles  # registers peerlane/...
from peerlane.generate.provider_faults import first_line
from peerlane.generate.samples import Usage

__all__ = ["ModelOptions", "Prices", "doubles", "open_model", "usage_of"]

_MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """US dollars for a million tokens: of the prompt, of the reply, and of what a cache of the provider held."""

    input: float
    output: float
    cached: float

    def cost(self, fresh: int, output: int, cached: int) -> float:
        """Returns the cost of these tokens."""
        return (fresh * self.input + output * self.output + cached * self.cached) / _MILLION


@dataclass(frozen=True)
class ModelOptions:
    """The options with which a model is asked.

    Attributes:
        name: as inspect_ai names it.
        effort: of reasoning, where the model has such a setting.
        connections: requests at a time; None: inspect_ai adapts it to rate limits.
        retries: of a request that failed for a reason that may pass (rate limits, faults of the server).
        timeout_s: of one request, all its retries included.
        batch: use the provider's batch interface, where it has one.
        arguments: passed on to the provider.
    """

    name: str
    base_url: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    effort: str | None = None
    max_tokens: int | None = None
    connections: int | None = None
    retries: int = 8
    timeout_s: int = 3600
    batch: bool = False
    prices: Prices | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def open_model(options: ModelOptions) -> Model:
    """Opens the model; raises UsageError for one that does not exist, lacks its key, or refuses an argument."""
    config = GenerateConfig(
        temperature=options.temperature,
        top_p=options.top_p,
        reasoning_effort=options.effort,
        max_tokens=options.max_tokens,
        max_connections=options.connections,
        max_retries=options.retries,
        timeout=options.timeout_s,
        batch=True if options.batch else None,
    )
    if "/" not in options.name:
        raise UsageError(f"--model got {options.name!r}: expected PROVIDER/NAME, such as openai/gpt-5 or peerlane/expert")
    try:
        return get_model(options.name, config=config, base_url=options.base_url, **options.arguments)
    except (KeyboardInterrupt, UsageError):
        raise
    except Exception as error:  # providers raise what they like: a missing key, a missing package, an unknown argument
        raise UsageError(f"--model {options.name}: {first_line(error)}") from None


def usage_of(output: ModelOutput, prices: Prices | None) -> Usage:
    """Returns the tokens of one reply, and their cost if prices are given."""
    usage = output.usage
    if usage is None:
        return Usage(calls=1)
    cached, written = usage.input_tokens_cache_read or 0, usage.input_tokens_cache_write or 0
    fresh = usage.input_tokens + written  # input_tokens leaves out tokens that came from a cache
    cost = prices.cost(fresh, usage.output_tokens, cached) if prices is not None else None
    return Usage(fresh + cached, usage.output_tokens, usage.reasoning_tokens or 0, cached, cost, 1)
