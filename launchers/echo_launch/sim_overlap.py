"""`echo-sim overlap`: measure, train and judge models of how much kernels and communication slow each other down."""

from __future__ import annotations

import argparse
from pathlib import Path

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.hardware.units import parse_quantity
from echo_hooks.network.model import CommunicationModel


def collect(arguments: argparse.Namespace) -> int:
    """`echo-sim overlap collect`."""
    try:
        from echo_hooks.overlap.collection import collect as collection
    except ImportError as error:
        raise UsageError(f"echo-sim overlap collect needs a torch built for GPUs: {error}") from None
    sizes = tuple(int(parse_quantity(word.strip(), "bytes")) for word in arguments.sizes.split(","))
    calls = tuple(word.strip() for word in arguments.collectives.split(","))
    unknown = set(calls) - set(collection.CALLS)
    if unknown:
        raise UsageError(f"--collectives: unknown {sorted(unknown)[0]!r}; known: {', '.join(collection.CALLS)}")
    plan = collection.Plan(
        out=arguments.output,
        accelerator=arguments.accelerator,
        kernels=collection.kernel_names(arguments.kernels),
        ranks=arguments.gpus,
        calls=calls,
        sizes=sizes,
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        seed=arguments.seed,
    )
    if arguments.emulate:
        collection.emulate(plan, _traffics(arguments, calls, sizes))
    else:
        collection.collect(plan)
    return 0


def _traffics(arguments: argparse.Namespace, calls: tuple[str, ...], sizes: tuple[int, ...]):
    """What the stand-in does for each call: channels and duration as the network model has them for one node."""
    from echo_hooks.overlap.collection.stand_in import Traffic

    cluster = load_cluster(f"{arguments.accelerator}:1x{arguments.gpus}")
    network, ranks = CommunicationModel(cluster), tuple(range(arguments.gpus))
    found = []
    for call in calls:
        for size in sizes:
            if call == "exchange":
                cost, moved = network.point_to_point(0, 1, size, group_size=len(ranks)), size
            else:
                cost = network.collective(call, ranks, size, "bfloat16")
                steps = 2 if call == "all_reduce" else 1
                moved = size * steps * (len(ranks) - 1) // len(ranks)
            traffic = Traffic(cost.channels, moved, cost.duration_us)
            found.append((call, size, traffic, cost.algorithm, cost.protocol))
    return found


def add_commands(commands, command) -> None:
    """The actions of `echo-sim overlap`, by ``command`` of sim.py."""
    overlap = commands.add_parser("overlap", help="slowdown of what runs together: collect, train, evaluate")
    actions = overlap.add_subparsers(title="actions", metavar="ACTION", required=True)
    taken = command(actions, "collect", collect, "measure kernels beside collectives on the GPUs of this machine")
    taken.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="Parquet file to write")
    taken.add_argument("--accelerator", required=True, metavar="NAME", help="what the GPUs are, such as h200-sxm")
    taken.add_argument("--gpus", type=int, default=2, metavar="N", help="how many take part (default: 2)")
    taken.add_argument("--emulate", action="store_true", help="on one GPU, beside a stand-in for collectives of N")
    taken.add_argument("--kernels", metavar="PREFIX,...", help="only kernels whose names begin so (default: all)")
    taken.add_argument(
        "--collectives",
        default="all_reduce,all_gather,reduce_scatter,all_to_all,exchange",
        metavar="NAME,...",
        help="default: %(default)s",
    )
    taken.add_argument("--sizes", default="8MiB,64MiB,512MiB", metavar="SIZE,...", help="default: %(default)s")
    taken.add_argument("--repeats", type=int, default=3, metavar="N", help="of every pair (default: 3)")
    taken.add_argument("--seconds", type=float, default=0.0, metavar="S", help="begin no kernel after S (default: all)")
    taken.add_argument("--seed", type=int, default=0, help="order of the kernels and their data (default: 0)")
