"""The checker is checked: every seeded fault falls by the rule it breaks, and by its kept trace.

The kept traces are written by `kvproof faults --write counterexamples`.
"""

from __future__ import annotations

import inspect
import io
import tokenize
from pathlib import Path
from statistics import median

import pytest

from kvproof_spec.state import ActionDisabled
from kvproof_spec.trace import Trace, Verdict, read_trace
from kvproof_stateful.campaign import Budget, Campaign
from kvproof_stateful.faults import FAULTS, Fault
from kvproof_stateful.faults.search import search, trace_path
from kvproof_stateful.plan import Asked
from kvproof_stateful.running import Judging, judge_trace, perform_actions
from kvproof_stateful.target import Target
from kvproof_stateful.targets.plain import PlainTarget
from kvproof_stateful.targets.plain_engine import PlainEngineTarget

KEPT = Path(__file__).parents[2] / "counterexamples"
EXACT = Judging("exact:vllm-0.32")

MOST_LINES = 12
MOST_ACTIONS = 12  # of the median trace

each_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))


def kept(fault: Fault) -> Trace:
    return read_trace(trace_path(KEPT, fault))


def replayed(target: Target, trace: Trace) -> Verdict | None:
    actions = [line.action for line in trace.lines]
    judging = Judging(trace.header.level, trace.header.without)
    run = perform_actions(target, judging, trace.header.config, actions)
    return run.lines[-1].verdict if len(run.lines) == len(actions) else Verdict("ended early")


def lines_of_code(part: type) -> int:
    """Lines of a class with code on them: its decorator, docstrings and comments do not count."""
    source = inspect.getsource(part)
    passive = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    statement: list[tokenize.TokenInfo] = []
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in passive | {tokenize.ENDMARKER}:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            decorator = statement[0].string == "@" and statement[0].start[1] == 0
            docstring = [word.type for word in statement] == [tokenize.STRING]
            if not decorator and not docstring:
                lines.update(line for word in statement for line in (word.start[0], word.end[0]))
            statement = []
    return len(lines)


def test_there_are_forty_faults_and_a_kept_trace_of_each() -> None:
    assert len(FAULTS) >= 40
    assert {path.name for path in KEPT.glob("fault-*.ndjson")} == {
        trace_path(KEPT, fault).name for fault in FAULTS.values()
    }


@each_fault
def test_a_fault_is_at_most_twelve_lines_of_code(fault: Fault) -> None:
    assert 0 < lines_of_code(fault.part) <= MOST_LINES


@each_fault
def test_its_trace_ends_with_its_rule(fault: Fault) -> None:
    trace = kept(fault)
    assert trace.header.target == fault.target().hello().name
    assert trace.header.level == fault.judging.level
    assert trace.verdict is not None
    assert trace.verdict.rule == fault.rule
    assert not any(line.verdict for line in trace.lines[:-1])


def test_half_of_the_traces_have_twelve_actions_at_most() -> None:
    assert median(len(kept(fault).lines) for fault in FAULTS.values()) <= MOST_ACTIONS


@each_fault
def test_the_faulty_manager_breaks_its_rule_again_in_its_trace(fault: Fault) -> None:
    trace = kept(fault)
    assert replayed(fault.target(), trace) == trace.verdict


@each_fault
def test_the_recorded_answers_alone_break_the_rule(fault: Fault) -> None:
    verdict = judge_trace(fault.judging, kept(fault))
    assert verdict is not None
    assert verdict.rule == fault.rule


@each_fault
def test_the_healthy_manager_breaks_no_rule_in_the_trace(fault: Fault) -> None:
    observed = issubclass(fault.target_class, PlainEngineTarget)
    healthy = PlainEngineTarget() if observed else PlainTarget()
    try:
        verdict = replayed(healthy, kept(fault))
    except ActionDisabled:
        return  # its answers differ so much that the actions no longer fit them
    assert verdict is None


def test_a_healthy_manager_is_found_to_be_healthy() -> None:
    result = Campaign(PlainTarget(), EXACT, Asked(), Budget(actions=4000)).run()
    assert result.found == []
    assert result.failure is None


def test_an_order_of_release_is_no_matter_of_the_contract() -> None:
    target = FAULTS["forward-order-free"].target()
    assert Campaign(target, Judging("contract"), Asked(), Budget(actions=4000)).run().found == []


@pytest.mark.faults
@each_fault
def test_two_seeds_of_three_find_it_by_its_rule_within_a_minute(fault: Fault) -> None:
    found = [search(fault, seed) for seed in range(3)]
    detected = [detection for detection in found if detection is not None]
    if detected:
        actions = median(detection.actions for detection in detected)
        seconds = median(detection.seconds for detection in detected)
        print(f"{fault.name}: {fault.rule} after {actions:,.0f} actions, {seconds:.2f} s")
    assert len(detected) >= 2
