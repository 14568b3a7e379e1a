"""A run as data: a scope, and picks among its choices.  Drawn from a seed, replayed, shrunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from kvproof_spec.choices import FEATURES, KINDS, Choice, Scope
from kvproof_spec.config import KINDS as GROUP_KINDS
from kvproof_spec.config import Config, Group, Kind, Scheduling
from kvproof_spec.prefix import TOKENS_ONLY, Inputs, Item
from kvproof_stateful.target import Hello

GROUPS: tuple[tuple[Group, ...], ...] = (
    (Group("full", 4),),
    (Group("full", 2),),
    (Group("full", 4, drafter=True),),
    (Group("sliding", 4, 8),),
    (Group("full", 4), Group("sliding", 4, 8)),
    (Group("full", 2), Group("sliding", 2, 3)),
    (Group("full", 4), Group("sliding", 4, 32)),
    (Group("full", 4), Group("sliding", 4, 8), Group("sliding", 4, 12)),
    (Group("full", 8), Group("sliding", 4, 6)),
    (Group("full", 4), Group("sliding", 8, 12)),
    (Group("full", 4, drafter=True), Group("sliding", 4, 8, drafter=True)),
    (Group("full", 8), Group("sliding", 4, 8, drafter=True)),
    (Group("full", 4), Group("chunked", 4, 8)),
    (Group("full", 4), Group("chunked", 4, 8), Group("sliding", 4, 8)),
    (Group("full", 4, drafter=True), Group("chunked", 4, 8)),
    (Group("state", 4),),
    (Group("full", 4), Group("state", 4)),
    (Group("full", 4), Group("state", 4), Group("state", 4)),
    (Group("full", 8), Group("state", 4)),
    (Group("full", 4, drafter=True), Group("state", 4)),
    (Group("full", 8, drafter=True), Group("state", 4)),
    (Group("full", 4), Group("sliding", 4, 8), Group("state", 4)),
    (Group("full", 4), Group("chunked", 4, 8), Group("state", 4)),
    (Group("full", 4), Group("cross", 4)),
    (Group("full", 8), Group("cross", 4)),
    (Group("full", 4, drafter=True), Group("cross", 4)),
    (Group("full", 4), Group("sliding", 4, 8), Group("cross", 4)),
    (Group("full", 4), Group("chunked", 4, 8), Group("cross", 4)),
    (Group("full", 4), Group("state", 4), Group("cross", 4)),
)
"""The groups of a campaign that is given none, one of them a run."""

LAYOUT = frozenset((*GROUP_KINDS, "mixed", "drafter"))
"""The features that are the groups' own."""

INPUTS = ("lora", "lora-version", "multimodal", "embeds", "salt")
"""The features that decide content beside the token ids."""

SAMPLES = (1, 2, 3)
"""Token ids that a step may sample; prompts are made of them too, so that they meet."""


PATIENCE = 3
"""Steps a token: one computes it, and two may be in flight when its request is preempted."""

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
    """What a campaign was asked to draw from: None leaves it to the seed.

    Of the `features` the `newest` is in every run: the groups have it, or room for it.
    """

    groups: tuple[Group, ...] | None = None
    num_blocks: int | None = None
    features: frozenset[str] | None = None
    newest: str | None = None
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
    named = (features or frozenset()) & frozenset(GROUP_KINDS)
    if named and named != kinds:
        raise ImpossibleConfig(
            f"--groups has {', '.join(sorted(kinds))} groups, --features names "
            f"{', '.join(sorted(named))}"
        )
    missing = sorted(layout_of(groups) - hello.features)
    if missing:
        raise ImpossibleConfig(f"target {hello.name} has no {', '.join(missing)} groups")


DrawPrompts = Callable[[Random, int], tuple[tuple[int, ...], ...]]  # from tokens of a block


