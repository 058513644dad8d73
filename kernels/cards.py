"""Which cards a process may see. Runs before torch is imported, which reads these variables once."""

import os
from collections.abc import Mapping, Sequence

from kernels.errors import CardsConflict

VARIABLES = ("CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES")


def card_list(cards: str) -> tuple[str, ...]:
    """`0,1` as ("0", "1")."""
    return tuple(card.strip() for card in cards.split(",") if card.strip())


def pin_cards(cards: str, count: int, environment: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Lets this process see the first of its `count` cards and nothing else; the others are for its other ranks.

    Raises:
        CardsConflict: the operator pinned other cards, or their number is not that of the ranks.
    """
    named = card_list(cards)
    if not named:
        return
    if len(named) != count:
        raise CardsConflict(f"PLATEMAKER_CARDS names {len(named)} cards, and PLATEMAKER_TENSOR_PARALLEL is {count}")
    for variable in VARIABLES:
        given = environment.get(variable)
        if given is not None and card_list(given) != named:
            raise CardsConflict(f"PLATEMAKER_CARDS is {cards!r}, and {variable} is {given!r}")
    for variable in VARIABLES:
        environment[variable] = named[0]


def rank_environment(cards: str, number: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the process of a rank has to see: its card of those named, of the operator's, or the one of its number."""
    return {
        variable: _card(card_list(cards) or card_list(environment.get(variable, "")), number) for variable in VARIABLES
    }


def _card(named: Sequence[str], number: int) -> str:
    return named[number] if number < len(named) else str(number)
