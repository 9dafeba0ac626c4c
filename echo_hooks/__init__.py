"""Echo: how long one training step of your own script takes on a cluster, before you reserve it.

import echo

with echo.simulate(world_size=96, cluster="h800:12x8") as sim:
    train()
print(sim.report())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echo_hooks.errors import EchoError, NothingSimulated, PlanError, ScriptError, UsageError

if TYPE_CHECKING:
    from echo_hooks.report.report import Report
    from echo_hooks.simulation import Simulation, simulate

__version__ = "0.1.0"

__all__ = [
    "EchoError",
    "NothingSimulated",
    "PlanError",
    "Report",
    "ScriptError",
    "Simulation",
    "UsageError",
    "simulate",
]


def __getattr__(name: str) -> Any:
    # Late, so that rooms without torch (composing, reporting) do not pay for importing it.
    if name in ("simulate", "Simulation"):
        from echo_hooks import simulation

        return getattr(simulation, name)
    if name == "Report":
        from echo_hooks.report.report import Report

        return Report
    raise AttributeError(f"module 'echo_hooks' has no attribute {name!r}")
