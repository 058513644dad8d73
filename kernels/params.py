"""How answers are generated. Imports no torch, so that a submit host can say it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationParams:
    """How one answer is generated. temperature 0 is greedy; top_p 1 and top_k 0 cut nothing."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
