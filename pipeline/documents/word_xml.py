"""How WordprocessingML writes values and switches; tags and attributes are without their namespaces."""

from xml.etree.ElementTree import Element


def value(parent: Element, path: str) -> str | None:
    element = parent.find(path)
    return None if element is None else element.get("val")


def is_on(parent: Element, path: str) -> bool:
    """A switch is on where it stands without a value; absent it is off."""
    element = parent.find(path)
    return element is not None and element.get("val", "1") not in ("0", "false", "off")
