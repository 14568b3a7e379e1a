"""What makes a hit good beside being right: counted and reported apart, never a violation."""

from __future__ import annotations

from collections.abc import Iterator

from kvproof_spec.judgement import Expected, Observed, rule
from kvproof_spec.pages import needed_cells, read_page


@rule("hit")
def drafters_saw_the_same(expected: Expected, observed: Observed) -> Iterator[str]:
    """Q1: the drafter cells of a hit have seen its own continuation (quality, not safety)."""
    hit, content = expected.after.hit, expected.request.content
    assert hit is not None
    for block, group, offset, position in needed_cells(
        expected.groups, hit.tables, hit.tokens, hit.tokens
    ):
        if expected.groups[group].drafter and position + 1 < len(content):
            seen = read_page(expected.before.continued, block, group, offset)
            if seen is not content[position + 1]:
                yield f"block {block}, group {group}, position {position} has seen {seen}"


QUALITIES = (drafters_saw_the_same,)
