"""A Hypothesis state machine over the same choices: what a campaign is measured against."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvproof_spec.choices import Scope, choices
from kvproof_stateful.running import Judging, Run
from kvproof_stateful.target import Target


def machine_over(
    target: Target, judging: Judging, scope: Scope, counted: list[int]
) -> type[RuleBasedStateMachine]:
    """A machine whose one rule takes any enabled choice; `counted[0]` adds up its actions."""

    class Machine(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self.judged = Run(target, judging, scope.config)

        @rule(data=st.data())
        def step(self, data: st.DataObject) -> None:
            enabled = choices(self.judged.state, scope)
            choice = data.draw(st.sampled_from(enabled))
            picks = [data.draw(st.integers(0, len(domain) - 1)) for domain in choice.domains]
            counted[0] += 1
            self.judged.step(choice.action(picks))

    return Machine
