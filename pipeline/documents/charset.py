"""Text from bytes of unknown encoding."""

import codecs
import re

from charset_normalizer import from_bytes

# The marks of UTF-32 begin with those of UTF-16, so they come first.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# Which bytes of four are zero, for text that is mostly ASCII.
_ZERO_PATTERNS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
}
_SAMPLE_BYTES = 64 * 1024
_MOST_FOREIGN_BYTES = 0.05

_FOREIGN = re.compile("[\udc80-\udcff]")
_WINDOWS_1252 = {0xDC00 + byte: bytes([byte]).decode("cp1252", errors="replace") for byte in range(0x80, 0x100)}

_HAN_BOTH = "一不人上下中大小年月日元天工公司合本方期由所以可在有之及如部文件名各主要定出作或其法自理交成支付任行使用"
_MARKS = "，。、：；（）《》「」『』“”？！　・ー／"
# The commonest characters of prose and of contracts in each, and the marks of East Asian punctuation.
_COMMON = {
    "gb18030": "的是了和为与对于个这来们时会后从双条约议务责权损违偿终证实际规应该让当给据请协买卖设备产质标价货纳须"
    "诉讼签订无关经过认单户账"
    "号电话传真项目保甲乙丙丁第二三四五六七八九十百千万" + _HAN_BOTH,
    "big5hkscs": "的是了和為與對於個這來們時會後從雙條約議務責權損違償終證實際規應該讓當給據請協買賣設備產質標價貨納須"
    "訴訟簽訂無關經過認單戶"
    "帳號電話傳真項目保甲乙丙丁第二三四五六七八九十百千萬" + _HAN_BOTH,
    "cp932": "".join(map(chr, range(0x3041, 0x30FB))) + "契約条項乙甲株式会社以下本第号者者間内" + _HAN_BOTH,
    "euc_jp": "".join(map(chr, range(0x3041, 0x30FB))) + "契約条項乙甲株式会社以下本第号者者間内" + _HAN_BOTH,
    "cp949": "이다의에는을를은가한하고과로지사기도서자인대정일해시나리어보계약갑으아라제조수있수부주전여당합그관되상"
    "할공경항급니업회권호련원"
    "본및무용적비금없된소동행안신우만연러성구면스장위문간국간출며터마부입",
}
_LEAST_COMMON = 0.3


def decode(data: bytes) -> str:
    """By byte order mark, by zero bytes, as UTF-8, as an East Asian encoding, as Windows-1252, by a guess."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    if encoding := _ZERO_PATTERNS.get(_zero_pattern(data[:_SAMPLE_BYTES]), ""):
        return data.decode(encoding, errors="replace")
    text = data.decode("utf-8", errors="surrogateescape")
    num_foreign = len(_FOREIGN.findall(text))
    if not num_foreign:
        return text
    if encoding := _east_asian(data):
        return data.decode(encoding, errors="replace")
    # Western text is nearly all ASCII, also where UTF-8 and Windows-1252 were pasted into one file.
    guess = from_bytes(data).best() if num_foreign > _MOST_FOREIGN_BYTES * len(data) else None
    return text.translate(_WINDOWS_1252) if guess is None else str(guess)


def _east_asian(data: bytes) -> str:
    """The encoding in which most characters beyond ASCII are common ones of its language; empty where none fits.

    Nearly any pair of high bytes is some character in each of these encodings, but only in the right one do the
    pairs give those that every text is full of. Decoding has to succeed but for a cut at the sample's end.
    """
    sample = data[:_SAMPLE_BYTES]
    best, encoding = _LEAST_COMMON, ""
    for name, common in _COMMON.items():
        decoder = codecs.getincrementaldecoder(name)()
        try:
            text = decoder.decode(sample, final=len(sample) == len(data))
        except UnicodeDecodeError:
            continue
        foreign = [character for character in text if character > "\x7f"]
        known = set(common + _MARKS)
        share = sum(character in known for character in foreign) / max(1, len(foreign))
        if share > best:
            best, encoding = share, name
    return encoding


def _zero_pattern(sample: bytes) -> tuple[bool, ...]:
    """For each of four neighbouring bytes: is it mostly zero? Text in one-byte encodings has hardly any."""
    return tuple(len(column) > 0 and column.count(0) > 0.7 * len(column) for column in (sample[i::4] for i in range(4)))
