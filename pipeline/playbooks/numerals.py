"""Chinese numerals, everyday (一百万) and as they are written in figures of money (壹佰万)."""

from decimal import Decimal

_DIGITS = {
    letter: value
    for value, letters in enumerate(
        ("〇零○", "一壹", "二贰貳两兩", "三叁參", "四肆", "五伍", "六陆陸", "七柒", "八捌", "九玖")
    )
    for letter in letters
}
_SMALL = {"十": 10, "拾": 10, "百": 100, "佰": 100, "千": 1000, "仟": 1000}
_LARGE = {"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
NUMERALS = "".join([*_DIGITS, *_SMALL, *_LARGE])


def chinese_number(text: str) -> Decimal | None:
    """The whole number that `text` writes in Chinese numerals or digits; None where it writes none."""
    if text.isascii() and text.isdigit():
        return Decimal(text)
    if not text:
        return None
    total = section = 0  # section: what stands before the next 万 or 亿
    digit: int | None = None
    for letter in text:
        if letter in _DIGITS:
            if digit:  # two digits side by side are written one by one, as in a year
                return None
            digit = _DIGITS[letter]
        elif letter in _SMALL:
            section += (1 if digit is None else digit) * _SMALL[letter]
            digit = None
        elif letter in _LARGE:
            total, section, digit = _grouped(total, section + (digit or 0), _LARGE[letter]), 0, None
        else:
            return None
    return Decimal(total + section + (digit or 0))


def _grouped(total: int, section: int, unit: int) -> int:
    """一万亿 is 万 times 亿; 三亿二万 are a sum."""
    return (total + section) * unit if total and total < unit else total + section * unit


def digit_by_digit(text: str) -> str | None:
    """二〇二六 → 2026; digits stay."""
    digits = [letter if letter.isascii() and letter.isdigit() else _DIGITS.get(letter) for letter in text]
    return None if None in digits else "".join(map(str, digits))
