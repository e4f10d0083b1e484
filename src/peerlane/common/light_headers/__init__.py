"""A part of torch's C++ headers, for extensions that need no more: they compile in less time."""

from pathlib import Path

LIGHT_HEADERS = Path(__file__).parent
