import os
from collections.abc import Sequence

_VIEWS_AT_ONCE = 512  # the kernel takes no more than 1024


def read_views(descriptor: int, start: int, into: Sequence[memoryview]) -> None:
    """Fill the views of bytes, one after the other, from `start` on; where the file ends, the rest is left alone."""
    rest = [view for view in into if view.nbytes]
    while rest:
        num_read = os.preadv(descriptor, rest[:_VIEWS_AT_ONCE], start)
        if num_read == 0:
            return
        start += num_read
        rest = _without(rest, num_read)


def write_views(descriptor: int, start: int, views: Sequence[memoryview]) -> None:
    """Write the views of bytes, one after the other, from `start` on."""
    rest = [view for view in views if view.nbytes]
    while rest:
        num_written = os.pwritev(descriptor, rest[:_VIEWS_AT_ONCE], start)
        start += num_written
        rest = _without(rest, num_written)


def first_bytes(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """As much of the views of bytes as holds this many."""
    found = []
    for view in views:
        found.append(view[:num_bytes])
        num_bytes -= found[-1].nbytes
    return found


def _without(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    done = 0
    while done < len(views) and num_bytes >= views[done].nbytes:
        num_bytes -= views[done].nbytes
        done += 1
    rest = views[done:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest
