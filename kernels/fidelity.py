"""What a lossy codec does to the model: its logits over the KV as stored, against those over the KV as computed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv import PrefixKV
from kernels.model import LanguageModel
from kernels.prefill import Probe, probe_logits
from kernels.steps import DecodeStep

PIECE = 128  # tokens at once: logits are [tokens, vocab] in fp32


@dataclass(frozen=True)
class Loss:
    """`logit_rel_error`: of the probe's logits, l2, NaN where they are not finite. `top1_agreement`: the share of the
    last chunk's tokens, asked again, after which the best next token is the same. `probe`: from the KV as stored."""

    logit_rel_error: float
    top1_agreement: float
    probe: Probe


def measure_loss(model: LanguageModel, ids: list[int], *, exact: PrefixKV, stored: PrefixKV, first: int) -> Loss:
    """Asks the tokens [first, len(ids)) again behind the document, of both, as a question is asked; as many as the
    context has room for. Changes neither."""
    exact_logits, logits = (probe_logits(model, ids[-1], kv) for kv in (exact, stored))
    again = ids[first:][: model.context_len - len(ids)]
    return Loss(
        logit_rel_error=float((logits - exact_logits).norm() / exact_logits.norm()),
        top1_agreement=float((_best(model, again, stored) == _best(model, again, exact)).float().mean()),
        probe=Probe.of(logits),
    )


def _best(model: LanguageModel, ids: list[int], kv: PrefixKV) -> Tensor:
    """The best next token after each token of a question."""
    suffix = model.new_suffix(1, len(ids))
    best = []
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        step = DecodeStep(kv, suffix, [len(piece)], [start], model.device)
        best.append(model.forward(step, piece, len(piece)).argmax(-1))
    return torch.cat(best)
