"""HTML and SVG from values: text is escaped wherever it comes from."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_VOID = ("meta", "br", "link")


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: object) -> Html:
    """`value` as text of a page; what a page cannot hold (half of a surrogate pair, control characters) is replaced."""
    if isinstance(value, Html):
        return value
    text = str(value).encode("utf-8", "replace").decode()
    return Html(html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)))


def join(*parts: Any) -> Html:
    """The parts one after another: text, Html, or iterables of these; None is nothing."""
    made = []
    for part in parts:
        if part is None:
            continue
        if isinstance(part, Iterable) and not isinstance(part, str):
            made.append(join(*part))
        else:
            made.append(escape(part))
    return Html("".join(made))


def tag(element: str, /, *content: Any, **attributes: Any) -> Html:
    """An element. In attributes `class_` is class and `_` is a hyphen; None leaves one out, True has no value."""
    words = [element]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(value)}"')
    opened = f"<{' '.join(words)}>"
    return Html(opened if element in _VOID else f"{opened}{join(*content)}</{element}>")
