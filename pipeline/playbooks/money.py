"""Amounts of money in running text, English and Chinese."""

import re
import unicodedata
from decimal import Decimal
from typing import NamedTuple

from pipeline.playbooks.numerals import NUMERALS, chinese_number

_LISTED = """
    AED AUD BRL CAD CHF CLP CNY COP CZK DKK EUR GBP HKD HUF IDR ILS INR JPY KRW MXN MYR NOK NZD PHP PLN RON RUB SAR SEK
    SGD THB TRY TWD USD VND ZAR
"""
_CODES = frozenset(_LISTED.split())
# The longest first: "US$" is not "$". A bare $ is taken as US dollars, a bare ¥ as renminbi.
_SYMBOLS = {
    "US$": "USD", "U.S.$": "USD", "HK$": "HKD", "NT$": "TWD", "A$": "AUD", "C$": "CAD", "S$": "SGD", "$": "USD",
    "€": "EUR", "£": "GBP", "¥": "CNY", "₹": "INR", "₩": "KRW", "RMB": "CNY", "人民币": "CNY", "人民幣": "CNY",
    "美元": "USD", "港币": "HKD", "港元": "HKD", "欧元": "EUR", "英镑": "GBP", "日元": "JPY", "新台币": "TWD",
    "US dollars": "USD", "U.S. dollars": "USD", "dollars": "USD", "euros": "EUR", "euro": "EUR",
    "pounds sterling": "GBP", "pounds": "GBP", "yuan": "CNY", "yen": "JPY", "円": "JPY", "元": "CNY", "圆": "CNY",
}  # fmt: skip
_NAMES = [*(rf"\b{code}\b" for code in sorted(_CODES)), *map(re.escape, sorted(_SYMBOLS, key=len, reverse=True))]
_CURRENCY = "|".join(_NAMES)
_FIGURE = r"\d{1,3}(?:[ \u00a0']\d{3})+(?:[.,]\d{1,2})?(?!\d)|\d[\d.,]*\d|\d"
_SCALE = r"billion|bn|million|mio|mn|thousand|万亿|亿|億|百万|千万|万|萬|千|[kKmM](?![\w])"
_SCALES = {
    "billion": 10**9, "bn": 10**9, "million": 10**6, "mio": 10**6, "mn": 10**6, "m": 10**6, "thousand": 10**3,
    "k": 10**3, "万亿": 10**12, "亿": 10**8, "億": 10**8, "千万": 10**7, "百万": 10**6, "万": 10**4, "萬": 10**4,
    "千": 10**3,
}  # fmt: skip
_AMOUNT = re.compile(
    rf"(?P<before>{_CURRENCY})?\s*[:：]?\s*(?<![\d.,])(?:(?P<figure>{_FIGURE})\s*(?P<scale>{_SCALE})?"
    rf"|(?P<numeral>[{NUMERALS}]+))\s*(?P<after>{_CURRENCY})?(?!\s*[%％])",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:[.,]\d{2,3})*[.,]\d{3}")
_SMALL_CHANGE = re.compile(rf"\s*[\d{NUMERALS}]+\s*[角分]")


class Money(NamedTuple):
    amount: Decimal
    currency: str | None

    def record(self) -> dict[str, str | None]:
        return {"amount": f"{self.amount:f}", "currency": self.currency}


def read_money(text: str) -> Money | None:
    """The one amount that the text names. None: it names none, or different ones.

    A number counts beside a currency or with a scale (7 million); without them, only where it is all the text. Amounts
    of 角 and 分 in Chinese numerals are not read.
    """
    text = unicodedata.normalize("NFKC", text).strip()
    found: set[Money] = set()
    for match in _AMOUNT.finditer(text):
        currency = match["before"] or match["after"]
        alone = match.group().strip() == text.rstrip(" .。整")
        amount = _amount(match)
        if _SMALL_CHANGE.match(text, match.end()):
            return None
        if amount is not None and (currency or match["scale"] or (alone and match["figure"])):
            found.add(Money(amount, _code(currency) if currency else None))
    # "EUR 5,000,000 (5 million)" is one amount
    with_currency = {money.amount for money in found if money.currency}
    found = {money for money in found if money.currency or money.amount not in with_currency}
    return found.pop() if len(found) == 1 else None


def _code(currency: str) -> str:
    if currency.upper() in _CODES:
        return currency.upper()
    return next(code for symbol, code in _SYMBOLS.items() if symbol.casefold() == currency.casefold())


def _amount(match: re.Match[str]) -> Decimal | None:
    if match["numeral"]:
        return chinese_number(match["numeral"])
    number = _decimal(match["figure"])
    scale = _SCALES.get((match["scale"] or "").lower(), 1)
    return None if number is None else _plain(number * scale)


def _decimal(figure: str) -> Decimal | None:
    """Both 1,000,000.50 and 1.000.000,50, and 12,50,000; a single mark before three digits parts thousands."""
    figure = re.sub(r"[ \u00a0']", "", figure)
    whole, mark, cents = re.fullmatch(r"(.*?)(?:([.,])(\d*))?", figure).groups("")  # type: ignore[union-attr] # all match
    marks = set(re.findall(r"[.,]", whole))
    if mark in marks or (mark and not marks and _THOUSANDS.fullmatch(figure)):
        whole, cents = figure, ""
        marks.add(mark)
    if len(marks) > 1 or (marks and not _THOUSANDS.fullmatch(whole)):
        return None
    return Decimal(f"{re.sub('[.,]', '', whole)}.{cents or 0}") if cents else Decimal(re.sub("[.,]", "", whole))


def _plain(number: Decimal) -> Decimal:
    """Without the zeros behind the point that a scale leaves: 2.5 million is 2500000."""
    return number.quantize(Decimal(1)) if number == number.to_integral_value() and number < 10**20 else number
