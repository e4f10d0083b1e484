"""Words in messages."""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
