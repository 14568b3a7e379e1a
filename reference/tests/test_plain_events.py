"""The event stream: replayed, it gives the keys that a lookup would find."""

from __future__ import annotations

from collections.abc import Iterable

from kvproof_reference import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVCacheManager,
    Request,
)
from kvproof_spec.config import Group
from kvproof_spec.prefix import Inputs

FULL = Group("full", 4)


def make(num_blocks: int, *groups: Group, partial_boundary: int | None = None) -> KVCacheManager:
    return KVCacheManager(
        groups or (FULL,),
        num_blocks,
        max_model_len=64,
        partial_boundary=partial_boundary,
        enable_kv_cache_events=True,
    )


def replayed(events: Iterable[KVCacheEvent]) -> set[tuple[int, bytes]]:
    """The keys (group, digest) that a consumer of the stream takes to be findable."""
    found: set[tuple[int, bytes]] = set()
    for event in events:
        match event:
            case BlockStored():
                found |= {(event.group_idx, digest) for digest in event.block_hashes}
            case BlockRemoved():
                found -= {(event.group_idx, digest) for digest in event.block_hashes}
            case AllBlocksCleared():
                found.clear()
    return found


def test_publication_is_announced_with_its_tokens_and_what_it_follows() -> None:
    manager, request = make(8), Request(0, range(13), inputs=Inputs(lora="a"))
    one, two, three = request.block_hashes(4)
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    manager.allocate_slots(request, 4)
    assert manager.take_events() == [
        BlockStored((one, two), None, tuple(range(8)), 4, "a", 0),
        BlockStored((three,), two, (8, 9, 10, 11), 4, "a", 0),
    ]
    assert manager.take_events() == []


def test_removal_is_announced_when_the_last_block_of_a_key_goes() -> None:
    """The key that vLLM 0.32 says is gone is still found (vLLM #55092)."""
    manager, first, second = make(8), Request(0, range(4)), Request(1, range(4))
    (key,) = first.block_hashes(4)
    manager.allocate_slots(first, 4)
    manager.allocate_slots(second, 4)
    manager.take_events()
    manager.evict_blocks([1])
    assert manager.take_events() == []
    assert manager.get_computed_blocks(Request(2, range(5))) == (((2,),), 4)
    manager.evict_blocks([2])
    assert manager.take_events() == [BlockRemoved((key,), 0)]


def test_what_is_handed_out_again_is_announced_before_what_it_becomes() -> None:
    manager, first, second = make(2), Request(0, range(4)), Request(1, range(4, 8))
    manager.allocate_slots(first, 4)
    manager.free(first)
    manager.take_events()
    manager.allocate_slots(second, 4)
    old, new = first.block_hashes(4), second.block_hashes(4)
    assert manager.take_events() == [
        BlockRemoved(tuple(old), 0),
        BlockStored(tuple(new), None, (4, 5, 6, 7), 4, None, 0),
    ]


def test_a_window_announces_only_what_a_hit_can_need() -> None:
    manager, request = make(20, Group("full", 16), Group("sliding", 4, 5)), Request(0, range(16))
    manager.allocate_slots(request, 16)
    hashes, tokens = request.block_hashes(4), tuple(range(16))
    assert manager.take_events() == [
        BlockStored((hashes[3],), None, tokens, 16, None, 0),
        BlockStored((hashes[2],), hashes[1], (8, 9, 10, 11), 4, None, 0),
        BlockStored((hashes[3],), None, tokens, 4, None, 1),
    ]


def test_a_key_that_moves_to_a_copy_is_not_news() -> None:
    manager, request = make(20, FULL, Group("state", 4), partial_boundary=2), Request(0, range(7))
    hashes = request.block_hashes(2)
    manager.allocate_slots(request, 6)
    assert manager.take_events() == [
        BlockStored((hashes[1],), None, (0, 1, 2, 3), 4, None, 0),
        BlockStored((hashes[2],), hashes[1], (4, 5), 2, None, 0),
        BlockStored((), None, (0, 1, 2, 3), 4, None, 1),
        BlockStored((hashes[2],), hashes[1], (4, 5), 2, None, 1),
    ]
    request.num_computed_tokens = 6
    manager.allocate_slots(request, 1)
    assert manager.take_events() == []


def test_a_block_that_becomes_full_loses_its_key_and_gets_it_again_as_a_further_one() -> None:
    manager, request = make(20, FULL, Group("state", 4), partial_boundary=2), Request(0, range(7))
    manager.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    request.append_tokens([7])
    manager.take_events()
    manager.allocate_slots(request, 2)
    hashes = request.block_hashes(2)
    assert manager.take_events() == [
        BlockRemoved((hashes[2],), 0),
        BlockStored((hashes[3],), hashes[1], (4, 5, 6, 7), 4, None, 0),
        BlockStored((hashes[2],), hashes[1], (4, 5), 2, None, 0),
        BlockStored((hashes[3],), hashes[1], (4, 5, 6, 7), 4, None, 1),
    ]


def test_a_reset_is_announced_when_it_is_done() -> None:
    manager, request = make(8), Request(0, range(4))
    manager.allocate_slots(request, 4)
    manager.take_events()
    assert not manager.reset_prefix_cache()
    assert manager.take_events() == []
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_the_stream_replayed_gives_the_keys_of_the_index() -> None:
    manager = make(12, FULL, Group("sliding", 4, 8))
    events = []
    for number in range(30):
        request = Request(number, [*range(number % 3 * 4), *[number] * 5])
        hits, tokens = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - tokens, tokens, hits)
        manager.evict_blocks([number % 11 + 1])
        manager.free(request)
        events += manager.take_events()
        assert replayed(events) == set(manager.block_pool.index)
    assert {type(event) for event in events} == {BlockStored, BlockRemoved}


def test_nothing_is_recorded_unless_asked_for() -> None:
    manager = KVCacheManager([FULL], 8, max_model_len=64)
    manager.allocate_slots(Request(0, range(4)), 4)
    manager.evict_blocks([1])
    assert manager.take_events() == []
    assert manager.block_pool.events is None


def test_a_clone_has_events_of_its_own() -> None:
    manager = make(8)
    manager.allocate_slots(Request(0, range(4)), 4)
    twin = manager.clone()
    assert twin.take_events() == manager.clone().take_events() != []
    twin.evict_blocks([1])
    assert len(manager.take_events()) == len(twin.take_events()) == 1
