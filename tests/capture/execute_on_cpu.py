"""Runs a script as one rank of two in execute mode with the CPU in the GPU's place: its ATen ops are the kernels.

python execute_on_cpu.py RANK OUT SCRIPT    prints the trace's facts as JSON
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch

from echo_hooks import session, stages
from echo_hooks.capture.profiler import Profiler
from echo_hooks.errors import EchoError
from echo_hooks.graph.kineto_events import Call, Events, Work
from echo_hooks.graph.program import Kind
from echo_hooks.report.utilisation import flops_of_trace

KERNELS = ("aten::mm", "aten::addmm", "aten::relu", "aten::threshold_backward")


class CpuProfiler(Profiler):
    """What torch's profiler says of the CPU, as if a launch of 1 us stood before each op."""

    def __init__(self):
        super().__init__("cpu")

    def stop(self) -> Events:
        results = torch.autograd._disable_profiler()
        self._profile.enabled = False
        events = Events()
        for number, event in enumerate(e for e in results.events() if e.name() in KERNELS):
            start = (event.start_ns() - self.base_ns) / 1e3
            events.calls.append(Call("cudaLaunchKernel", "1", start, start + 1, {"correlation": number}))
            work = Work(Kind.COMPUTE, event.name(), 7, start + 1, start + 1 + event.duration_ns() / 1e3, {})
            events.launched[number].append(work)
        events.calls.sort(key=lambda call: call.start_us)
        return events


class SilentProfiler(CpuProfiler):
    def stop(self) -> Events:
        super().stop()
        return Events()


def main(rank: int, out: str, script: str, profiler: str = "CpuProfiler") -> None:
    stages.Profiler = globals()[profiler]
    torch.backends.cuda.is_built = lambda: True
    tracer = session.Tracer(session.Job(2, 2, "h200-sxm:1x2", script, out=out, timing="execute"))
    tracer.prepare()
    try:
        trace = tracer.trace(rank)
    except EchoError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return
    kinds = Counter(Kind(kind).name for kind in trace.program.kind.tolist())
    talk = [i for i, kind in enumerate(trace.program.kind.tolist()) if kind == Kind.COLLECTIVE]
    names = [trace.ops[op].name if op >= 0 else "" for op in trace.program.op.tolist()]
    print(
        json.dumps(
            {
                "kinds": kinds,
                "names": names,
                "collective_bytes": [int(trace.program.bytes[i]) for i in talk],
                "collectives_before": int((trace.prologue.kind == Kind.COLLECTIVE).sum()),
                "durations": [us for us, name in zip(trace.program.duration_us.tolist(), names) if name in KERNELS],
                "host_us": trace.program.host_us.tolist(),
                "phases": trace.program.phase.tolist(),
                "evidence": sorted(set(trace.program.evidence[trace.program.kind == Kind.COMPUTE].tolist())),
                "notes": trace.notes,
                "host_speed": trace.host_speed,
                "tokens": trace.tokens_per_step,
                "flops": {f"{dtype} {phase}": n for (dtype, phase), n in flops_of_trace(trace).items()},
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