def draw_scope(
    rng: Random, hello: Hello, asked: Asked, draw_prompts: DrawPrompts | None = None
) -> Scope:
    """A scope within what the target declares and the campaign asks for."""
    groups = asked.groups or rng.choice(possible_groups(hello, asked))
    features = draw_features(rng, hello, asked, groups)
    if asked.strict:
        features -= {"partial"}  # a copy's ends are given back when its step is issued
    unit = max(group.block_size for group in groups)
    max_requests = rng.randint(2, 5) if not hello.observed else rng.randint(4, 9)
    prompts = (draw_prompts or families_of_prompts)(rng, unit)
    partial = "partial" in features
    config = Config(
        groups=groups,
        num_blocks=asked.num_blocks or draw_pool(rng, groups, prompts, hello.observed),
        caching="uncached" not in features,
        max_model_len=max(128, 32 * unit),
        defers_returns={"async", "external"} <= features or rng.random() < 0.3,
        ordering="strict" if asked.strict else "stream",
        worker="worker" in features,
        partial_boundary=min(group.block_size for group in groups) // 2 if partial else None,
        clears="clear" in features,
        events="events" in features,
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
        inputs=draw_inputs(rng, features, unit),
        encoder_tokens=tuple(range(1, 3 * unit)) if "cross" in features else (0,),
        transfers=draw_transfers(rng, features, prompts) if hello.observed else NO_TRANSFERS,
    )


NO_TRANSFERS = ((0, False, False),)


def draw_transfers(
    rng: Random, features: frozenset[str], prompts: Sequence[Sequence[int]]
) -> tuple[tuple[int, bool, bool], ...]:
    """Tokens that a connector has of a request, whether its load is unordered, and a store."""
    longest = max(len(prompt) for prompt in prompts)
    return NO_TRANSFERS + tuple(
        (
            rng.randint(1, longest) if "external" in features and rng.random() < 0.8 else 0,
            rng.random() < 0.6,
            "store" in features and rng.random() < 0.7,
        )
        for _ in range(4)
    )


def possible_groups(hello: Hello, asked: Asked) -> list[tuple[Group, ...]]:
    """Of the known groups those with only what is wanted, and all of it if it was asked for."""
    wanted = (hello.features if asked.features is None else asked.features) & LAYOUT
    if not wanted & set(GROUP_KINDS):
        wanted |= {"full"}
    fitting = [groups for groups in GROUPS if layout_of(groups) <= wanted]
    if asked.newest is not None:
        fitting = [groups for groups in fitting if has_room(groups, asked.newest)]
    elif asked.features is not None:
        fitting = [groups for groups in fitting if layout_of(groups) == wanted] or fitting
    if not fitting:
        raise ImpossibleConfig(f"no groups of {', '.join(sorted(wanted))} alone: name --groups")
    return fitting


def has_room(groups: tuple[Group, ...], feature: str) -> bool:
    """Can a run over these groups have the feature?"""
    if feature in LAYOUT:
        return feature in layout_of(groups)
    return feature not in impossible_with(groups)


def layout_of(groups: tuple[Group, ...]) -> frozenset[str]:
    """The features that these groups need."""
    found: set[str] = {group.kind for group in groups}
    found |= {"mixed"} if len({group.block_size for group in groups}) > 1 else set()
    found |= {"drafter"} if any(group.drafter for group in groups) else set()
    return frozenset(found)


def draw_features(
    rng: Random, hello: Hello, asked: Asked, groups: tuple[Group, ...]
) -> frozenset[str]:
    """What the groups need, and the features asked for; else each with its own chance."""
    layout = layout_of(groups)
    impossible = impossible_with(groups)
    if asked.features is not None:
        features = (asked.features - LAYOUT - (impossible if asked.newest else set())) | layout
    else:
        chance = {"uncached": 0.2, "worker": 0.9, "events": 0.25, **dict.fromkeys(INPUTS, 0.25)}
        optional = sorted(hello.features - LAYOUT - impossible)
        drawn = {feature for feature in optional if rng.random() < chance.get(feature, 0.75)}
        always = {"preempt", "worker"} if hello.observed else set()  # its scheduler's own doing
        features = layout | drawn | always
    if "cross" in layout:
        features |= {"uncached"}
    if "uncached" in features:
        features -= {"partial"}
    return features


