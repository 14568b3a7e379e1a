"""A run as data: a scope, and picks among its choices.  Drawn from a seed, replayed, shrunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from kvproof_spec.choices import FEATURES, KINDS, Choice, Scope
from kvproof_spec.config import Config, Group, Scheduling
from kvproof_stateful.target import Hello

GROUPS: tuple[tuple[Group, ...], ...] = (
    (Group("full", 4),),
    (Group("sliding", 4, 8),),
    (Group("full", 4), Group("sliding", 4, 8)),
    (Group("full", 2), Group("sliding", 2, 3)),
    (Group("full", 4), Group("sliding", 4, 32)),
)
"""The groups of a campaign that is given none, one of them a run."""

SAMPLES = (1, 2, 3)
"""Token ids that a step may sample; prompts are made of them too, so that they meet."""


SAMPLED = (2, 6, 12)
"""Tokens after which a request ends, where the target's own scheduler ends it."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One choice by numbers: its kind, its request, and an index into each domain."""

    kind: int
    request: int
    parameters: tuple[int, ...]

    def find(self, choices: Sequence[Choice]) -> Choice | None:
        """The choice meant, if it is enabled."""
        kind = KINDS[self.kind]
        for choice in choices:
            if choice.kind == kind and choice.request == self.request:
                return choice
        return None


def draw_pick(
    rng: Random, choices: Sequence[Choice], weight: Mapping[str, float]
) -> tuple[Choice, tuple[int, ...]]:
    """A choice by the weights of its kind, and an index into each of its domains."""
    weights = [weight[choice.kind] for choice in choices]
    rest = rng.random() * sum(weights)
    chosen = choices[-1]
    for choice, its_weight in zip(choices, weights, strict=True):
        rest -= its_weight
        if rest < 0:
            chosen = choice
            break
    return chosen, tuple([int(rng.random() * len(domain)) for domain in chosen.domains])


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a run is made of."""

    scope: Scope
    picks: tuple[Pick, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a campaign was asked to draw from: None leaves it to the seed."""

    groups: tuple[Group, ...] | None = None
    num_blocks: int | None = None
    features: frozenset[str] | None = None
    strict: bool = False


class ImpossibleConfig(ValueError):
    """What was asked for cannot be; the message says why and what can."""


def ask(hello: Hello, groups: str | None, features: str | None, num_blocks: int | None) -> Asked:
    """What is asked for in words, as on the command line; `ImpossibleConfig` if it cannot be."""
    parsed = parse_groups(groups) if groups else None
    named = parse_features(features, hello) if features else None
    if parsed:
        require_groups(parsed, named, hello)
    if num_blocks is not None and num_blocks < 2:
        raise ImpossibleConfig("--blocks counts the null block: 2 is the least")
    return Asked(groups=parsed, num_blocks=num_blocks, features=named)


def parse_features(text: str, hello: Hello) -> frozenset[str]:
    features = frozenset(part.strip() for part in text.split(","))
    unknown = sorted(features - FEATURES.keys())
    if unknown:
        raise ImpossibleConfig(f"no feature {', '.join(unknown)}; there are: {', '.join(FEATURES)}")
    missing = sorted(features - hello.features)
    if missing:
        raise ImpossibleConfig(f"target {hello.name} does not declare {', '.join(missing)}")
    return features


def require_groups(
    groups: tuple[Group, ...], features: frozenset[str] | None, hello: Hello
) -> None:
    """The kinds of the groups are those of the features, and the target has them."""
    kinds = frozenset[str](group.kind for group in groups)
    named = (features or frozenset()) & {"full", "sliding"}
    if named and named != kinds:
        raise ImpossibleConfig(
            f"--groups has {', '.join(sorted(kinds))} groups, --features names "
            f"{', '.join(sorted(named))}"
        )
    missing = sorted(kinds - hello.features)
    if missing:
        raise ImpossibleConfig(f"target {hello.name} has no {', '.join(missing)} groups")


DrawPrompts = Callable[[Random, int], tuple[tuple[int, ...], ...]]  # from tokens of a block


def draw_scope(
    rng: Random, hello: Hello, asked: Asked, draw_prompts: DrawPrompts | None = None
) -> Scope:
    """A scope within what the target declares and the campaign asks for."""
    groups = asked.groups or rng.choice(possible_groups(hello, asked))
    features = draw_features(rng, hello, asked, groups)
    unit = max(group.block_size for group in groups)
    max_requests = rng.randint(2, 5) if not hello.observed else rng.randint(4, 9)
    prompts = (draw_prompts or families_of_prompts)(rng, unit)
    config = Config(
        groups=groups,
        num_blocks=asked.num_blocks or draw_pool(rng, groups, prompts, hello.observed),
        caching="uncached" not in features,
        max_model_len=max(128, 32 * unit),
        defers_returns={"async", "external"} <= features or rng.random() < 0.3,
        ordering="strict" if asked.strict else "stream",
        worker="worker" in features,
    )
    if asked.strict:
        config = replace(config, defers_returns=True)
    if hello.observed:
        config = with_scheduling(rng, config, features)
    return Scope(
        config=config,
        features=features,
        prompts=prompts,
        samples=SAMPLES,
        max_requests=max_requests,
        chunk=unit * rng.choice((1, 2, 4)),
        max_request_tokens=12 * unit,
        priorities=(0, 1, 9) if hello.observed else (0,),
        max_sampled=SAMPLED if hello.observed else (None,),
    )


