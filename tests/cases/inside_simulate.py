"""Run in a process of its own by test_simulation.py: what echo.simulate() leaves behind and answers, as JSON."""

import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

import echo

sys.path.insert(0, str(Path(__file__).parent))
import ddp_loop

FACTS = {}


def attributes():
    """Every attribute of torch that a hook might replace: owner -> name -> identity."""
    import torch._subclasses.fake_tensor
    import torch.distributed._functional_collectives
    import torch.distributed.distributed_c10d
    import torch.nn.parallel
    import torch.optim.optimizer
    import torch.utils._foreach_utils
    import torch.utils.checkpoint

    names = [n for n in sys.modules if n == "torch" or n.startswith(("torch.", "threading"))]
    owners = {n: sys.modules[n] for n in names if isinstance(sys.modules[n], types.ModuleType)}
    classes = [
        torch.Tensor, torch._C.TensorBase, torch.nn.Module, torch.nn.Parameter, torch.cuda.Stream, torch.cuda.Event,
        torch.optim.Optimizer, torch.distributed.ProcessGroup, torch.nn.parallel.DistributedDataParallel,
        torch._subclasses.fake_tensor.FakeTensorMode, torch.Generator, torch.autograd.Function,
        dist.distributed_c10d._World, dist.Store, torch.UntypedStorage, sys.modules["threading"].Thread,
    ]  # fmt: skip
    owners |= {f"{c.__module__}.{c.__qualname__}": c for c in classes}
    return {owner: {name: id(value) for name, value in list(vars(where).items())} for owner, where in owners.items()}


def changed(before, after):
    # Caches and counters that torch keeps of its own.
    lazy = {"__warningregistry__", "__builtins__", "cache_hits", "cache_misses", "DESCRIBER_NEXT_ID"}
    return sorted(
        f"{owner}.{name}"
        for owner, names in before.items()
        for name in names.keys() | after.get(owner, {}).keys()
        if names.get(name) != after.get(owner, {}).get(name) and name not in lazy
    )


def refused(call):
    try:
        call()
    except echo.EchoError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def simulate(body, **options):
    with echo.simulate(**{"world_size": 8, **options}) as simulation:
        body()
    return simulation


def raising():
    dist.init_process_group("nccl")
    raise KeyError("the script's own")


def passing():
    group = dist.new_group([0, 1])
    tensor = torch.ones(4, device="cuda")
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        dist.send(tensor, 1, group=group)
        optimizer.step()


def pipeline():
    dist.init_process_group("nccl")
    passing()


def nested():
    with echo.simulate(world_size=4):
        pass


def initialised():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        nested()
    finally:
        dist.destroy_process_group()


def early():
    echo.simulate(world_size=2).report()


def inside():
    with echo.simulate(world_size=2) as simulation:
        FACTS["inside"] = refused(simulation.report)
        raise_nothing = torch.nn.Linear(2, 2).cuda()
        optimizer = torch.optim.SGD(raise_nothing.parameters(), lr=0.1)
        for _ in range(3):
            raise_nothing(torch.ones(1, 2, device="cuda")).sum().backward()
            optimizer.step()


def main(out):
    simulate(ddp_loop.train)  # torch makes some of its attributes on first use
    environment, before = dict(os.environ), attributes()
    simulation = simulate(ddp_loop.train, out=out)
    FACTS["changed"] = changed(before, attributes())
    FACTS["environment"] = sorted(k for k in {**environment, **os.environ} if environment.get(k) != os.environ.get(k))
    FACTS["available"] = torch.cuda.is_available()
    FACTS["initialised"] = dist.is_initialized()
    report = simulation.report()
    FACTS["report"] = json.loads(report.to_json())
    FACTS["same report"] = simulation.report() is report

    try:
        simulate(raising)
    except KeyError as error:
        FACTS["raised"] = str(error)
    FACTS["changed by error"] = changed(before, attributes())
    FACTS["environment after error"] = os.environ == environment

    FACTS["world 0"] = refused(lambda: echo.simulate(world_size=0))
    FACTS["steps 0"] = refused(lambda: echo.simulate(world_size=8, steps=0))
    FACTS["unknown cluster"] = refused(lambda: echo.simulate(world_size=8, cluster="h900:1x8"))
    FACTS["small cluster"] = refused(lambda: echo.simulate(world_size=64, cluster="h100-sxm:1x8"))
    FACTS["early"] = refused(early)
    FACTS["nested"] = refused(lambda: simulate(nested))
    FACTS["dist initialised"] = refused(initialised)
    FACTS["nothing"] = refused(lambda: simulate(lambda: None))
    FACTS["point to point"] = refused(lambda: simulate(pipeline).report())
    inside()
    FACTS["changed at last"] = changed(before, attributes())
    print("FACTS" + json.dumps(FACTS))


if __name__ == "__main__":
    main(sys.argv[1])
