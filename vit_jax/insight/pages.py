"""Pages of tables and pictures: one HTML file that needs no network and holds no script."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.base.packages import need_package

if TYPE_CHECKING:
    import markupsafe


class Section(NamedTuple):
    """A part of a page.

    state: "ok", or "warning" or "failed", which are marked.
    found, remedy: sentences.
    table: rows of cells, the first with the names of the columns; () for none.
    pictures: rows of (caption, bytes of a JPEG or PNG).
    """

    subject: str
    state: str
    found: str
    remedy: str = ""
    table: Sequence[Sequence[object]] = ()
    pictures: Sequence[Sequence[tuple[str, bytes]]] = ()


def write_page(title: str, sections: Iterable[Section]) -> str:
    """The page as HTML; raises InputError if the packages for reports are not installed."""
    environment, css = environment_of_pages()
    environment.filters |= {"url": _as_url, "sentence": lambda text: text[:1].upper() + text[1:]}
    return environment.get_template("sections.html").render(
        title=title, sections=[*sections], css=css
    )


def environment_of_pages() -> tuple[Any, markupsafe.Markup]:
    """The environment that fills in the templates of page/, and their CSS."""
    need_package("page", "jinja2", "report")
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("vit_jax.insight", "page")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"broken": break_name, "number": show_number}
    return environment, Markup(loader.get_source(environment, "page.css")[0])


def break_name(name: object) -> markupsafe.Markup:
    """`name`, escaped, where a line may break after each `_`, `.` and `/`."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"([_./])", r"\1<wbr>", str(markupsafe.escape(name))))


def show_number(value: float) -> str:
    """A count in full, another number with six digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _as_url(picture: bytes) -> str:
    kind = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
