"""The plain manager of kvproof_reference, and its worker."""

from __future__ import annotations

from typing import ClassVar

import kvproof_stateful
from kvproof_reference.block_pool import BlockPool
from kvproof_reference.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.worker import Worker
from kvproof_spec.actions import Allocate
from kvproof_spec.answers import (
    Answer,
    Event,
    Forgotten,
    Granted,
    Hit,
    Issued,
    Raised,
    Refused,
    SentRow,
    Snapshot,
)
from kvproof_spec.choices import FEATURES
from kvproof_spec.config import Config
from kvproof_spec.pages import Copy, Tables
from kvproof_spec.policies import CORRECTIONS
from kvproof_stateful.target import Hello
from kvproof_stateful.targets.driven import DrivenTarget, Progress
from kvproof_stateful.targets.plain_pool import PlainPool


class PlainTarget(DrivenTarget):
    """Driven: every allocation, step and release is asked for."""

    name: ClassVar[str] = "plain"
    manager_class: ClassVar[type[KVCacheManager]] = KVCacheManager
    worker_class: ClassVar[type[Worker]] = Worker

    def hello(self) -> Hello:
        return Hello(
            name=self.name,
            version=kvproof_stateful.__version__,
            features=frozenset(FEATURES),
            claims=(
                *("I1", "I2", "I3", "I4", "I5", "I6"),
                *("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R10"),
            ),
            corrections=frozenset(CORRECTIONS),
        )

    def make_pool(self, num_blocks: int) -> PlainPool:
        return PlainPool(self.manager_class.block_pool_class(num_blocks))

    def build(self, config: Config) -> None:
        self.manager = self.manager_class(
            config.groups,
            config.num_blocks,
            max_model_len=config.max_model_len,
            enable_caching=config.caching,
            max_in_flight_tokens=config.max_in_flight_tokens,
            partial_boundary=config.partial_boundary,
            enable_kv_cache_events=config.events,
            clears=config.clears,
        )
        self.worker = self.worker_class()
        self.known: dict[int, Request] = {}
        self.unsent: dict[int, list[Tables]] = {}  # ids granted since a row was sent, by request

    def submit(self, progress: Progress) -> None:
        self.known[progress.id] = Request(progress.id, progress.tokens, inputs=progress.inputs)

    def _request(self, progress: Progress) -> Request:
        request = self.known[progress.id]
        request.num_computed_tokens = progress.computed
        request.num_in_flight_tokens = progress.in_flight
        return request

    def lookup(self, progress: Progress) -> Hit:
        tables, tokens = self.manager.get_computed_blocks(self._request(progress))
        self.hit_tables = tables
        return Hit(tokens, tables)

    def allocate(self, progress: Progress, action: Allocate) -> Answer:
        before = len(self.manager.pending_copies)
        try:
            new = self.manager.allocate_slots(
                self._request(progress),
                action.new,
                progress.hit,
                None if progress.admitted else self.hit_tables,
                num_lookahead_tokens=action.lookahead,
                num_external_computed_tokens=action.external,
                delay_cache_blocks=action.unordered,
                full_sequence_must_fit=action.whole_sequence,
                reserved_blocks=action.headroom,
                num_encoder_tokens=0 if progress.admitted else progress.encoder_tokens,
            )
        except Exception as error:
            return Raised(f"{type(error).__name__}: {error}")
        if new is None:
            return Refused(self.tables(progress.id))
        if progress.id in self.unsent:
            self.unsent[progress.id].append(new)
        copies = tuple(Copy(*copy) for copy in self.manager.pending_copies[before:])
        return Granted(self.tables(progress.id), new, copies)

    def issue(self, rows: list[Progress]) -> Issued:
        copies = tuple(Copy(*copy) for copy in self.manager.take_block_copies())
        cleared = tuple(self.manager.take_new_block_ids()) if self.config.clears else None
        self.manager.new_step_starts()
        return Issued(self._rows(rows), copies, cleared)

    def _rows(self, rows: list[Progress]) -> tuple[SentRow, ...] | None:
        sent = []
        if not self.config.worker:
            return None
        for progress in rows:
            if progress.id in self.unsent:
                for new in self.unsent[progress.id]:
                    self.worker.append(progress.id, new)
            else:
                self.worker.replace(progress.id, self.tables(progress.id))
            self.unsent[progress.id] = []
            sent.append(SentRow(progress.id, self.worker.row(progress.id)))
        return tuple(sent)

    def step_completed(self, step: int) -> tuple[int, ...]:
        self.manager.step_completed(step)
        return self.manager.deferred_blocks()

    def sampled(self, progress: Progress, symbols: list[int]) -> None:
        super().sampled(progress, symbols)
        self.known[progress.id].append_tokens(symbols)

    def publish(self, progress: Progress, tokens: int) -> None:
        self.manager.cache_blocks(self._request(progress), tokens)

    def trim(self, progress: Progress, processed: int) -> None:
        self.manager.remove_skipped_blocks(progress.id, processed)

    def clear_from(self, progress: Progress, tokens: int) -> None:
        self.manager.record_blocks_for_zeroing(progress.id, tokens)

    def transfer_ended(self, request_id: int) -> tuple[int, ...]:
        self.manager.store_completed(request_id)
        return self.manager.deferred_blocks()

    def free(
        self, progress: Progress, in_use_until: int | None, until_transferred: bool
    ) -> tuple[int, ...]:
        request = self._request(progress)
        if progress.scheduled:
            self.manager.withdraw(request, progress.issued)
        self.manager.free(request, in_use_until, until_transferred)
        if self.unsent.pop(progress.id, None) is not None:
            self.worker.remove(progress.id)
        return self.manager.deferred_blocks()

    def forget(self, blocks: tuple[int, ...] | None) -> Forgotten:
        if blocks is None:
            return Forgotten(self.manager.reset_prefix_cache())
        self.manager.evict_blocks(blocks)
        return Forgotten(True)

    def tables(self, request_id: int) -> Tables:
        return self.manager.get_block_ids(request_id)

    def snapshot(self) -> Snapshot:
        pool = self.manager.block_pool
        return Snapshot(
            free_order=pool.free_order(),
            free_blocks=pool.get_num_free_blocks(),
            reference_counts=pool.counts(),
            tables=tuple((request, self.tables(request)) for request in self.requests),
            keys=tuple(sorted((key[0], tuple(copies)) for key, copies in pool.index.items())),
            findable=shown_findable(pool) if self.config.events else None,
            events=shown_events(self.manager),
        )


def shown_findable(pool: BlockPool) -> tuple[tuple[int, str], ...]:
    """The keys that a lookup finds, by name."""
    return tuple((group, digest.hex()) for group, digest in pool.index)


def shown_events(manager: KVCacheManager) -> tuple[Event, ...]:
    """What the manager has announced since the last call."""
    return tuple(map(shown_event, manager.take_events()))


def shown_event(event: KVCacheEvent) -> Event:
    match event:
        case BlockStored():
            parent = event.parent_block_hash
            return Event(
                "stored",
                event.group_idx,
                tuple(digest.hex() for digest in event.block_hashes),
                None if parent is None else parent.hex(),
            )
        case BlockRemoved():
            keys = tuple(digest.hex() for digest in event.block_hashes)
            return Event("removed", event.group_idx, keys)
        case AllBlocksCleared():
            return Event("cleared")
