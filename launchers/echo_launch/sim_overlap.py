"""`echo-sim overlap`: measure, train and judge models of how much kernels and communication slow each other down."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import load_accelerator
from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.hardware.units import parse_quantity
from echo_hooks.network.model import CommunicationModel
from echo_hooks.overlap import training
from echo_hooks.overlap.features import NAMES
from echo_hooks.overlap.model import TARGETS, load, save
from echo_hooks.overlap.ncu import read_ncu
from echo_hooks.overlap.samples import Sample, read_samples, write_samples
from echo_hooks.overlap.traces import LEAST_RUNS, pairs_in
from echo_hooks.report.quantities import percent_text
from echo_hooks.report.text import heading, line, row, show, table

_OF = {"kernel": "kernels beside a call", "waiting": "kernels beside a call that waits", "call": "calls"}


def collect(arguments: argparse.Namespace) -> int:
    """`echo-sim overlap collect`."""
    if arguments.trace:
        return _collect_from_traces(arguments)
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


def _collect_from_traces(arguments: argparse.Namespace) -> int:
    samples: list[Sample] = []
    partly = without = 0
    for path in arguments.trace:
        found = pairs_in(path, arguments.accelerator, ranks_per_node=arguments.gpus)
        samples += found.samples
        partly += found.runs_partly_covered
        without += found.kernels_alone_only
    if not samples:
        raise UsageError(
            f"no kernel in these traces ran at least {LEAST_RUNS} times alone and as often wholly beside one call"
            f" ({partly} runs lay beside one in part, {without} kernels were never wholly covered often enough)"
        )
    about = {"traces": [path.name for path in arguments.trace], "runs_partly_covered": partly}
    write_samples(arguments.output, samples, about)
    print(
        f"{len(samples)} samples ({partly} runs only in part beside a call dropped, {without} kernels without enough"
        f" of both): {arguments.output}"
    )
    return 0


def metrics(arguments: argparse.Namespace) -> int:
    """`echo-sim overlap metrics`."""
    kernels = read_ncu(arguments.file, decimal=arguments.decimal or "")
    if arguments.json:
        plain = [asdict(k) | {"duration_us": k.duration_us if math.isfinite(k.duration_us) else None} for k in kernels]
        print(json.dumps(plain, indent=1))
        return 0
    console = Console()
    rows = table("kernel", "us", "blocks", "threads", "registers", "shared bytes", "metrics", left=1)
    for k in kernels:
        us = f"{k.duration_us:.2f}" if math.isfinite(k.duration_us) else "-"
        launch = k.launch
        counts = (launch.blocks, launch.threads, launch.registers, launch.shared_bytes, len(k.metrics))
        row(rows, k.name[:60], us, *(str(n) for n in counts))
    show(console, rows)
    if kernels:
        line(console, f"times: {kernels[0].conditions}; not those of a running job")
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


def train(arguments: argparse.Namespace) -> int:
    """`echo-sim overlap train`: judged on hold-outs first, then trained on everything."""
    accelerator = load_accelerator(arguments.accelerator)
    samples = _samples(arguments.samples)
    judged, extra = _split(samples, accelerator)
    scores = training.evaluate(judged, seed=arguments.seed, extra=extra)
    targets = training.used_targets(scores)
    whole = judged if extra is None else training.joined(judged, extra)
    booster = training.fit(whole, seed=arguments.seed)
    channels = whole.rows[:, NAMES.index("call_channels")]
    about: dict[str, Any] = {
        "accelerator": accelerator.name,
        "targets": list(targets),
        "pairs": len(whole.kernel),
        "kernels": len(np.unique(whole.kernel)),
        "channels": [int(channels.min()), int(channels.max())],
        "sizes": sorted({int(size) for size in whole.size}),
        "sources": {str(s): int((whole.source == s).sum()) for s in np.unique(whole.source)},
        "seed": arguments.seed,
        "hold_outs": _plain(scores),
    }
    save(arguments.output, booster, about)
    if arguments.json:
        print(json.dumps(about, indent=1))
        return 0
    console = Console()
    _print_scores(scores, console)
    learned = ", ".join(targets) or "nothing: the formula is as good"
    line(console, f"{arguments.output}: {about['pairs']} pairs; used in place of the formula for {learned}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """`echo-sim overlap evaluate`: a model beside the baselines on samples that it was not trained on."""
    accelerator = load_accelerator(arguments.accelerator)
    data = training.prepare(_samples(arguments.samples), accelerator)
    predictors = {"none": data.base, "formula": data.formula}
    if arguments.model is not None:
        predictors["learned"] = data.base * load(arguments.model).predict_rows(data.rows)
    scores: dict[str, dict[str, dict[str, training.Score]]] = {target: {} for target in TARGETS}
    for t, target in enumerate(TARGETS):
        known = np.isfinite(data.measured[:, t])
        if known.any():
            constant = data.base[known, t] * math.exp(float(np.median(data.target[known, t])))
            by = {
                name: training.score(values[known, t], data.measured[known, t]) for name, values in predictors.items()
            }
            by["constant"] = training.score(constant, data.measured[known, t])
            scores[target]["these samples"] = by
    if arguments.json:
        print(json.dumps(_plain(scores), indent=1))
    else:
        _print_scores(scores, Console())
    return 0


def _samples(paths: list[Path]) -> list[Sample]:
    return [sample for path in paths for sample in read_samples(path)[0]]


def _split(samples: list[Sample], accelerator) -> tuple[training.Data, training.Data | None]:
    """Real pairs, on which a model is judged, and stand-ins and loops, on which it is only trained."""
    real = [s for s in samples if s.source in ("pair", "trace")]
    rest = [s for s in samples if s.source not in ("pair", "trace")]
    if not real:
        return training.prepare(rest, accelerator), None
    return training.prepare(real, accelerator), training.prepare(rest, accelerator) if rest else None


def _plain(scores: dict) -> dict[str, Any]:
    return {t: {h: {p: asdict(s) for p, s in by.items()} for h, by in of.items()} for t, of in scores.items()}


def _print_scores(scores: dict, console: Console) -> None:
    for target, by_hold_out in scores.items():
        for held_out, by in by_hold_out.items():
            count = next(iter(by.values())).count
            heading(console, f"{_OF[target]}, {count} pairs, held out: {held_out}")
            rows = table("predictor", "median error", "within 10 %", "error of the sum", left=1)
            for name, score in by.items():
                row(
                    rows,
                    name,
                    percent_text(score.median_error),
                    percent_text(score.within_10),
                    f"{100 * score.sum_error:+.1f} %",
                )
            show(console, rows)


def add_commands(commands, command) -> None:
    """The actions of `echo-sim overlap`, by ``command`` of sim.py."""
    overlap = commands.add_parser("overlap", help="slowdown of what runs together: collect, train, evaluate")
    actions = overlap.add_subparsers(title="actions", metavar="ACTION", required=True)
    taken = command(actions, "collect", collect, "measure kernels beside collectives on the GPUs of this machine")
    taken.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="Parquet file to write")
    taken.add_argument("--accelerator", required=True, metavar="NAME", help="what the GPUs are, such as h200-sxm")
    taken.add_argument("--gpus", type=int, default=2, metavar="N", help="how many take part (default: 2)")
    taken.add_argument("--emulate", action="store_true", help="on one GPU, beside a stand-in for collectives of N")
    taken.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="instead of measuring, find pairs in Kineto traces of a run that was profiled",
    )
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

    trained = command(actions, "train", train, "fit a model to samples, judged on kernels and sizes held out")
    _add_samples(trained)
    trained.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="model to write (UBJ)")
    trained.add_argument("--seed", type=int, default=0, help="of folds and trees (default: 0)")
    judged = command(actions, "evaluate", evaluate, "none, constant, formula and a model on samples")
    _add_samples(judged)
    read = command(actions, "metrics", metrics, "kernels and metrics of a CSV of Nsight Compute")
    read.add_argument("file", type=Path, metavar="FILE", help="of ncu --csv, page raw or details")
    read.add_argument("--decimal", choices=(".", ","), help="the decimal separator, where a locale wrote the file")
    read.add_argument("--json", action="store_true", help="print JSON instead of a table")
    judged.add_argument("--model", type=Path, metavar="FILE", help="of echo-sim overlap train")


def _add_samples(command: argparse.ArgumentParser) -> None:
    command.add_argument("samples", type=Path, nargs="+", metavar="SAMPLES", help="of echo-sim overlap collect")
    command.add_argument("--accelerator", required=True, metavar="NAME", help="what they were measured on")
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