def possible_groups(hello: Hello, asked: Asked) -> list[tuple[Group, ...]]:
    wanted = hello.features if asked.features is None else asked.features
    kinds = {kind for kind in ("full", "sliding") if kind in wanted} or {"full"}
    fitting = [groups for groups in GROUPS if {group.kind for group in groups} <= kinds]
    if asked.features is not None:
        fitting = [groups for groups in fitting if {group.kind for group in groups} == kinds]
    return fitting


def draw_features(
    rng: Random, hello: Hello, asked: Asked, groups: tuple[Group, ...]
) -> frozenset[str]:
    """The group kinds, and the features asked for; else each with its own chance."""
    kinds = frozenset(group.kind for group in groups)
    if asked.features is not None:
        return (asked.features - {"full", "sliding"}) | kinds
    optional = sorted(hello.features - {"full", "sliding"})
    chance = {"uncached": 0.3, "worker": 0.9}
    drawn = {feature for feature in optional if rng.random() < chance.get(feature, 0.75)}
    always = {"preempt", "worker"} if hello.observed else set()  # its scheduler's own doing
    return kinds | drawn | always


def families_of_prompts(rng: Random, unit: int) -> tuple[tuple[int, ...], ...]:
    """A few families of prompts with common prefixes, on both sides of block borders."""
    prompts = []
    for _ in range(2):
        trunk = [rng.choice(SAMPLES) for _ in range(10 * unit)]
        for _ in range(3):
            length = rng.randint(1, rng.choice((2, 4, 10))) * unit + rng.randint(-1, 2)
            cut = rng.randint(0, length)
            tail = [rng.choice(SAMPLES) for _ in range(length - cut)]
            prompts.append(tuple(trunk[:cut] + tail)[: 10 * unit])
    return tuple(prompt or (1,) for prompt in prompts)


def draw_pool(
    rng: Random, groups: tuple[Group, ...], prompts: Sequence[Sequence[int]], observed: bool
) -> int:
    """Blocks with the null block: from one long request's need to plenty; mostly scarce.

    A scheduler of its own would wait for ever for a request that never fits.
    """
    longest = max(len(prompt) for prompt in prompts) + (max(SAMPLED) if observed else 0)
    one = sum(group.blocks_for(longest) for group in groups)
    if observed:
        return 1 + rng.choice((one, one, one + 1, one + 2, one * 3 // 2))
    return 2 + rng.choice((one // 2, one, one, one + 1, one * 3 // 2, one * 3))


def with_scheduling(rng: Random, config: Config, features: frozenset[str]) -> Config:
    asynchronous = "async" in features
    scheduling = Scheduling(
        policy=rng.choice(("fcfs", "priority", "priority", "priority")),
        asynchronous=asynchronous,
        max_num_seqs=rng.choice((4, 8)),
        max_num_batched_tokens=rng.choice((8, 16, 32, 64)),
        long_prefill_token_threshold=rng.choice((0, 4, 4, 8, 8)),
        whole_sequence_check=rng.random() < 0.1,
        stop_token=rng.choice((None, SAMPLES[0])),
    )
    return replace(
        config,
        scheduling=scheduling,
        defers_returns=asynchronous and rng.random() < 0.2,
    )


def parse_groups(text: str) -> tuple[Group, ...]:
    """`full:4,sliding:4:32`: kind, block size and, for a window, its length, in tokens."""
    groups = []
    for part in text.split(","):
        kind, *numbers = part.strip().split(":")
        try:
            sizes = [int(number) for number in numbers]
        except ValueError:
            sizes = []
        if kind == "full" and len(sizes) == 1 and sizes[0] > 0:
            groups.append(Group("full", sizes[0]))
        elif kind == "sliding" and len(sizes) == 2 and sizes[0] > 0 and sizes[1] > 1:
            groups.append(Group("sliding", sizes[0], sizes[1]))
        else:
            raise ImpossibleConfig(
                f"no group {part!r}: full:BLOCK_SIZE or sliding:BLOCK_SIZE:WINDOW is expected, "
                "in tokens, a window of more than one"
            )
    return tuple(groups)


def weights(rng: Random, observed: bool = False) -> dict[str, float]:
    """How often each kind of choice is taken in a run: as usual, or (swarm) off balance."""
    usual = AROUND_A_SCHEDULER if observed else WEIGHTS
    if rng.random() < 0.5:
        return dict(usual)
    return {kind: weight * rng.choice((0.1, 0.5, 1, 4)) for kind, weight in usual.items()}


WEIGHTS: dict[str, float] = {
    "submit": 3,
    "lookup": 3,
    "admit": 40,
    "admit external": 24,
    "load": 25,
    "extend": 6,
    "draft": 2.5,
    "issue": 5,
    "complete step": 5,
    "complete load": 2,
    "publish": 0.6,
    "trim": 0.5,
    "finish": 1,
    "preempt": 0.5,
    "abort": 0.25,
    "leave unissued": 0.3,
    "forget blocks": 0.2,
    "forget everything": 0.25,
}

AROUND_A_SCHEDULER: dict[str, float] = {
    "submit": 1.5,
    "issue": 5,
    "complete step": 5,
    "abort": 0.05,
}
