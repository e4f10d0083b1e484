"""Renders the page. Names and code of candidates are hostile text: templates escape all of it, and a policy in the page lets no script run
but those named by their hashes."""

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from peerlane.common.version import __version__
from peerlane.errors import UsageError
from peerlane.generate.board import boards
from peerlane.publish.gather import Gathered
from peerlane.publish.page.view import Item, View
from peerlane.report.tables import shown_us

INLINE_CANDIDATES = 200
"""Above this number of candidates each has a file of its own, beside the page."""
_HERE = Path(__file__).parent
_SCRIPTS = (
    _HERE / "vendor" / "d3.min.js",
    _HERE / "vendor" / "plot.umd.min.js",
    *(_HERE / name for name in ("plots.js", "export.js", "page.js")),
)


@dataclass(frozen=True)
class Page:
    """The page, and the files beside it: name -> contents, in ``folder``."""

    html: str
    folder: str
    beside: dict[str, str]


def write_page(gathered: Gathered, file: Path, title: str) -> Page:
    """Renders the page into a file that ends in ``.html``; raises UsageError if it cannot be written."""
    if file.suffix != ".html":
        raise UsageError(f"cannot write the page {file}: expected a name that ends in .html")
    page = render_page(gathered, title, file.stem)
    try:
        (file.parent / page.folder if page.beside else file.parent).mkdir(parents=True, exist_ok=True)
        for name, text in page.beside.items():
            (file.parent / page.folder / name).write_text(text, encoding="utf-8")
        file.write_text(page.html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; name a file that can be written") from None
    return page


def render_page(gathered: Gathered, title: str, stem: str = "page") -> Page:
    """The page of these samples. ``stem``: the file's name without ``.html``, by which pages of code lead back."""
    views: list[View] = []
    for board in boards(gathered.samples):
        views.append(View(len(views), board, sum(len(view.items) for view in views)))
    items = [item for view in views for item in view.items]
    inline = len(items) <= INLINE_CANDIDATES
    environment = _environment()
    folder = f"{stem}_candidates"
    css = Markup((_HERE / "style.css").read_text(encoding="utf-8"))
    beside = {} if inline else {f"{item.key}.html": _page_of(item, environment, css, stem, folder) for item in items}
    html = environment.get_template("page.html.jinja").render(
        title=title,
        lead=_lead(views),
        views=views,
        nodes={title: [view for view in views if view.node_title == title] for title in dict.fromkeys(view.node_title for view in views)},
        inline=inline,
        notes=gathered.notes,
        files=gathered.files,
        version=__version__,
        scripts=[_script(path) for path in _SCRIPTS],
        css=css,
        data=for_script([view.data for view in views]),
    )
    return Page(html, folder, beside)


def _page_of(item: Item, environment: Environment, css: Markup, stem: str, folder: str) -> str:
    item.href, item.back = f"{folder}/{item.key}.html", f"../{stem}.html{item.back}"
    return environment.get_template("candidate.html.jinja").render(item=item, css=css)


def _lead(views: list[View]) -> str:
    samples = sum(len(view.board.samples) for view in views)
    references = sum(len(view.board.references) for view in views)
    parts = [f"{count:,} {word}" for count, word in ((samples, "samples"), (references, "references")) if count]
    boards_ = "one board" if len(views) == 1 else f"{len(views)} boards; results of different boards do not compare"
    return f"Multi-GPU kernels judged by peerlane: {' and '.join(parts)} on {boards_}."


def _environment() -> Environment:
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"percent": percent, "us": shown_us, "count": count}
    return environment


def for_script(data: Any) -> Markup:
    """JSON that cannot end its script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _script(path: Path) -> dict[str, Any]:
    """A script and the hash that the page's policy allows it by."""
    text = path.read_text(encoding="utf-8")
    return {"text": Markup(text), "hash": "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}


def percent(share: float) -> str:
    """``0.4 %``, ``37 %``."""
    return f"{100 * share:.1f} %" if 0 < abs(share) < 0.0995 else f"{100 * share:.0f} %"


def count(value: float) -> str:
    """A whole number as such, else one decimal."""
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"
