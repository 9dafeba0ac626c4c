"""Random states by name, and checkpointing of activations with them."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from echo_megatron.te.communication import gather_along_first_dim, size_of
from echo_megatron.te.precision import FP8GlobalStateManager

_trackers: dict[str, torch.Tensor] = {}
_recomputing = {"enabled": False, "now": False}


class CudaRNGStatesTracker:
    """Named generator states; ``fork`` swaps one in."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng"):
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


def get_all_rng_states():
    return _trackers


def graph_safe_rng_available() -> bool:
    return False


def is_fp8_activation_recompute_enabled() -> bool:
    return _recomputing["enabled"]


def in_fp8_activation_recompute_phase() -> bool:
    return _recomputing["now"]


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    """Says to 8-bit layers that they run for the first or the second time."""
    before = dict(_recomputing)
    _recomputing.update(
        enabled=activation_recompute and FP8GlobalStateManager.is_fp8_enabled(),
        now=activation_recompute and recompute_phase,
    )
    try:
        yield
    finally:
        _recomputing.update(before)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, distribute, tracker, group, keywords, *args):
        ctx.run, ctx.keywords, ctx.group = run, keywords, group
        ctx.state = FP8GlobalStateManager.get_fp8_autocast_state()
        ctx.cuda_state = torch.cuda.get_rng_state()
        ctx.tracker_states = tracker().get_states() if tracker is not None else None
        ctx.tracker = tracker
        with torch.no_grad(), activation_recompute_forward(True, False):
            out = run(*args, **keywords)
        ctx.distribute = distribute and size_of(group) > 1
        ctx.places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        ctx.others = [None if isinstance(a, torch.Tensor) else a for a in args]
        tensors = [args[i] for i in ctx.places]
        if ctx.distribute:  # each rank keeps its share of the first input
            ctx.shape = tensors[0].shape
            share = tensors[0].numel() // size_of(group)
            tensors[0] = tensors[0].detach().reshape(-1)[dist.get_rank(group) * share :][:share].clone()
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx, *grads):
        tensors = list(ctx.saved_tensors)
        if ctx.distribute:
            tensors[0] = gather_along_first_dim(tensors[0], ctx.group)[0].view(ctx.shape)
        args = list(ctx.others)
        for place, tensor in zip(ctx.places, tensors):
            args[place] = tensor.detach().requires_grad_(
                tensor.requires_grad or (ctx.distribute and place == ctx.places[0])
            )
        before = torch.cuda.get_rng_state()
        states = ctx.tracker().get_states() if ctx.tracker is not None else None
        torch.cuda.set_rng_state(ctx.cuda_state)
        if states is not None:
            ctx.tracker().set_states(ctx.tracker_states)
        now = FP8GlobalStateManager.get_fp8_autocast_state()
        FP8GlobalStateManager.set_fp8_autocast_state(ctx.state)
        try:
            with torch.enable_grad(), activation_recompute_forward(True, True):
                outs = ctx.run(*args, **ctx.keywords)
        finally:
            FP8GlobalStateManager.set_fp8_autocast_state(now)
        torch.cuda.set_rng_state(before)
        if states is not None:
            ctx.tracker().set_states(states)
        outs = (outs,) if isinstance(outs, torch.Tensor) else outs
        pairs = [
            (o, g) for o, g in zip(outs, grads) if isinstance(o, torch.Tensor) and o.requires_grad and g is not None
        ]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return None, None, None, None, None, *(a.grad if isinstance(a, torch.Tensor) else None for a in args)


def checkpoint(
    function,
    *args,
    use_reentrant=True,
    distribute_saved_activations=False,
    get_rng_state_tracker=None,
    tp_group=None,
    context_fn=None,
    determinism_check="default",
    debug=False,
    **kwargs,
):
    """Run ``function`` again in backward, with the random states and the 8-bit state that it had."""
    return _Checkpoint.apply(function, distribute_saved_activations, get_rng_state_tracker, tp_group, kwargs, *args)
