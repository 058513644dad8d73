"""What counts as a word."""

import re

CJK = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Chinese and Japanese put no blanks between words: there each character is one. A figure or a hyphened word is one too.
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+(?:[.,'’-][^\W{CJK}]+)*")
