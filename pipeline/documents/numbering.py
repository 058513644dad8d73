"""The numbers and bullets that Word shows but does not store in the paragraphs."""

import re
from typing import NamedTuple
from xml.etree.ElementTree import Element

from pipeline.documents.word_xml import is_on, value


class _Level(NamedTuple):
    format: str
    text: str  # such as "%1.%2"
    start: int
    style: str | None
    restarts: bool
    is_legal: bool  # all numbers in decimal
    gap: str

    @classmethod
    def of(cls, element: Element) -> "_Level":
        return cls(
            format=value(element, "numFmt") or "decimal",
            text=value(element, "lvlText") or "",
            start=int(value(element, "start") or 0),
            style=value(element, "pStyle"),
            restarts=value(element, "lvlRestart") != "0",
            is_legal=is_on(element, "isLgl"),
            gap="" if value(element, "suff") == "nothing" else " ",
        )


class _List(NamedTuple):
    counter: str | None  # lists of one abstract definition count on from each other
    levels: dict[int, _Level]
    start_overrides: dict[int, int]


class Numbering:
    """Labels the paragraphs of one file in their order; counts on from call to call."""

    def __init__(self, numbering: Element, styles: Element) -> None:
        self._styles = {style.get("styleId"): style for style in styles.iterfind("style")}
        defaults = (id_ for id_, style in self._styles.items() if _is_default_paragraph(style))
        self._default_style = next(defaults, None)
        self._abstracts = {found.get("abstractNumId"): found for found in numbering.iterfind("abstractNum")}
        self._nums = {num.get("numId"): num for num in numbering.iterfind("num")}
        self._lists = {num_id: self._list(num) for num_id, num in self._nums.items()}
        self._counts: dict[str | None, dict[int, int]] = {}
        self._begun: set[str | None] = set()

    def label(self, properties: Element) -> str:
        """The label of the next paragraph with these properties, which this call counts."""
        styles = self._style_chain(value(properties, "pStyle") or self._default_style)
        sources = [
            properties,
            *(found for style in styles.values() if (found := style.find("pPr")) is not None),
        ]
        num_id = next((id_ for source in sources if (id_ := value(source, "numPr/numId"))), None)
        if num_id not in self._lists:  # "0" takes a paragraph out of its style's list
            return ""
        levels = self._lists[num_id].levels
        told = next((told for source in sources if (told := value(source, "numPr/ilvl"))), None)
        linked = next((index for index, level in levels.items() if level.style in styles), 0)
        index = linked if told is None else int(told)
        return self._text(levels, index, self._count(num_id, index)) if index in levels else ""

    def _list(self, num: Element) -> _List:
        abstract_id = value(num, "abstractNumId")
        abstract = self._abstracts.get(abstract_id, num)
        if (style := self._styles.get(value(abstract, "numStyleLink"))) is not None:
            linked = self._nums.get(value(style, "pPr/numPr/numId"), num)
            abstract_id = value(linked, "abstractNumId")
            abstract = self._abstracts.get(abstract_id, num)
        overrides = num.findall("lvlOverride")
        replaced = [level for override in overrides for level in override.iterfind("lvl")]
        levels = {int(level.get("ilvl", 0)): _Level.of(level) for level in [*abstract.iterfind("lvl"), *replaced]}
        starts = {
            int(override.get("ilvl", 0)): int(start)
            for override in overrides
            if (start := value(override, "startOverride"))
        }
        return _List(abstract_id, levels, starts)

    def _style_chain(self, style_id: str | None) -> dict[str | None, Element]:
        chain: dict[str | None, Element] = {}
        while style_id not in chain and (style := self._styles.get(style_id)) is not None:
            chain[style_id] = style
            style_id = value(style, "basedOn")
        return chain

    def _count(self, num_id: str | None, index: int) -> dict[int, int]:
        counter, levels, start_overrides = self._lists[num_id]
        counts = self._counts.setdefault(counter, {})
        if num_id not in self._begun:
            self._begun.add(num_id)
            for overridden in start_overrides:
                counts.pop(overridden, None)
        start = start_overrides.get(index, levels[index].start)
        counts[index] = counts[index] + 1 if index in counts else start
        for deeper in [deeper for deeper in counts if deeper > index and levels[deeper].restarts]:
            del counts[deeper]
        return counts

    def _text(self, levels: dict[int, _Level], index: int, counts: dict[int, int]) -> str:
        level = levels[index]
        if level.format == "bullet":
            return "• " if level.text.strip() else ""

        def number(place: re.Match[str]) -> str:
            shown = int(place[1]) - 1
            if shown not in levels:
                return ""
            return number_label(
                counts.get(shown, levels[shown].start), "decimal" if level.is_legal else levels[shown].format
            )

        text = re.sub("%([1-9])", number, level.text)
        return f"{text}{level.gap}" if text.strip() else ""


def _is_default_paragraph(style: Element) -> bool:
    return style.get("type") == "paragraph" and style.get("default") in ("1", "true")


def number_label(value: int, number_format: str) -> str:
    if value < 1:
        return "" if number_format == "none" else str(value)
    match number_format:
        case "none":
            return ""
        case "decimalZero":
            return f"{value:02}"
        case "lowerLetter" | "upperLetter":  # z is followed by aa, then bb
            letters = chr(ord("a") + (value - 1) % 26) * ((value - 1) // 26 + 1)
            return letters if number_format == "lowerLetter" else letters.upper()
        case "lowerRoman":
            return roman(value).lower()
        case "upperRoman":
            return roman(value)
        case "chineseCounting" | "chineseCountingThousand" if value < 100:
            return _chinese(value)
        case _:
            return str(value)


def roman(value: int) -> str:
    numerals = zip(
        (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
        ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"),
        strict=True,
    )
    text = ""
    for worth, numeral in numerals:
        text += numeral * (value // worth)
        value %= worth
    return text


def _chinese(value: int) -> str:
    digits = "〇一二三四五六七八九"
    tens, ones = divmod(value, 10)
    return (digits[tens] if tens > 1 else "") + ("十" if tens else "") + (digits[ones] if ones else "")
