"""A campaign in several processes: each has its share of the runs, the counts are added up."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from multiprocessing.sharedctypes import SynchronizedArray

from kvproof_stateful.campaign import Budget, Campaign, Result
from kvproof_stateful.expectations import KnownViolation
from kvproof_stateful.loading import load_target
from kvproof_stateful.plan import Asked
from kvproof_stateful.running import Judging, time_limit
from kvproof_stateful.target import TargetFailed

POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""What a worker has to report what it found, once it was told to stop."""


@dataclass(frozen=True)
class Share:
    """One worker's part of a campaign, as data."""

    target: str
    judging: Judging
    asked: Asked
    budget: Budget
    seed: int
    known: tuple[KnownViolation, ...]
    action_seconds: float
    worker: int
    workers: int


_counts: SynchronizedArray[int] | None = None  # judged actions and runs of each; then: stop


def _start(counts: SynchronizedArray[int]) -> None:
    global _counts
    _counts = counts


def _work(share: Share) -> Result:
    def publish(result: Result, seconds: float) -> None:
        if _counts is not None:
            _counts[2 * share.worker] = result.coverage.lines
            _counts[2 * share.worker + 1] = result.coverage.runs
            if _counts[2 * share.workers]:
                raise KeyboardInterrupt

    campaign = Campaign(
        target=load_target(share.target)[0],
        judging=share.judging,
        asked=share.asked,
        budget=share.budget,
        seed=share.seed,
        known=share.known,
        action_seconds=share.action_seconds,
        first_run=share.worker,
        stride=share.workers,
        progress=publish,
    )
    with time_limit(share.action_seconds):
        return campaign.run()


def run_in_workers(campaign: Campaign, target: str, workers: int) -> Result:
    """Run `campaign` in `workers` processes; an interrupt ends all and keeps what they found."""
    context = get_context("spawn")
    counts = context.Array("q", 2 * workers + 1)
    with ProcessPoolExecutor(workers, context, _start, (counts,)) as pool:
        # Workers are told to stop; a Ctrl-C of the terminal must not reach them by itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = [pool.submit(_work, share) for share in shares(campaign, target, workers)]
        interrupted = _wait(campaign, futures, counts)
    result = Result(interrupted=interrupted)
    for future in futures:
        try:
            result.merge(future.result())
        except BrokenProcessPool:
            result.failure = result.failure or "a worker process died without an answer"
        except TargetFailed as failure:
            result.failure = result.failure or str(failure)
    return result


def shares(campaign: Campaign, target: str, workers: int) -> Iterator[Share]:
    actions = campaign.budget.actions
    for worker in range(workers):
        part = None if actions is None else (actions + worker) // workers
        yield Share(
            target=target,
            judging=campaign.judging,
            asked=campaign.asked,
            budget=replace(campaign.budget, actions=part),
            seed=campaign.seed,
            known=campaign.known,
            action_seconds=campaign.action_seconds,
            worker=worker,
            workers=workers,
        )


def _wait(
    campaign: Campaign, futures: list[Future[Result]], counts: SynchronizedArray[int]
) -> bool:
    """Until all are done; whether it was interrupted, of which the workers are told."""
    started, stopped = time.monotonic(), 0.0
    while True:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if not wait(futures, timeout=POLL_SECONDS).not_done:
                return bool(stopped)
            if stopped and time.monotonic() - stopped > GRACE_SECONDS:
                for process in active_children():
                    process.kill()
            so_far = Result()
            so_far.coverage.lines = sum(counts[:-1:2])
            so_far.coverage.runs = sum(counts[1::2])
            campaign.progress(so_far, time.monotonic() - started)
        except KeyboardInterrupt:
            stopped = stopped or time.monotonic()
            counts[len(counts) - 1] = 1
