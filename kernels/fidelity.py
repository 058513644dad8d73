"""What a lossy codec does to the model: its logits over the KV as stored, against those over the KV as computed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv import PrefixKV
from kernels.model import Asked, LanguageModel
from kernels.prefill import Probe, probe_logits
from kernels.steps import ReplayStep

PIECE = 128  # tokens at once: logits are [tokens, vocab] in fp32


@dataclass(frozen=True)
class Loss:
    """`logit_rel_error`: of the last token's logits, l2, NaN where they are not finite. `top1_agreement`: the share of
    tokens after which the best next token is the same. `probe`: from the KV as stored."""

    logit_rel_error: float
    top1_agreement: float
    probe: Probe


def measure_loss(model: LanguageModel, ids: list[int], *, exact: PrefixKV, stored: PrefixKV, first: int) -> Loss:
    """Runs the tokens [first, len(ids)) over both, each seeing the KV of all before it and its own, as questions do.
    Changes neither.

    Where a layer keeps a window or a state, the document cannot be gone back in: there the tokens are asked again
    behind it, as many as the context has room for, and the logits are those of the probe.
    """
    run = _ask_again if exact.layout.windows or exact.layout.recurrent else _replay
    exact_best, exact_last = run(model, ids, exact, first)
    best, last = run(model, ids, stored, first)
    return Loss(
        logit_rel_error=float((last - exact_last).norm() / exact_last.norm()),
        top1_agreement=float((best == exact_best).float().mean()),
        probe=Probe.of(probe_logits(model, ids[-1], stored)),
    )


def _replay(model: LanguageModel, ids: list[int], kv: PrefixKV, first: int) -> tuple[Tensor, Tensor]:
    """The best next token after each token, and the logits [vocab] of the last."""
    best = []
    for start in range(first, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        logits = model.forward(ReplayStep(kv, start, len(piece)), piece, len(piece))
        best.append(logits.argmax(-1))
    return torch.cat(best), logits[-1]


def _ask_again(model: LanguageModel, ids: list[int], kv: PrefixKV, first: int) -> tuple[Tensor, Tensor]:
    """The best next token after each token of a question, and the logits [vocab] of the probe."""
    question = ids[first:][: model.context_len - len(ids)]
    suffix = model.new_suffix(1, len(question))
    best = []
    for start in range(0, len(question), PIECE):
        piece = question[start : start + PIECE]
        best.append(model.ask_all([Asked(kv, suffix, [piece], [start])], every=True).argmax(-1))
    return torch.cat(best), probe_logits(model, ids[-1], kv)
