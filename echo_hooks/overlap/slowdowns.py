"""The slowdown model as the composer asks it: the learned one where it earned its place, else the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from echo_hooks.hardware.accelerator import Accelerator
from echo_hooks.overlap.formula import formula
from echo_hooks.overlap.model import TARGETS, OverlapModel, load, loads
from echo_hooks.overlap.pair import Call, Kernel
from echo_hooks.overlap.work import demand
from echo_hooks.timing.kernel_names import is_kernel, likely_op

NONE, FORMULA = "none", "formula"


class Slowdowns:
    """How much kernels and calls on one accelerator slow each other down: by the learned model for calls of the kind it
    was trained on, by the formula for others.

    ``note``: in one sentence, where the factors are from.
    """

    def __init__(self, accelerator: Accelerator, model: OverlapModel | None = None, name: str = ""):
        self.accelerator = accelerator
        self._model = model
        self.note = _note(accelerator, model, name)

    def slowdowns(self, pairs: Sequence[tuple[Kernel, Call]]) -> np.ndarray:
        """Factors [n, 3], 1 for none: of the kernel while the call moves data, of the kernel while the call only waits
        for a member, of the call while the kernel runs. Work that takes no SM (copies over the host's link) and
        nothing at all are left alone."""
        pairs = self._described(pairs)
        found = np.ones((len(pairs), len(TARGETS)))
        demands = {id(kernel): demand(kernel, self.accelerator) for kernel, _ in pairs}
        asked = [
            i
            for i, (kernel, call) in enumerate(pairs)
            if kernel.run_us > 0.0 and call.run_us > 0.0 and demands[id(kernel)].group != "host_link"
        ]
        for i in asked:
            kernel, call = pairs[i]
            found[i] = formula(kernel, call, self.accelerator, demands[id(kernel)])
        targets = self._model.targets if self._model is not None else ()
        if self._model is not None and targets:
            asked = [i for i in asked if self._model.covers(pairs[i][1])]
        if self._model is not None and targets and asked:
            learned = self._model.predict([pairs[i] for i in asked], self.accelerator)
            columns = [TARGETS.index(target) for target in targets]
            found[np.ix_(asked, columns)] = learned[:, columns]
        return np.maximum(found, 1.0)

    def _described(self, pairs: Sequence[tuple[Kernel, Call]]) -> list[tuple[Kernel, Call]]:
        """Kernels of which only the name is known, from a script that really ran, as likely operations."""
        known: dict[int, Kernel] = {}
        for kernel, _ in pairs:
            if id(kernel) not in known:
                name = kernel.signature.name
                likely = likely_op(name, kernel.run_us, self.accelerator) if name and is_kernel(name) else None
                known[id(kernel)] = kernel if likely is None else replace(kernel, signature=likely)
        return [(known[id(kernel)], call) for kernel, call in pairs]


def choose(spec: str | None, accelerator: Accelerator) -> Slowdowns | None:
    """The model that ``--overlap`` names: None for "none", the formula for "formula", a file's, or (left out) the one
    that comes with Echo for this accelerator, else the formula.

    Raises UsageError for a file that cannot be read, with the reason.
    """
    if spec == NONE:
        return None
    if spec == FORMULA:
        return Slowdowns(accelerator)
    if spec is not None:
        return Slowdowns(accelerator, load(Path(spec)), Path(spec).name)
    shipped = files("echo_hooks.overlap.models") / f"{accelerator.name}.ubj"
    if not shipped.is_file():
        return Slowdowns(accelerator)
    return Slowdowns(accelerator, loads(shipped.read_bytes(), shipped.name), shipped.name)


def checked(spec: str | None) -> str | None:
    """What ``choose`` takes, after a file was read once, so that a bad one is refused before anything is traced."""
    if spec in (None, NONE, FORMULA):
        return spec
    load(Path(spec))
    return str(Path(spec).resolve())


def _note(accelerator: Accelerator, model: OverlapModel | None, name: str) -> str:
    if model is None or not model.targets:
        return "modelled by the formula of waves and memory bandwidth"
    trained = model.about.get("accelerator", accelerator.name)
    of_another = f", measured on {trained}" if trained != accelerator.name else ""
    rest = [t for t in TARGETS if t not in model.targets]
    formula_for = f"; {' and '.join(rest)} by the formula" if rest else ""
    return f"modelled by {name}, learned from {model.about.get('pairs', 'measured')} pairs{of_another}{formula_for}"
