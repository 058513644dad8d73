import random
from collections.abc import Iterator

from pipeline.batch.index import BLOCK_CHARS, IndexedLine, block_digests, groups


def lines(texts: list[str]) -> Iterator[IndexedLine]:
    for number, text in enumerate(texts, 1):
        yield IndexedLine(number, 0, 0, bytes([number]), block_digests(text))


def test_lines_of_one_document_come_together_however_they_are_mixed() -> None:
    system = "s" * (2 * BLOCK_CHARS)
    documents = [chr(65 + number) * BLOCK_CHARS * (5 + number) for number in range(6)]
    texts = [f"{system}{document}{question}" for document in documents for question in range(7)]
    random.shuffle(texts)

    found = list(groups(list(lines(texts))))

    assert sorted(line.number for group in found for line in group) == list(range(1, len(texts) + 1))
    assert [group[0].number for group in found] == sorted(group[0].number for group in found)
    assert {tuple(sorted({texts[line.number - 1][3 * BLOCK_CHARS] for line in group})) for group in found} == {
        (name,) for name in "ABCDEF"
    }


def test_short_lines_are_alone() -> None:
    assert [len(group) for group in groups(list(lines(["a", "a", "b"])))] == [1, 1, 1]
