"""A trace in the line that one writes when debugging a cache manager by hand.

step=7 req=R1 hit_tokens=8 scheduled=1 owned=[[4, 9, 2]] new=[[2]] free=3 ref(hit)=[1, 1]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvproof_spec.actions import (
    Allocate,
    CompleteLoad,
    CompleteStep,
    Forget,
    Lookup,
    Publish,
    Release,
    Submit,
)
from kvproof_spec.answers import (
    Answer,
    Forgotten,
    Granted,
    Hit,
    Raised,
    Refused,
    Scheduled,
    Trimmed,
)
from kvproof_spec.config import Config
from kvproof_spec.derived import references
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import NonsenseAnswer, Oracle
from kvproof_spec.pages import Tables
from kvproof_spec.state import ActionDisabled, State
from kvproof_spec.trace import Line, Verdict


def followed(config: Config, lines: Iterable[Line]) -> Iterator[tuple[Line, State, State]]:
    """Each line with the states before and after it; what cannot be followed changes nothing."""
    oracle = Oracle(config, rules=())
    for line in lines:
        before = oracle.state
        try:
            if line.answer is not None:
                oracle.step(line.action, line.answer)
        except (ActionDisabled, NonsenseAnswer, Violation):
            pass
        yield line, before, oracle.state


def step_lines(config: Config, lines: Sequence[Line]) -> Iterator[str]:
    """One text a line of the trace, following the answers as they are."""
    for number, (line, before, after) in enumerate(followed(config, lines)):
        request = getattr(line.action, "request", None)
        words = [f"step={before.issued}", *([] if request is None else [f"req=R{request}"])]
        try:
            came_of_it = answered(after, line.answer)
        except (AttributeError, IndexError, TypeError):  # an answer that is none
            came_of_it = f"{line.answer!r:.100}"
        free = config.num_blocks - 1 - len(references(after))
        words += [asked(line), *([came_of_it] if came_of_it else []), f"free={free}"]
        yield f"{number:3}  {' '.join(words)}"


def answered(after: State, answer: Answer | None) -> str:
    """What came of an action, in a few words."""
    match answer:
        case Hit():
            held = references(after)
            blocks = sorted({b for table in answer.tables for b in table if b})
            counts = [held.get(block, 0) for block in blocks]
            return f"hit_tokens={answer.tokens} blocks={shown(answer.tables)} ref={counts}"
        case Granted():
            new = f" new={shown(answer.new)}" if answer.new is not None else ""
            return f"granted owned={shown(answer.tables)}{new}"
        case Refused():
            return f"refused owned={shown(answer.tables)}"
        case Trimmed():
            return f"owned={shown(answer.tables)}"
        case Raised():
            return f"raised {answer.error}"
        case Forgotten():
            return "done" if answer.done else "refused"
        case Scheduled():
            return scheduled(answer)
        case None:
            return "no answer"
        case _:
            return ""


def scheduled(answer: Scheduled) -> str:
    rows = " ".join(
        f"R{row.request}[{row.start}:{row.start + row.tokens}]"
        + (f" hit_tokens={row.start}" if row.admitted else "")
        + f" row={shown(row.worker)}"
        for row in answer.rows
    )
    preempted = "".join(f" preempted=R{request}" for request in answer.preempted)
    return f"scheduled {rows or 'nothing'}{preempted}"


def asked(line: Line) -> str:
    """The action in a few words."""
    match line.action:
        case Submit() as action:
            return f"submit tokens={list(action.symbols)}"
        case Lookup():
            return "lookup"
        case Allocate() as action:
            words = [f"allocate scheduled={action.new}"]
            words += [f"external={action.external}"] if action.external else []
            words += ["unordered"] if action.unordered else []
            words += [f"drafts={list(action.drafts)}"] if action.drafts else []
            words += [f"lookahead={action.lookahead}"] if action.lookahead else []
            words += [f"headroom={action.headroom}"] if action.headroom else []
            words += ["whole_sequence"] if action.whole_sequence else []
            return " ".join(words)
        case CompleteStep() as action:
            sampled = {f"R{out.request}": out.symbol for out in action.outputs}
            return f"step {action.step} returns {sampled}"
        case CompleteLoad() as action:
            return f"load returns valid_tokens={action.tokens}"
        case Publish() as action:
            return f"publish tokens={action.tokens}"
        case Release() as action:
            return action.reason
        case Forget(blocks=None):
            return "forget everything"
        case Forget() as action:
            return f"forget blocks={list(action.blocks or ())}"
        case other:
            return type(other).__name__.lower()


def shown(tables: Tables) -> list[list[int]]:
    return [list(table) for table in tables]


def told_rule(verdict: Verdict) -> list[str]:
    """The rule with its sentence, then the witness."""
    return [f"{verdict.rule}: {sentence_of(verdict.rule)}", f"  witness: {verdict.witness}"]


def sentence_of(rule_id: str | None) -> str:
    for rule in RULES:
        if rule.id == rule_id:
            return rule.sentence
    return "what was asked of the target has failed, or differs from the policy"
