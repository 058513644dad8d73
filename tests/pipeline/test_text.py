from pathlib import Path

import pytest

from tests.pipeline.made_files import LIMITATION, pages_of, read, text_file


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8", "Müller pays € 5"),
        ("utf-8-sig", "Müller pays € 5"),
        ("utf-16", "Müller pays € 5"),
        ("utf-32", "Müller pays € 5"),
        ("utf-16-le", "Müller pays 5 and more for it"),
        ("utf-16-be", "Müller pays 5 and more for it"),
        ("utf-32-le", "Müller pays 5 and more for it"),
        ("utf-32-be", "Müller pays 5 and more for it"),
        ("cp1252", "the “Licensee” shall – under § 4 – pay the fee of € 100 to Müller & Co. each quarter"),
        (
            "gb18030",
            "本协议由甲方与乙方于北京签订。双方经友好协商，就软件许可事宜达成如下条款，以资共同遵守。" * 4,
        ),
        ("gbk", "买卖合同"),
        ("big5", "第十二條 違約責任：任何一方違反本契約之約定，應賠償他方損失。"),
        ("shift_jis", "第十二条（損害賠償）甲又は乙は、本契約に違反したときは、相手方に生じた損害を賠償する。"),
        ("euc_jp", "甲は、乙に対し、本件商品の代金を支払うものとする。"),
        ("euc_kr", "제12조 갑 또는 을은 본 계약을 위반한 경우 상대방에게 손해를 배상하여야 한다."),
        ("gb18030", "This Agreement is made in Beijing between the parties. " * 9 + "甲方：北京某某科技有限公司"),
        ("cp1251", "Настоящий договор заключён между Лицензиаром и Лицензиатом в городе Москве. " * 4),
    ],
)
def test_text_is_read_in_the_encoding_it_was_written_in(encoding: str, text: str, tmp_path: Path) -> None:
    assert read(text_file(tmp_path, text.encode(encoding))).text == text.strip()


def test_two_encodings_pasted_together_are_both_read(tmp_path: Path) -> None:
    data = (LIMITATION + "“one”").encode() + (LIMITATION + "“two”").encode("cp1252")

    assert read(text_file(tmp_path, data)).text == f"{LIMITATION}“one”{LIMITATION}“two”"


def test_nul_characters_are_dropped(tmp_path: Path) -> None:
    assert read(text_file(tmp_path, LIMITATION + "fee\0s\0 due")).text == f"{LIMITATION}fees due"


def test_text_pages_end_at_form_feeds_and_at_the_marks_of_filings(tmp_path: Path) -> None:
    text = "<PAGE>   1\r\none <PAGE> more\r\n  <PAGE>\r\ntwo\f\n<PAGE> 3\nthree\f\ffive\f"

    assert pages_of(read(text_file(tmp_path, text))) == ["one <PAGE> more", "two", "three", "", "five"]
