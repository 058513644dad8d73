"""What the model is asked: one versioned template from title, question, guidance and answer type.

A plain question is asked as it stands. The text depends on nothing but the entry, so that the same playbook asks the
same words every night. Raise TEMPLATE whenever the same entry would be asked in other words.
"""

import re

from pipeline.playbooks.answer_types import AnswerType

TEMPLATE = "question-1"
_CJK = re.compile(r"[\u3400-\u9fff]")

_ENGLISH = {
    AnswerType.TEXT: "",
    AnswerType.YES_NO: "Answer with Yes or No.",
    AnswerType.DATE: "Answer with the date in the form YYYY-MM-DD.",
    AnswerType.MONEY: "Answer with the currency and the amount in figures.",
    AnswerType.CHOICE: "Answer with exactly one of these: {choices}.",
    AnswerType.LIST: "Answer with one item on each line.",
    AnswerType.JSON: "Answer with JSON only.",
}
_CHINESE = {
    AnswerType.TEXT: "",
    AnswerType.YES_NO: "请回答“是”或“否”。",
    AnswerType.DATE: "请按“YYYY-MM-DD”的格式回答日期。",
    AnswerType.MONEY: "请回答币种和以数字表示的金额。",
    AnswerType.CHOICE: "请只回答下列之一：{choices}。",
    AnswerType.LIST: "请每行回答一项。",
    AnswerType.JSON: "请只回答JSON。",
}


def not_found_words(question: str) -> str:
    """What the model is told to answer where the document does not say."""
    return "未找到" if _CJK.search(question) else "Not found"


def question_prompt(
    question: str,
    *,
    title: str | None = None,
    guidance: str | None = None,
    answer_type: AnswerType = AnswerType.TEXT,
    choices: tuple[str, ...] = (),
) -> str:
    """The text that stands in the question's turn; in Chinese where the question is."""
    if answer_type == AnswerType.TEXT and not guidance:
        return question
    chinese = _CJK.search(question) is not None
    instruction = (_CHINESE if chinese else _ENGLISH)[answer_type]
    instruction = instruction.replace("{choices}", ("；" if chinese else "; ").join(choices))
    words = not_found_words(question)
    absent = f"文件中没有写明的，请回答：{words}。" if chinese else f"If the document does not say, answer: {words}."
    between = "：" if chinese else ": "
    lines = [f"{title}{between}{question}" if title else question, guidance, instruction, absent]
    return "\n".join(line for line in lines if line)
