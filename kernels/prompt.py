"""Prompts as tokens, cut between the document and the question.

A prompt is always prefix + question part, tokenised apart, in the cached and the uncached path alike:

    [system prompt, document's turn  |document|  its end, a short reply, question's turn][ |question|  answer's turn]
     `----------------------------- prefix, stored once -------------------------------'  `---- per question -----'

The document, the question and what the template puts around them are tokenised one by one, so the cut before the
question changes no token. Text is tokenised with special tokens switched off: none in a contract can end its turn or
give orders as the system.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kernels.architecture import read_config
from kernels.constraint import Grammars
from kernels.errors import ChatRefused, ModelIncomplete
from kernels.identity import digest_json
from kernels.phrases import ACKNOWLEDGEMENT, ask_for_quote
from kernels.quote import QuoteIndex

PROMPT_VERSION = "prompt-2"
NO_TEMPLATE = (
    "its tokenizer has no chat template (chat_template.jinja, or an entry of tokenizer_config.json); for a base model, "
    "set PLATEMAKER_PLAIN_PROMPT=true"
)
_DOCUMENT = "\u2045document\u2046"
_QUESTION = "\u2045question\u2046"


@dataclass(frozen=True)
class PromptParts:
    """The fixed text around document and question."""

    head: str
    middle: str
    turn: str
    tail: str


ASKED_KEPT = 1024  # questions


class Prompter:
    """Tokenizer and template of one model. `plain`: without a chat template, questions are asked in plain text.

    Raises:
        ModelIncomplete: the tokenizer, its template or its place in the model is missing or does not fit.
    """

    def __init__(self, folder: Path, system_prompt: str, *, plain: bool = False) -> None:
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as exc:
            raise ModelIncomplete(str(folder), "its tokenizer cannot be loaded") from exc
        if not plain and not self.tokenizer.chat_template:
            raise ModelIncomplete(str(folder), NO_TEMPLATE)
        self._check_vocabulary(folder)
        self.system_prompt = system_prompt
        self.parts = self._render_parts()
        self._frames: dict[tuple[str, ...], list[str]] = {}
        self._asked = lru_cache(ASKED_KEPT)(self._question)
        self.stop_ids = self._stop_ids(folder)

    def prefix_ids(self, document: str) -> list[int]:
        """Tokens of everything up to the question, with exactly one BOS if the model wants one."""
        return self._with_bos(self._literal(self.parts.head) + self._plain(document) + self._behind_document)

    @cached_property
    def head_tokens(self) -> int:
        """How many tokens precede the document: the same ones for every document."""
        return len(self.prefix_ids("")) - len(self._behind_document)

    @cached_property
    def _behind_document(self) -> list[int]:
        return self._literal(self.parts.middle) + self._literal(self.parts.turn)

    @cached_property
    def grammars(self) -> Grammars:
        """What constrained answers are held to; made for the first of them."""
        return Grammars(self.tokenizer, self.stop_ids)

    def question_ids(self, question: str) -> list[int]:
        """Tokens of the question part; never empty. A checklist asks the same of each document, so they are kept."""
        return list(self._asked(question))

    def _question(self, question: str) -> tuple[int, ...]:
        return (*self._plain(question), *self._literal(self.parts.tail))

    def quote_ids(self, question: str, answer: str) -> list[int]:
        """Tokens of the question part that asks, behind question and answer, for the words of the document."""
        ended = self.parts.middle.rpartition(ACKNOWLEDGEMENT)[2]  # what follows a reply
        return (
            self.question_ids(question)
            + self._plain(answer)
            + self._literal(ended + self.parts.turn + ask_for_quote(question) + self.parts.tail)
        )

    def chat_ids(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of a conversation of (role, content), up to where the answer begins. As everywhere, no content can end
        its turn.

        Raises:
            ChatRefused: the template cannot take these roles in this order.
        """
        between = self._chat_frame(tuple(role for role, _ in messages))
        ids = self._literal(between[0])
        for (_, content), then in zip(messages, between[1:], strict=True):
            ids += self._plain(content) + self._literal(then)
        return self._with_bos(ids)

    def quotes(self, document: str) -> QuoteIndex:
        """
        Raises:
            ConstraintRefused: the tokenizer does not say which characters its tokens stand for.
        """
        return QuoteIndex(self.tokenizer, document, self.stop_ids)

    def text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def template_digest(self) -> str:
        """Of the text around document and question, as rendered for this model."""
        parts = self.parts
        return digest_json([PROMPT_VERSION, parts.head, parts.middle, parts.turn, parts.tail])

    def _check_vocabulary(self, folder: Path) -> None:
        """The ids of all tokens but padding, which is never read, need a row in the model's embedding."""
        rows = read_config(folder).get("vocab_size")
        vocabulary = dict(self.tokenizer.get_vocab())
        vocabulary.pop(self.tokenizer.pad_token, None)
        largest = max(vocabulary.values(), default=0)
        if isinstance(rows, int) and largest >= rows:
            raise ModelIncomplete(
                str(folder),
                f"its tokenizer has tokens up to number {largest:,}, and its config.json knows {rows:,} (vocab_size); "
                "the tokenizer files are another model's",
            )

    def _literal(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return [bos, *ids] if bos is not None and ids[0] != bos and self._adds_bos() else ids

    def _chat_frame(self, roles: tuple[str, ...]) -> list[str]:
        """The template's text before, between and behind the messages' contents."""
        if roles not in self._frames:
            self._frames[roles] = self._render_frame(roles)
        return self._frames[roles]

    def _render_frame(self, roles: tuple[str, ...]) -> list[str]:
        if not self.tokenizer.chat_template:
            names = {"system": "", "user": "Question: ", "assistant": "Answer: "}
            said = [names[role] for role in roles]
            return [said[0], *(f"\n\n{name}" for name in said[1:]), "\nAnswer:"]
        marks = [f"\u2045{number}\u2046" for number in range(len(roles))]
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        text = self._rendered(turns)
        if text is None and roles[0] == "system" and roles[1:2] == ("user",):  # some templates know no system turn
            text = self._rendered([{"role": "user", "content": f"{marks[0]}\n\n{marks[1]}"}, *turns[2:]])
        between = re.split("|".join(marks), text or "")
        if text is None or re.findall("|".join(marks), text) != marks:
            raise ChatRefused(roles)
        return between

    def _rendered(self, messages: list[dict[str, str]]) -> str | None:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # templates are programs and raise whatever they like
            return None
        return text if isinstance(text, str) else None

    def _adds_bos(self) -> bool:
        probe = self.tokenizer.encode("a")
        return bool(probe) and probe[0] == self.tokenizer.bos_token_id

    def _render_parts(self) -> PromptParts:
        if not self.tokenizer.chat_template:
            return PromptParts(f"{self.system_prompt}\n\n", "\n\n", "Question: ", "\nAnswer:")
        text = self._render(with_system=True)
        if text is None:  # some templates know no system turn
            text = self._render(with_system=False)
        if text is None:
            raise ModelIncomplete(self.tokenizer.name_or_path, "its chat template cannot be rendered")
        head, rest = text.split(_DOCUMENT)
        between, tail = rest.split(_QUESTION)
        cut = max((between.rfind(token) for token in self.tokenizer.all_special_tokens), default=-1)
        cut = len(between) if cut < 0 else cut
        return PromptParts(head, between[:cut], between[cut:], tail)

    def _render(self, *, with_system: bool) -> str | None:
        first = _DOCUMENT if with_system else f"{self.system_prompt}\n\n{_DOCUMENT}"
        messages = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": ACKNOWLEDGEMENT},
            {"role": "user", "content": _QUESTION},
        ]
        if with_system:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        text = self._rendered(messages)
        whole = text is not None and text.count(_DOCUMENT) == 1 and text.count(_QUESTION) == 1
        return text if text is not None and whole and (not with_system or self.system_prompt in text) else None

    def _stop_ids(self, folder: Path) -> frozenset[int]:
        """Every token that ends an answer: of the tokenizer, of generation_config.json and of the chat turn."""
        found = {self.tokenizer.eos_token_id}
        config = folder / "generation_config.json"
        if config.exists():
            try:
                eos = json.loads(config.read_text("utf-8")).get("eos_token_id")
            except ValueError as exc:
                raise ModelIncomplete(str(folder), "generation_config.json is not valid JSON") from exc
            found |= set(eos) if isinstance(eos, list) else {eos}
        for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"):
            token = self.tokenizer.convert_tokens_to_ids(name)
            if token is not None and token != self.tokenizer.unk_token_id:
                found.add(token)
        return frozenset(int(token) for token in found if token is not None)


def ids_digest(ids: list[int]) -> str:
    """SHA-256 (hex) of token ids, each as 4 bytes, little-endian."""
    return hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()
