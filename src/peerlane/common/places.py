"""Rows in random places of memory, whose rates are figures of a node's ceilings and make up the time of algorithms."""

ROW_BYTES = (64, 128, 512, 2048)
"""of rows whose rates are measured"""


def rows_figure(what: str, row_bytes: float) -> str:
    """Returns the figure ``what`` (read_rows, peer_read_rows, add_rows) of the largest measured rows that are no larger."""
    return f"{what}_{max((size for size in ROW_BYTES if size <= row_bytes), default=ROW_BYTES[0])}b_tbps"
