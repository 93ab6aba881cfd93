"""Reads HTML pages as a screen reader does: the tree, the texts and the tables."""

import re
from xml.etree import ElementTree


def read(page: str) -> ElementTree.Element:
    """Parse the page into a tree without the scripts, which are not valid XML."""
    text = re.sub(r"<script.*?</script>", "", page.removeprefix("<!DOCTYPE html>"), flags=re.S)
    return ElementTree.fromstring(text)  # noqa: S314


def heard(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).replace("\u00a0", " ").split())


def section(page: str, name: str) -> ElementTree.Element:
    return next(one for one in read(page).iter("section") if one.get("id") == name)


def table(element: ElementTree.Element, name: str) -> dict[str, list[str]]:
    """Return the rows of a table by the text of their first cell."""
    [found] = [one for one in element.iter("div") if one.get("aria-label") == name]
    return {
        heard(row[0]): [heard(cell) for cell in row[1:]] for row in found.iter("tr") if row[0].get("scope") == "row"
    }
