"""Amounts in words, as pages and pictures show them."""

from __future__ import annotations


def quantity(value: float) -> str:
    """Returns three digits and a decimal prefix, to be followed by the unit: ``1.5 M``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def shown_us(value: float) -> str:
    """Returns a time with three digits and no exponent: 4.56, 78.9, 1,230."""
    return f"{value:.3g}" if value < 999.5 else f"{float(f'{value:.3g}'):,.0f}"
