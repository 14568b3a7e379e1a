"""What decides content beside token ids: adapters, salts, multimodal items, prompt embeddings.

For each dimension, two prompts that are equal but for it never serve each other (R5), and two that
are equal do.  A target that leaves the dimension out of its keys is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import pytest

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteStep,
    Issue,
    Lookup,
    Output,
    Release,
    Submit,
)
from kvproof_spec.answers import Answer, Done, Granted, Hit, Issued, Returned
from kvproof_spec.config import Config, Group
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import Oracle
from kvproof_spec.prefix import TOKENS_ONLY, Inputs, Item, Prefix, content_of

FULL = Config((Group("full", 2),), num_blocks=9)
PROMPT = (7, 7, 7, 7, 7)

Key = Callable[[Inputs, tuple[int, ...]], Hashable]
"""What a target names the first so many tokens of a prompt by."""


def every_dimension(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    length = len(tokens)
    items = tuple(
        (position, item.id, position - item.first)
        for position in range(length)
        for item in inputs.items
        if item.first <= position < item.first + item.tokens
    )
    embeds = tuple((position, value) for position, value in inputs.embeds if position < length)
    return tokens, inputs.lora, inputs.lora_version, inputs.salt, items, embeds


def without_lora(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    return every_dimension(replace(inputs, lora=None, lora_version=0), tokens)


def without_lora_version(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    return every_dimension(replace(inputs, lora_version=0), tokens)


def without_salt(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    return every_dimension(replace(inputs, salt=None), tokens)


def without_item_id(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    nameless = tuple(replace(item, id="") for item in inputs.items)
    return every_dimension(replace(inputs, items=nameless), tokens)


def without_item_offset(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    ids = [item.id for item in inputs.items for _ in range(item.tokens)]
    return every_dimension(replace(inputs, items=()), tokens), tuple(ids[: len(tokens)])


def without_items(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    return every_dimension(replace(inputs, items=()), tokens)


def without_embeds(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    return every_dimension(replace(inputs, embeds=()), tokens)


def without_tokens(inputs: Inputs, tokens: tuple[int, ...]) -> Hashable:
    """A multimodal item stands in its tokens' place, and so its key may seem to be enough."""
    return every_dimension(inputs, (0,) * len(tokens))


@dataclass(frozen=True, slots=True)
class Dimension:
    """Two inputs that differ in it alone, within the first two tokens of `PROMPT`."""

    name: str
    one: Inputs
    other: Inputs
    without: Key
    prompts: tuple[tuple[int, ...], tuple[int, ...]] = (PROMPT, PROMPT)


CAT = Inputs(items=(Item("cat", 0, 4),))
DIMENSIONS = (
    Dimension("token", TOKENS_ONLY, TOKENS_ONLY, without_tokens, (PROMPT, (7, 8, 7, 7, 7))),
    Dimension("token under an item", CAT, CAT, without_tokens, (PROMPT, (7, 8, 7, 7, 7))),
    Dimension("adapter", Inputs("poet"), Inputs("lawyer"), without_lora),
    Dimension("adapter or none", TOKENS_ONLY, Inputs("poet"), without_lora),
    Dimension("adapter version", Inputs("poet", 1), Inputs("poet", 2), without_lora_version),
    Dimension("salt", Inputs(salt="mine"), Inputs(salt="yours"), without_salt),
    Dimension("salt or none", TOKENS_ONLY, Inputs(salt=""), without_salt),
    Dimension("item", CAT, Inputs(items=(Item("dog", 0, 4),)), without_item_id),
    Dimension("item or none", CAT, TOKENS_ONLY, without_items),
    Dimension(
        "offset in an item",
        CAT,
        Inputs(items=(Item("cat", 0, 1), Item("cat", 1, 3))),
        without_item_offset,
    ),
    Dimension("embedding", Inputs(embeds=((1, 5),)), Inputs(embeds=((1, 6),)), without_embeds),
    Dimension("embedding or none", Inputs(embeds=((1, 5),)), TOKENS_ONLY, without_embeds),
)


Move = tuple[Action, Answer]


def called(dimension: Dimension) -> str:
    return dimension.name


each_dimension = pytest.mark.parametrize("dimension", DIMENSIONS, ids=called)


def submits(dimension: Dimension) -> tuple[Submit, Submit]:
    first, second = dimension.prompts
    return Submit(0, first, inputs=dimension.one), Submit(1, second, inputs=dimension.other)


