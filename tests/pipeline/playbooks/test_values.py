import json
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.playbooks.answer_types import AnswerType
from pipeline.playbooks.dates import find_dates
from pipeline.playbooks.money import read_money
from pipeline.playbooks.numerals import chinese_number
from pipeline.playbooks.values import TypedValue, ValueStatus, read_value

CHOICES = ("exclusive", "non-exclusive", "Not mentioned")


def value_of(answer: str, answer_type: AnswerType) -> object:
    read = read_value(answer, answer_type, CHOICES if answer_type == AnswerType.CHOICE else ())
    return read.value if read.status == ValueStatus.PARSED else read.status


UNPARSED, NOT_FOUND = ValueStatus.UNPARSED, ValueStatus.NOT_FOUND


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        *[
            (text, True)
            for text in ("Yes.", "yes", "**Yes**, it may.", "The answer is yes.", "是", "是的，可以", "有。")
        ],
        *[(text, False) for text in ("No", "No, not without consent.", "否。", "不可以转让", "没有", "答：不是。")],
        *[
            (text, UNPARSED)
            for text in ("No. 5 applies", "Perhaps.", "是否允许", "有限责任", "无论如何", "Yesterday", "")
        ],
        *[(text, NOT_FOUND) for text in ("Not found.", "No information is given", "未找到", "合同中没有约定")],
    ],
)
def test_yes_and_no(answer: str, value: object) -> None:
    assert value_of(answer, AnswerType.YES_NO) == value


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        *[
            (text, "2026-11-30")
            for text in (
                "2026-11-30",
                "It ends on 30 November 2026.",
                "the 30th day of November, 2026",
                "Nov. 30, 2026",
                "30.11.2026",
                "11/30/2026",
                "2026年11月30日",
                "二〇二六年十一月三十日",
                "２０２６年１１月３０日（2026-11-30）",
            )
        ],
        ("自二零二六年三月一日起", "2026-03-01"),
        *[(text, UNPARSED) for text in ("11/12/2026", "12/11/2026, that is 2026-05-01", "30 February 2026", "in 2026")],
        ("from 1 May 2025 to 2 May 2026", UNPARSED),
        ("未约定", NOT_FOUND),
    ],
)
def test_dates(answer: str, value: object) -> None:
    assert value_of(answer, AnswerType.DATE) == value


@pytest.mark.parametrize(
    ("answer", "amount", "currency"),
    [
        ("EUR 5,000,000.", "5000000", "EUR"),
        ("limited to EUR 2,500,000 in 12 months", "2500000", "EUR"),
        ("€1.250.000,50", "1250000.50", "EUR"),
        ("US$ 5m", "5000000", "USD"),
        ("$2.5 million", "2500000", "USD"),
        ("USD 5,000,000 (5 million)", "5000000", "USD"),
        ("人民币壹佰万元整（¥1,000,000.00）", "1000000", "CNY"),
        ("人民币壹仟贰佰叁拾肆万伍仟陆佰柒拾捌元整", "12345678", "CNY"),
        ("1,000,000元", "1000000", "CNY"),
        ("１．５亿元", "150000000", "CNY"),
        ("港币100万元", "1000000", "HKD"),
        ("1,000", "1000", None),
    ],
)
def test_amounts_of_money(answer: str, amount: str, currency: str | None) -> None:
    assert value_of(answer, AnswerType.MONEY) == {"amount": amount, "currency": currency}


@pytest.mark.parametrize(
    "answer",
    ["5%", "within 30 days", "EUR 5 or USD 6", "EUR 5 million to 7 million", "壹佰元伍角", "1.2.3.4 EUR", "unlimited"],
)
def test_what_is_not_one_amount_is_not_made_one(answer: str) -> None:
    assert value_of(answer, AnswerType.MONEY) == UNPARSED


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Exclusive.", "exclusive"),
        ("It is non-exclusive.", "non-exclusive"),
        ("not mentioned", "Not mentioned"),
        ("not exclusive", UNPARSED),
        ("exclusive or non-exclusive", UNPARSED),
        ("either", UNPARSED),
        ("Not found.", NOT_FOUND),
    ],
)
def test_choices(answer: str, value: object) -> None:
    assert value_of(answer, AnswerType.CHOICE) == value


@pytest.mark.parametrize(
    ("answer", "items"),
    [
        ("1. Acme, Inc.\n2. B Ltd", ["Acme, Inc.", "B Ltd"]),
        ("- x\n\n* y", ["x", "y"]),
        ("Acme; B", ["Acme", "B"]),
        ("甲公司、乙公司", ["甲公司", "乙公司"]),
        ('["a", "b"]', ["a", "b"]),
        ("Acme, Inc.", ["Acme, Inc."]),
    ],
)
def test_lists(answer: str, items: list[str]) -> None:
    assert value_of(answer, AnswerType.LIST) == items


@pytest.mark.parametrize(
    ("answer", "value"),
    [('{"a": [1]}', {"a": [1]}), ('```json\n{"a": 1}\n```', {"a": 1}), ("NaN", UNPARSED), ("{a}", UNPARSED)],
)
def test_json(answer: str, value: object) -> None:
    assert value_of(answer, AnswerType.JSON) == value


words = 'yes no not , . 1 12 2026 - / May 年 月 日 万 元 壹 EUR $ 1,000 million [ { " exclusive non- 未 是 。'
pieces = st.sampled_from([*words.split(), " ", "\n"])


@given(st.one_of(st.text(), st.lists(pieces, max_size=12).map("".join)), st.sampled_from(AnswerType))
def test_whatever_a_model_says_is_a_value_or_honestly_none(answer: str, answer_type: AnswerType) -> None:
    read = read_value(answer, answer_type, CHOICES)

    assert isinstance(read, TypedValue)
    json.dumps(read.value, allow_nan=False)
    if read.status != ValueStatus.PARSED:
        assert read.value is None
    elif answer_type == AnswerType.CHOICE:
        assert read.value in CHOICES
    elif answer_type == AnswerType.DATE:
        assert date.fromisoformat(read.value) in find_dates(answer)


@given(st.dates(min_value=date(1900, 1, 1)))
def test_every_date_is_read_in_every_form(day: date) -> None:
    forms = [f"{day.isoformat()}", f"{day.day} {day:%B} {day.year}", f"{day.year}年{day.month}月{day.day}日"]

    assert [find_dates(f"on {form}, at noon") for form in forms] == [{day}] * 3


@given(st.integers(0, 10**9), st.sampled_from(["EUR {:,}", "{:,} EUR", "人民币{:,}元"]))
def test_every_amount_is_read_in_every_form(amount: int, form: str) -> None:
    found = read_money(form.format(amount))

    assert found is not None and found.amount == amount


@given(st.integers(0, 99_999_999))
def test_chinese_numerals_are_read_as_they_are_written(number: int) -> None:
    assert chinese_number(written(number)) == number


def written(number: int) -> str:
    """In everyday numerals, as in 一万二千〇五."""
    if number >= 10_000:
        rest = number % 10_000
        return written(number // 10_000) + "万" + ("零" if 0 < rest < 1000 else "") + (written(rest) if rest else "")
    text, digits = "", "零一二三四五六七八九"
    for value, unit in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // value % 10
        if digit:
            text += digits[digit] + unit
        elif text and number % value and not text.endswith("零"):
            text += "零"
    return text or "零"
