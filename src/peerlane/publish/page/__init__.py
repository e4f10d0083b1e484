"""The page of results: one HTML file that opens without a network, and pages of code beside it where there are many candidates."""

from peerlane.publish.page.render import INLINE_CANDIDATES, render_page, write_page

__all__ = ["INLINE_CANDIDATES", "render_page", "write_page"]
