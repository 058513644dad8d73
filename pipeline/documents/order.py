import re


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts names as people count: Annex 2 stands before Annex 10. The same for every machine's locale."""
    pieces = re.split(r"(\d+)", name.casefold())
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces if piece] + [(-1, 0, name)]
