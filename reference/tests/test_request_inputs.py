"""Digests of prefixes that differ in more than their tokens."""

from __future__ import annotations

from itertools import combinations

from kvproof_reference import KVCacheManager, Request
from kvproof_spec.config import Group
from kvproof_spec.prefix import TOKENS_ONLY, Inputs, Item, Prefix, content_of

CAT = Item("cat", 3, 3)
DIFFERENT = [
    TOKENS_ONLY,
    Inputs(lora="one"),
    Inputs(lora="two"),
    Inputs(lora="one", lora_version=1),
    Inputs(salt="one"),
    Inputs(salt="two"),
    Inputs(lora="one", salt="two"),
    Inputs(lora="two", salt="one"),
    Inputs(items=(CAT,)),
    Inputs(items=(Item("dog", 3, 3),)),
    Inputs(items=(Item("cat", 2, 3),)),
    Inputs(items=(Item("cat", 2, 4),)),
    Inputs(items=(Item("cat", 3, 2), Item("cat", 5, 1))),
    Inputs(embeds=((3, 1),)),
    Inputs(embeds=((3, 2),)),
    Inputs(embeds=((4, 1),)),
    Inputs(items=(CAT,), embeds=((3, 1),)),
    Inputs(lora="one", items=(CAT,)),
]


def digests(inputs: Inputs) -> list[bytes]:
    return Request(0, [7] * 8, inputs=inputs).block_hashes(4)


def test_two_digests_are_equal_exactly_if_the_contents_are() -> None:
    """But for embeddings: with them a prompt is known by its rows, as in vLLM."""
    root = Prefix.root()
    blocks = [
        (content_of(root, [7] * 8, inputs)[last], digests(inputs)[block], bool(inputs.embeds))
        for inputs in DIFFERENT
        for block, last in enumerate((3, 7))
    ]
    for (one, digest, embeds), (other, other_digest, other_embeds) in combinations(blocks, 2):
        assert (digest == other_digest) is (one is other and embeds == other_embeds)


def test_equal_inputs_have_equal_digests() -> None:
    for inputs in DIFFERENT:
        again = Inputs(
            inputs.lora, inputs.lora_version, inputs.salt, inputs.items, tuple(inputs.embeds)
        )
        assert digests(again) == digests(inputs)
    assert digests(Inputs()) == Request(0, [7] * 8).block_hashes(4)


def test_an_item_decides_nothing_before_it_and_everything_after_it() -> None:
    plain, item = digests(TOKENS_ONLY), digests(Inputs(items=(Item("cat", 5, 1),)))
    assert plain[0] == item[0]
    assert plain[1] != item[1]


def test_the_same_item_at_another_place_of_the_next_block_is_another_prefix() -> None:
    far, near = Inputs(items=(Item("cat", 6, 2),)), Inputs(items=(Item("cat", 5, 3),))
    assert digests(far)[1] != digests(near)[1]


def test_an_embedding_takes_the_place_of_the_token() -> None:
    embedded = Inputs(embeds=((1, 5),))
    one, other = Request(0, [7, 8], inputs=embedded), Request(1, [7, 9], inputs=embedded)
    assert one.block_hashes(2) == other.block_hashes(2)
    assert one.block_hashes(2) != Request(2, [8, 8], inputs=embedded).block_hashes(2)
    assert one.block_hashes(2) != Request(3, [7, 0]).block_hashes(2)


def test_the_end_of_a_prompt_with_embeddings_counts() -> None:
    embedded = Inputs(embeds=((1, 5),))
    short, long = Request(0, [7] * 3, inputs=embedded), Request(1, [7] * 8, inputs=embedded)
    short.append_tokens([7] * 5)
    assert short.block_hashes(2)[0] == long.block_hashes(2)[0]
    assert not set(short.block_hashes(2)[1:]) & set(long.block_hashes(2))


def test_a_version_without_an_adapter_decides_nothing() -> None:
    assert digests(Inputs(lora_version=3)) == digests(TOKENS_ONLY)


def test_a_manager_finds_what_has_the_same_inputs_only() -> None:
    manager = KVCacheManager([Group("full", 4)], 200, max_model_len=64)
    for number, inputs in enumerate(DIFFERENT):
        request = Request(number, [number] * 4 + [7] * 4, inputs=inputs)
        assert manager.get_computed_blocks(request)[1] == 0
        assert manager.allocate_slots(request, 8)
        again = Request(100 + number, [*request.tokens, 8], inputs=inputs)
        assert manager.get_computed_blocks(again)[1] == 8


def test_a_manager_may_leave_inputs_out() -> None:
    class Unsalted(KVCacheManager):
        @staticmethod
        def key_inputs(inputs: Inputs) -> Inputs:
            return Inputs(inputs.lora, inputs.lora_version, None, inputs.items, inputs.embeds)

    manager = Unsalted([Group("full", 4)], 9, max_model_len=64).clone()
    assert manager.allocate_slots(Request(0, [7] * 8, inputs=Inputs(salt="one")), 8)
    assert manager.get_computed_blocks(Request(1, [7] * 9, inputs=Inputs(salt="two")))[1] == 8


def test_a_clone_goes_on_with_its_inputs() -> None:
    request = Request(0, [7] * 4, inputs=Inputs(salt="one"))
    request.block_hashes(4)
    twin = request.clone()
    twin.append_tokens([7] * 4)
    assert twin.block_hashes(4) == digests(Inputs(salt="one"))
    assert twin.inputs == request.inputs
