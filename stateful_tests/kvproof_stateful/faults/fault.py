"""A seeded fault: one part of a healthy implementation, exchanged for a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import isabstract
from typing import Any, TypeVar

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.coordinator import Coordinator, HybridCoordinator
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.layout import Layout
from kvproof_reference.scheduler import Scheduler
from kvproof_reference.single_type_manager import SingleTypeManager
from kvproof_reference.worker import Worker
from kvproof_spec.config import Kind
from kvproof_stateful.plan import Asked
from kvproof_stateful.running import Judging
from kvproof_stateful.targets.plain import PlainTarget
from kvproof_stateful.targets.plain_engine import PlainEngineTarget

VLLM = "https://github.com/vllm-project/vllm"
SGLANG = "https://github.com/sgl-project/sglang"
NANO_VLLM = "https://github.com/GeeeekExplorer/nano-vllm"

EXACT = "exact:vllm-0.32"


@dataclass(frozen=True, slots=True)
class Fault:
    """An implementation that breaks `rule`, judged by `judging` on what `asked` leaves open.

    `report` is where a real engine had it or a reviewer feared it; empty if none is known.
    `part` is the class that is broken, and `target_class` the target that has it.
    """

    name: str
    rule: str
    sentence: str
    report: str
    judging: Judging
    asked: Asked
    part: type
    target_class: type[PlainTarget] | type[PlainEngineTarget]

    def target(self) -> PlainTarget | PlainEngineTarget:
        return self.target_class()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rule": self.rule,
            "level": self.judging.level,
            "without": list(self.judging.without),
            "sentence": self.sentence,
            "report": self.report,
        }


FAULTS: dict[str, Fault] = {}
"""By name, in the order in which the catalogue's modules list them."""

Part = TypeVar("Part", bound=type)


def seeded(
    name: str,
    rule: str,
    report: str = "",
    level: str = "contract",
    strict: bool = False,
    without: tuple[str, ...] = (),
) -> Callable[[Part], Part]:
    """Make a broken part a fault; its sentence is the first line of its docstring.

    `without` are rules that the fault breaks as well, and that would be named first.

    The part is a pool, the manager of a group, a coordinator, a manager, a scheduler, a
    worker, or a whole target.  An abstract manager of a group stands for every kind.
    """

    def made(part: Part) -> Part:
        if name in FAULTS:
            raise ValueError(f"there is a fault {name} already")
        sentence = (part.__doc__ or "").partition("\n")[0]
        target = target_with(part, name)
        FAULTS[name] = Fault(
            name,
            rule,
            sentence,
            report,
            Judging(level, without),
            Asked(strict=strict),
            part,
            target,
        )
        return part

    return made


def target_with(part: type, fault: str) -> type[PlainTarget] | type[PlainEngineTarget]:
    """The plain target, or `plain-engine` for what only a scheduler does, with the part."""
    if issubclass(part, PlainTarget | PlainEngineTarget):
        usual = part
    elif issubclass(part, Scheduler):
        usual = type(part.__name__, (PlainEngineTarget,), {"scheduler_class": part})
    elif issubclass(part, Worker):
        usual = type(part.__name__, (PlainTarget,), {"worker_class": part})
    else:
        usual = type(part.__name__, (PlainTarget,), {"manager_class": manager_with(part)})
    named: type[Any] = type(usual.__name__, (usual,), {"name": f"{usual.name}+{fault}"})
    return named


def manager_with(part: type) -> type[KVCacheManager]:
    """The plain manager, with this part."""
    if issubclass(part, KVCacheManager):
        return part
    if issubclass(part, BlockPool):
        return type(part.__name__, (KVCacheManager,), {"block_pool_class": part})
    if issubclass(part, SingleTypeManager):
        return type(part.__name__, (KVCacheManager,), {"manager_classes": managers_with(part)})
    if issubclass(part, HybridCoordinator):

        class Manager(KVCacheManager):
            @staticmethod
            def coordinator_class(layout: Layout, enable_caching: bool) -> type[Coordinator]:
                usual = KVCacheManager.coordinator_class(layout, enable_caching)
                return part if usual is HybridCoordinator else usual

        return Manager
    raise TypeError(f"{part.__name__} is no part of an implementation")


def managers_with(part: type) -> dict[Kind, type[SingleTypeManager]]:
    """The managers of the kinds of groups, with what `part` does differently."""
    usual = KVCacheManager.manager_classes
    if isabstract(part):
        return {kind: type(part.__name__, (part, usual[kind]), {}) for kind in usual}
    return {kind: part if issubclass(part, usual[kind]) else usual[kind] for kind in usual}
