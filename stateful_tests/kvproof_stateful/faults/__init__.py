"""The catalogue of seeded faults: what a campaign must find, and by which rule.

Each is one small class, the way a real engine had it or could have it, in the module of the
part that it breaks.  A shrunk trace of each is kept under counterexamples/.
"""

from kvproof_stateful.faults import (
    allocation,
    events,
    groups,
    keys,
    pool,
    scheduler,
    transfers,
    worker,
)
from kvproof_stateful.faults.fault import FAULTS, Fault

PARTS = (pool, allocation, keys, groups, transfers, scheduler, worker, events)
"""The modules that list them."""

__all__ = ["FAULTS", "PARTS", "Fault"]
