"""The fixed words of prompts, and how long a quote may be. Imports no torch, so that a submit host can count them."""

import re

from kernels.words import CJK

ACKNOWLEDGEMENT = "I have read the document. What is your question?"
QUOTE_PROMPT = "quote-1"  # raise it whenever a quote would be asked for in other words
NONE = "NONE"  # what a model writes that quotes nothing
MOST_QUOTE_TOKENS = 64
_ASK = "Quote the words of the document that show this, exactly as they stand there. If no words show it, write: "
_ASK_CHINESE = "请逐字引用文件中说明这一点的原文。如果没有这样的原文，请写："


def ask_for_quote(question: str) -> str:
    """The instruction, in Chinese where the question is."""
    return (_ASK_CHINESE if re.search(f"[{CJK}]", question) else _ASK) + NONE
