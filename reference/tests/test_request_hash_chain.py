"""Digests of a request's prefixes."""

from __future__ import annotations

from hashlib import sha256

from kvproof_reference.request import ROOT_DIGEST, Request


def test_a_digest_covers_the_root_and_all_tokens_so_far_as_four_little_endian_bytes() -> None:
    first = ROOT_DIGEST + bytes([7, 0, 0, 0]) + bytes([0, 1, 0, 0])
    second = first + bytes([9, 0, 0, 0]) + bytes([9, 0, 0, 0])
    digests = [sha256(first).digest(), sha256(second).digest()]
    assert Request(0, [7, 256, 9, 9, 5]).block_hashes(2) == digests


def test_equal_blocks_after_different_prefixes_have_different_digests() -> None:
    one, other = Request(0, [1, 2, 3, 4]), Request(1, [1, 9, 3, 4])
    assert one.block_hashes(2)[1] != other.block_hashes(2)[1]


def test_the_chain_grows_with_the_tokens_and_each_block_is_named_once() -> None:
    named = []

    def counting(digest: bytes) -> bytes:
        named.append(digest)
        return digest[:1]

    request = Request(0, [1, 2, 3])
    assert len(request.block_hashes(2, counting)) == 1
    request.append_tokens([4, 5])
    assert request.block_hashes(2, counting) == [digest[:1] for digest in named]
    assert named == Request(1, [1, 2, 3, 4]).block_hashes(2)


def test_a_big_block_has_the_digest_of_its_last_hash_block() -> None:
    """The prefix decides, so groups of different block sizes share one chain."""
    tokens = list(range(16))
    assert Request(0, tokens[:8]).block_hashes(4)[-1] == Request(1, tokens).block_hashes(4)[1]


def test_a_cloned_request_grows_on_its_own() -> None:
    request = Request(0, [1, 2, 3], num_prompt_tokens=2)
    twin = request.clone()
    twin.append_tokens([4])
    assert (request.num_tokens, twin.num_tokens) == (3, 4)
    assert (len(request.block_hashes(2)), len(twin.block_hashes(2))) == (1, 2)
    assert twin.num_prompt_tokens == 2
