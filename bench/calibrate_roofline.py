"""Fit the roofline's shares and ramps to kernel times measured on H200, and write them into a preset.

    python bench/calibrate_roofline.py TRACES OVERLAP_CSV [--write echo_hooks/hardware/accelerators/h200-sxm.toml]

What TRACES and OVERLAP_CSV hold is said in kineto_samples.py. For each class of operation the time of a kernel is
ramp + work / share, work being what the model itself says at full rates; both come from one linear least-squares fit
of the relative error. Nothing is tuned to the time of a whole step.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
from kineto_samples import Sample, load

from echo_hooks.hardware.accelerator import EFFICIENCY, Accelerator, load_accelerator
from echo_hooks.timing.roofline import estimate

MINIMUM_RAMP_US = 0.8  # the shortest kernels of the traces, those with a single element, take 0.7 to 1.2 us
MAXIMUM_RAMP_US = 5.0  # no kernel of few elements took longer
PROVENANCE = "bench/calibrate_roofline.py on kernel times of an H200, torch 2.11"

# What the measurements have no kernel for is taken over from the class most like it.
TAKEN_OVER = {
    ("attention_forward", "bandwidth"): ("gemm", "bandwidth", "as matrix products"),
    ("attention_backward", "bandwidth"): ("gemm", "bandwidth", "as matrix products"),
    ("random", "bandwidth"): ("activation", "bandwidth", "as GELU, arithmetic per element beside memory"),
    ("random", "ramp"): ("activation", "ramp", "as GELU, arithmetic per element beside memory"),
    ("sort", "bandwidth"): ("strided", "bandwidth", "as permuted copies"),
    ("sort", "ramp"): ("strided", "ramp", "as permuted copies"),
}

Shares = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("overlap_csv", type=Path)
    parser.add_argument("--write", type=Path, help="replace the [efficiency] tables of this accelerator file")
    options = parser.parse_args()
    samples = load(options.traces, options.overlap_csv)
    accelerator = load_accelerator("h200-sxm")
    shares = calibrate(samples, accelerator)
    errors = compare(samples, accelerator, shares)
    for name, values in errors.items():
        print(f"{name:18} {len(values):3} samples, mean error {sum(values) / len(values):.1%}")
    tables = efficiency_toml(shares, errors)
    print(tables)
    if options.write:
        head = options.write.read_text().split("\n[efficiency", 1)[0].rstrip("\n")
        options.write.write_text(f"{head}\n{tables}")


def calibrate(samples: list[Sample], accelerator: Accelerator) -> Shares:
    """Shares and ramp of each class that has samples; the ramp from those of "compute" where there are any."""
    groups: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        groups[sample.efficiency_class][sample.parameter].append(sample)
    result: Shares = {}
    for name, by_parameter in groups.items():
        ramp = None
        result[name] = {}
        for parameter in ("compute", "bandwidth"):
            if by_parameter[parameter]:
                result[name][parameter], ramp = fit(by_parameter[parameter], accelerator, ramp)
        result[name]["ramp"] = MINIMUM_RAMP_US if ramp is None else ramp
    return result


def fit(samples: list[Sample], accelerator: Accelerator, ramp: float | None = None) -> tuple[float, float]:
    """(share, ramp): least squares of (kernels * ramp + work / share - measured) / measured.

    Two samples or fewer leave the ramp at its minimum: they cannot tell both.
    """
    device = with_shares(accelerator, {})
    work = np.array([estimate(s.signature, device).duration_us / s.measured_us for s in samples])
    kernels = np.array([s.kernels / s.measured_us for s in samples])
    if ramp is None and len(samples) > 2:
        ramp = float(np.linalg.lstsq(np.stack([kernels, work], axis=1), np.ones(len(samples)), rcond=None)[0][0])
    ramp = min(max(ramp or 0.0, MINIMUM_RAMP_US), MAXIMUM_RAMP_US)
    return min(float(work @ work / (work @ (1 - kernels * ramp))), 1.0), ramp


def with_shares(accelerator: Accelerator, shares: Shares) -> Accelerator:
    """The device without fixed times, shares 1 where not given: an estimate is then bare work over share."""
    full = {c: {key: 0.0 if key == "ramp" else 1.0 for key in keys} for c, keys in EFFICIENCY.items()}
    given = {c: full[c] | values | {"ramp": 0.0} for c, values in shares.items()}
    return dataclasses.replace(accelerator, launch_overhead_us=0.0, efficiency=full | given)


def compare(samples: list[Sample], accelerator: Accelerator, shares: Shares) -> dict[str, list[float]]:
    """Print every sample beside the fit; returns the absolute relative errors by class."""
    errors = defaultdict(list)
    device = with_shares(accelerator, shares)
    print("class               measured  modelled   error  sample (times in us)")
    for sample in sorted(samples, key=lambda s: s.efficiency_class):
        name = sample.efficiency_class
        modelled = estimate(sample.signature, device).duration_us + sample.kernels * shares[name]["ramp"]
        error = modelled / sample.measured_us - 1
        errors[name].append(abs(error))
        operands = " ".join(f"{t.dtype}[{','.join(map(str, t.shape))}]" for t in sample.signature.inputs[:2])
        label = f"{sample.label} {sample.signature.name} {operands}".strip()
        print(f"{name:18} {sample.measured_us:9.1f} {modelled:9.1f} {error:+7.1%}  {label}")
    return errors


def efficiency_toml(shares: Shares, errors: dict[str, list[float]]) -> str:
    lines = []
    for name, keys in EFFICIENCY.items():
        lines.append(f"\n[efficiency.{name}]")
        for key, dimension in keys.items():
            value = shares.get(name, {}).get(key)
            if value is None:
                other, other_key, why = TAKEN_OVER[name, key]
                value, source = shares[other][other_key], f"assumed {why}; no such kernel in the measurements"
            else:
                mean = sum(errors[name]) / len(errors[name])
                source = f"{PROVENANCE}: {len(errors[name])} samples, mean error {mean:.0%}"
            text = f'"{value:.2f} us"' if dimension == "time" else f"{value:.3f}"
            lines.append(f'{key} = {{ value = {text}, source = "{source}" }}')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
