"""The version of peerlane, and where its files lie. Imports nothing of peerlane."""

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).resolve().parents[1]
