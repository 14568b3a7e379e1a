"""A manager without a scheduler, driven action by action.

What a scheduler would count is counted here: tokens known, computed and in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Forget,
    Issue,
    Lookup,
    Publish,
    Release,
    Store,
    Submit,
    Trim,
)
from kvproof_spec.answers import (
    Answer,
    Done,
    Forgotten,
    Granted,
    Hit,
    Issued,
    Refused,
    Returned,
    Snapshot,
    Trimmed,
)
from kvproof_spec.config import Config
from kvproof_spec.pages import Tables
from kvproof_spec.prefix import TOKENS_ONLY, Inputs
from kvproof_stateful.target import Hello


@dataclass(slots=True)
class Progress:
    """A request as a scheduler counts it, in tokens."""

    id: int
    tokens: list[int]
    inputs: Inputs = TOKENS_ONLY
    encoder_tokens: int = 0
    computed: int = 0
    in_flight: int = 0
    scheduled: int = 0
    issued: int = 0  # what is certain to be computed: the hit, and the steps issued
    drafts: tuple[int, ...] = ()
    hit: int = 0
    life: int = 0  # how often it has started anew
    admitted: bool = False
    loading: bool = False


@dataclass(frozen=True, slots=True)
class InFlight:
    """A row of an issued step."""

    request: int
    life: int
    tokens: int
    drafts: tuple[int, ...]


class DrivenTarget(ABC):
    """The bookkeeping of a scheduler around a manager that has none."""

    config: Config

    @abstractmethod
    def hello(self) -> Hello: ...

    @abstractmethod
    def snapshot(self) -> Snapshot | None: ...

    @abstractmethod
    def build(self, config: Config) -> None:
        """A new manager."""

    def reset(self, config: Config) -> None:
        self.config = config
        self.requests: dict[int, Progress] = {}
        self.steps: list[tuple[int, list[InFlight]]] = []
        self.issued = 0
        self.transferring: set[int] = set()  # requests whose unordered store or load is under way
        self.build(config)

    def perform(self, action: Action) -> Answer:
        match action:
            case Submit():
                progress = Progress(
                    action.request, list(action.symbols), action.inputs, action.encoder_tokens
                )
                self.requests[action.request] = progress
                self.submit(progress)
                return Done()
            case Lookup():
                hit = self.lookup(self.requests[action.request])
                self.requests[action.request].hit = hit.tokens
                return hit
            case Allocate():
                return self._allocate(self.requests[action.request], action)
            case Issue():
                return self._issue()
            case CompleteStep():
                return self._complete_step(action)
            case CompleteLoad():
                loading = self.requests.get(action.request)
                if loading is None:
                    return self._transfer_ended(action.request)
                return self._complete_load(loading, action.tokens)
            case Store():
                self.transferring.add(action.request)
                return Done()
            case CompleteStore():
                return self._transfer_ended(action.request)
            case Publish():
                self.publish(self.requests[action.request], action.tokens)
                return Done()
            case Trim():
                progress = self.requests[action.request]
                self.trim(progress, progress.computed - progress.in_flight)
                return Trimmed(self.tables(action.request))
            case Release():
                return self._release(self.requests[action.request], action.reason)
            case Forget():
                return self.forget(action.blocks)

    def _allocate(self, progress: Progress, action: Allocate) -> Answer:
        answer = self.allocate(progress, action)
        if isinstance(answer, Granted):
            progress.issued = progress.computed + progress.hit
            total = progress.issued + action.external
            progress.computed = min(total, self.config.max_model_len)
            progress.scheduled, progress.drafts = action.new, action.drafts
            progress.admitted, progress.loading = True, action.unordered
        if isinstance(answer, Granted | Refused):
            progress.hit = 0
        return answer

    def _issue(self) -> Issued:
        rows = []
        for progress in self.requests.values():
            if progress.scheduled:
                rows.append(
                    InFlight(progress.id, progress.life, progress.scheduled, progress.drafts)
                )
                progress.computed += progress.scheduled
                progress.in_flight += progress.scheduled
                progress.scheduled, progress.drafts = 0, ()
        self.steps.append((self.issued, rows))
        self.issued += 1
        return self.issue([self.requests[row.request] for row in rows])

    def _complete_step(self, action: CompleteStep) -> Returned:
        step, rows = self.steps.pop(0)
        outputs = {output.request: output for output in action.outputs}
        deferred = self.step_completed(step)
        for row in rows:
            progress = self.requests.get(row.request)
            if progress is None:
                continue
            current = progress.life == row.life
            progress.in_flight -= row.tokens if current else 0
            output = outputs.get(row.request)
            if output is not None:
                rejected = len(row.drafts) - output.accepted
                progress.computed -= rejected if current else 0
                self.sampled(progress, [*row.drafts[: output.accepted], output.symbol])
        return Returned(deferred)

    def _complete_load(self, progress: Progress, tokens: int) -> Done:
        progress.loading = False
        if tokens == 0:
            self.free(progress, None, until_transferred=False)
            self._start_anew(progress)
        else:
            if self.config.clears and tokens < progress.computed:
                self.clear_from(progress, tokens)
            progress.computed = tokens - (tokens == len(progress.tokens))
        return Done()

    def _transfer_ended(self, request_id: int) -> Returned:
        self.transferring.discard(request_id)
        return Returned(self.transfer_ended(request_id))

    def _release(self, progress: Progress, reason: str) -> Returned:
        defer = self.config.defers_returns and progress.in_flight and self.steps
        if progress.loading:
            self.transferring.add(progress.id)
        transferring = progress.id in self.transferring
        deferred = self.free(progress, self.steps[-1][0] if defer else None, transferring)
        if reason == "preempt":
            self._start_anew(progress)
        else:
            del self.requests[progress.id]
        return Returned(deferred)

    def _start_anew(self, progress: Progress) -> None:
        progress.computed = progress.in_flight = progress.scheduled = progress.hit = 0
        progress.drafts, progress.admitted, progress.loading = (), False, False
        progress.life += 1

    @abstractmethod
    def submit(self, progress: Progress) -> None:
        """A request arrives."""

    @abstractmethod
    def lookup(self, progress: Progress) -> Hit: ...

    @abstractmethod
    def allocate(self, progress: Progress, action: Allocate) -> Answer:
        """Granted, Refused or Raised; `progress` as it was before."""

    def issue(self, rows: list[Progress]) -> Issued:
        """A step was issued with these requests."""
        return Issued()

    @abstractmethod
    def step_completed(self, step: int) -> tuple[int, ...] | None:
        """Give back what was in use until `step`; what is still kept back."""

    def sampled(self, progress: Progress, symbols: list[int]) -> None:
        """Tokens that the request now knows."""
        progress.tokens += symbols

    @abstractmethod
    def publish(self, progress: Progress, tokens: int) -> None: ...

    @abstractmethod
    def trim(self, progress: Progress, processed: int) -> None: ...

    @abstractmethod
    def clear_from(self, progress: Progress, tokens: int) -> None:
        """A load has left the blocks after `tokens` tokens unwritten: clear them."""

    @abstractmethod
    def transfer_ended(self, request_id: int) -> tuple[int, ...] | None:
        """The request's store, or the load it has left behind, ends; what is still kept back."""

    @abstractmethod
    def free(
        self, progress: Progress, in_use_until: int | None, until_transferred: bool
    ) -> tuple[int, ...] | None:
        """Free the blocks, at once or when a step and a transfer have ended; what is kept back."""

    @abstractmethod
    def forget(self, blocks: tuple[int, ...] | None) -> Forgotten: ...

    @abstractmethod
    def tables(self, request_id: int) -> Tables: ...