def hit_by(key: Key, first: Submit, second: Submit) -> Hit:
    """What a target with such keys answers, when `first` has left three blocks of five tokens."""
    keys = {key(first.inputs, first.symbols[:end]): end // 2 for end in (2, 4)}
    blocks = [keys.get(key(second.inputs, second.symbols[:end])) for end in (2, 4)]
    found = tuple(block for block in blocks if block)
    return Hit(2 * len(found), (found,))


def follow(oracle: Oracle, *moves: Move) -> Oracle:
    for action, answer in moves:
        oracle.step(action, answer)
    return oracle


def looked_up(key: Key, first: Submit, second: Submit) -> Oracle:
    """`first` is computed and leaves, then `second` starts from the hit that such keys give."""
    oracle = follow(
        Oracle(FULL),
        (first, Done()),
        (Lookup(0), Hit(0, ((),))),
        (Allocate(0, 5), Granted(((1, 2, 3),))),
        (Issue(), Issued()),
        (CompleteStep(0, (Output(0, 9),)), Returned()),
        (Release(0, "finish"), Returned()),
        (second, Done()),
    )
    hit = hit_by(key, first, second)
    held = hit.tables[0]
    new = (4, 5, 6)[: 3 - len(held)]
    return follow(
        oracle,
        (Lookup(1), hit),
        (Allocate(1, 5 - hit.tokens), Granted(((*held, *new),))),
        (Issue(), Issued()),
        (CompleteStep(1, (Output(1, 9),)), Returned()),
    )


# The dimensions


@each_dimension
def test_content_that_differs_in_one_dimension_differs(dimension: Dimension) -> None:
    root = Prefix.root()
    first, second = submits(dimension)
    one, other = (content_of(root, s.symbols, s.inputs) for s in (first, second))
    assert one[1] is not other[1]
    assert one[-1] is not other[-1], "and so does all that follows"
    assert content_of(root, first.symbols, first.inputs) == one
    assert [node.length for node in one] == [node.length for node in other] == [1, 2, 3, 4, 5]


@each_dimension
def test_a_target_that_leaves_the_dimension_out_of_its_keys_is_caught(dimension: Dimension) -> None:
    first, second = submits(dimension)
    assert hit_by(dimension.without, first, second).tokens >= 2, "it does leave it out"
    with pytest.raises(Violation, match=r"I2: a hit for .* got block 1, group 0") as caught:
        looked_up(dimension.without, first, second)
    assert caught.value.also == ("R5",)


@each_dimension
def test_prefixes_that_differ_in_it_need_not_serve_each_other(dimension: Dimension) -> None:
    first, second = submits(dimension)
    assert hit_by(every_dimension, first, second).tokens == 0
    looked_up(every_dimension, first, second)


@each_dimension
@pytest.mark.parametrize("keyed", ["by every dimension", "without this one"])
def test_prefixes_that_are_equal_in_it_serve_each_other(dimension: Dimension, keyed: str) -> None:
    key = every_dimension if keyed == "by every dimension" else dimension.without
    for submit in submits(dimension):
        again = replace(submit, request=1)
        assert hit_by(key, submit, again).tokens == 4
        oracle = looked_up(key, replace(submit, request=0), again)
        assert oracle.evaluated["I2", "hit"] == 1
        assert oracle.evaluated["I2", "reads"] == 2


def test_what_differs_only_behind_the_hit_serves() -> None:
    """An embedding and an item at the last token leave two blocks before them equal."""
    plain = Submit(0, PROMPT)
    for inputs in (Inputs(embeds=((4, 1),)), Inputs(items=(Item("cat", 4, 1),))):
        behind = Submit(1, PROMPT, inputs=inputs)
        assert hit_by(every_dimension, plain, behind).tokens == 4
        looked_up(every_dimension, plain, behind)


def test_sampled_tokens_follow_their_own_adapters_prefix() -> None:
    poet = Inputs("poet")
    moves: list[Move] = [
        (Submit(0, (1, 2, 3), inputs=poet), Done()),
        (Lookup(0), Hit(0, ((),))),
        (Allocate(0, 3), Granted(((1, 2),))),
        (Issue(), Issued()),
        (CompleteStep(0, (Output(0, 9),)), Returned()),
        (Allocate(0, 1), Granted(((1, 2),))),
        (Issue(), Issued()),
        (CompleteStep(1, (Output(0, 9),)), Returned()),
    ]
    hit = Lookup(1), Hit(4, ((1, 2),))
    follow(Oracle(FULL), *moves, (Submit(1, (1, 2, 3, 9, 4), inputs=poet), Done()), hit)
    with pytest.raises(Violation, match="I2: a hit for"):
        follow(Oracle(FULL), *moves, (Submit(1, (1, 2, 3, 9, 4)), Done()), hit)


def test_the_two_parts_of_an_item_are_the_same_wherever_its_prompt_is_cut() -> None:
    """What decides is the item and the offset inside it, not how much of it is there."""
    root = Prefix.root()
    short, long = Inputs(items=(Item("cat", 1, 2),)), Inputs(items=(Item("cat", 1, 3),))
    one, other = content_of(root, PROMPT, short), content_of(root, PROMPT, long)
    assert [a is b for a, b in zip(one, other, strict=True)] == [True, True, True, False, False]


def test_what_a_prompt_has_no_room_for_is_left_out() -> None:
    whole = Inputs("poet", 1, "mine", (Item("cat", 0, 2), Item("dog", 2, 2)), ((1, 5), (3, 6)))
    assert whole.within(4) is whole
    assert whole.within(3) == replace(whole, items=whole.items[:1], embeds=whole.embeds[:1])
    assert whole.within(1) == replace(whole, items=(), embeds=())


def test_an_encoders_content_is_nobody_elses() -> None:
    config = Config((Group("cross", 2),), num_blocks=5, caching=False)
    oracle = Oracle(config)
    for request in (0, 1):
        oracle.step(Submit(request, PROMPT, encoder_tokens=2), Done())
    first, second = (oracle.state.find(request).encoder for request in (0, 1))
    assert len(first) == len(second) == 2
    assert not set(first) & set(second)
    assert oracle.state.find(0).content == oracle.state.find(1).content
