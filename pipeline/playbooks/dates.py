"""Calendar dates in running text, English and Chinese."""

import re
import unicodedata
from datetime import date

from pipeline.playbooks.numerals import chinese_number, digit_by_digit

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_CN = "〇零○一二三四五六七八九十"
_YEAR_FIRST = re.compile(r"(?<![\d.])(\d{4})([-/.])(\d{1,2})\2(\d{1,2})(?!\d|[.]\d)")
_DAY_MONTH = re.compile(rf"(?<!\d){_DAY}\s+(?:day\s+)?(?:of\s+)?{_MONTH},?\s+(\d{{4}})(?!\d)", re.IGNORECASE)
_MONTH_DAY = re.compile(rf"\b{_MONTH}\s+{_DAY},?\s+(\d{{4}})(?!\d)", re.IGNORECASE)
_NUMERIC = re.compile(r"(?<![\d./])(\d{1,2})([./])(\d{1,2})\2(\d{4})(?!\d)")
_CHINESE = re.compile(
    rf"(\d{{4}}|[{_CN}]{{4}})\s*年\s*(\d{{1,2}}|[{_CN}]{{1,3}})\s*月\s*(\d{{1,2}}|[{_CN}]{{1,3}})\s*[日号]"
)


def find_dates(text: str) -> set[date]:
    """Every different date that the text names in full.

    12/11/2026 may be in November or in December: such a date gives both. With dots the day comes first, as where dots
    are written.
    """
    text = unicodedata.normalize("NFKC", text)
    found = [_date(m[1], m[3], m[4]) for m in _YEAR_FIRST.finditer(text)]
    found += [_date(m[3], _month(m[2]), m[1]) for m in _DAY_MONTH.finditer(text)]
    found += [_date(m[3], _month(m[1]), m[2]) for m in _MONTH_DAY.finditer(text)]
    for m in _NUMERIC.finditer(text):
        readings = {_date(m[4], m[3], m[1])} if m[2] == "." else {_date(m[4], m[3], m[1]), _date(m[4], m[1], m[3])}
        found += readings
    for m in _CHINESE.finditer(text):
        found.append(_date(digit_by_digit(m[1]), chinese_number(m[2]), chinese_number(m[3])))
    return {day for day in found if day is not None}


def _month(name: str) -> int:
    return _MONTHS.index(name[:3].lower()) + 1


def _date(year: object, month: object, day: object) -> date | None:
    try:
        return date(int(str(year)), int(str(month)), int(str(day)))
    except ValueError:
        return None
