"""The worker's rows against the manager's tables."""

from __future__ import annotations

import pytest

from kvproof_reference import KVCacheManager, Request, Worker
from kvproof_spec.config import Group


def test_a_running_row_grows_and_keeps_what_left_the_window() -> None:
    manager = KVCacheManager([Group("sliding", 4, 8)], 8, max_model_len=64)
    worker, request = Worker(), Request(0, range(12))
    assert manager.allocate_slots(request, 12)
    worker.replace(0, manager.get_block_ids(0))
    request.num_computed_tokens = 12
    request.append_tokens([12])
    granted = manager.allocate_slots(request, 1)
    assert granted is not None
    worker.append(0, granted)
    assert manager.get_block_ids(0) == ((0, 2, 3, 4),)
    assert worker.row(0) == ((1, 2, 3, 4),)


def test_a_resumed_row_is_replaced_as_a_whole() -> None:
    worker = Worker()
    worker.replace(0, [[1, 2], [3]])
    worker.replace(0, [[4], [5]])
    assert worker.row(0) == ((4,), (5,))


def test_a_removed_row_is_gone() -> None:
    worker = Worker()
    worker.replace(0, [[1]])
    worker.remove(0)
    with pytest.raises(KeyError):
        worker.row(0)


def test_a_cloned_worker_has_rows_of_its_own() -> None:
    worker = Worker()
    worker.replace(0, [[1]])
    twin = worker.clone()
    twin.append(0, [[2]])
    assert (worker.row(0), twin.row(0)) == (((1,),), ((1, 2),))