def impossible_with(groups: tuple[Group, ...]) -> frozenset[str]:
    """The features that make no sense with these groups."""
    kinds = layout_of(groups)
    divides = kinds >= {"full", "state"} and not kinds & {"sliding", "chunked"}
    impossible = set() if divides else {"partial"}
    if "cross" in kinds:  # which is without prefix caching
        impossible |= {"external", "abort-loading", "forget", "publish", "events", *INPUTS}
    return frozenset(impossible)


def draw_inputs(rng: Random, features: frozenset[str], unit: int) -> tuple[Inputs, ...]:
    """Inputs that are equal, or differ in one dimension or more."""
    drawn = []
    for _ in range(4 if features & set(INPUTS) else 1):
        lora = rng.choice((None, "a", "b")) if "lora" in features else None
        if "lora-version" in features:
            lora = rng.choice((None, "a"))
        version = rng.randint(0, 1) if lora is not None and "lora-version" in features else 0
        salt = rng.choice((None, "x", "y")) if "salt" in features else None
        items: tuple[Item, ...] = ()
        if "multimodal" in features and rng.random() < 0.7:
            items = (Item(rng.choice(("cat", "dog")), rng.randint(0, unit), unit + 1),)
        embeds: tuple[tuple[int, int], ...] = ()
        if "embeds" in features:  # an engine keys by the whole prompt's embeddings, or by none
            embeds = ((0, 0), (rng.randint(1, 2 * unit), rng.randint(0, 1)))
        drawn.append(Inputs(lora, version, salt, items, embeds))
    return (
        tuple(dict.fromkeys((drawn[0], *drawn)))
        if "embeds" in features
        else (tuple(dict.fromkeys((TOKENS_ONLY, *drawn))))
    )


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
        patience=PATIENCE,
        connector=bool({"external", "store"} & features),
    )
    # An unordered load must get no block that a step in flight still writes.
    deferred = config.ordering == "strict" or {"async", "external"} <= features
    return replace(
        config,
        scheduling=scheduling,
        defers_returns=deferred or (asynchronous and rng.random() < 0.2),
    )


def parse_groups(text: str) -> tuple[Group, ...]:
    """`full:4,sliding:4:32`: kind, block size and, for a window, its length, in tokens."""
    return tuple(_parse_group(part.strip()) for part in text.split(","))


SIZES: dict[Kind, int] = {"full": 1, "sliding": 2, "chunked": 2, "state": 1, "cross": 1}
"""Numbers of a group: its block size and, for a window, its length."""


def _parse_group(text: str) -> Group:
    kind, *rest = text.split(":")
    drafter = rest[-1:] == ["drafter"]
    numbers = rest[:-1] if drafter else rest
    for known, count in SIZES.items():
        if kind == known and len(numbers) == count and all(map(str.isdecimal, numbers)):
            sizes = [int(number) for number in numbers]
            if sizes[0] > 0 and sizes[-1] > (kind == "sliding"):
                return Group(known, sizes[0], sizes[1] if count == 2 else 0, drafter)
    raise ImpossibleConfig(
        f"no group {text!r}: full:BLOCK_SIZE, sliding:BLOCK_SIZE:WINDOW, "
        "chunked:BLOCK_SIZE:CHUNK, state:BLOCK_SIZE or cross:BLOCK_SIZE is expected, perhaps "
        "with :drafter, in tokens, a window of more than one"
    )


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
    "store": 0.8,
    "complete store": 1,
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
    "complete load": 1.5,
    "complete store": 1.5,
    "abort": 0.05,
}
"""For targets that schedule themselves."""

WHILE_DRAINING = {**AROUND_A_SCHEDULER, "submit": 0, "abort": 0}
