"""Fused optimizers and multi-tensor functions: torch's own fused kernels do the same work."""

from __future__ import annotations

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam in one kernel per chunk of tensors. State and arguments as Transformer Engine's and Apex's.

    Its parameters are what it updates: 32-bit ones where Megatron hands them over; with ``master_weights`` it keeps
    32-bit copies of them itself.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
        **_,
    ):
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def initialize_state(self, param, store_param_remainders=False) -> None:
        """Moments of one parameter, and its 32-bit copy where the optimizer keeps one."""
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=self.name_to_dtype_map[name])
        if self.master_weights and param.dtype != torch.float32:
            if store_param_remainders and param.dtype == torch.bfloat16:
                state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
            else:
                state["master_param"] = param.detach().to(self.name_to_dtype_map["master_param"])

    def get_unscaled_state(self, param, state_name):
        return self.state[param][state_name]

    def set_scaled_state(self, param, state_name, unscaled_state) -> None:
        if state_name in self.state[param]:
            self.state[param][state_name].copy_(unscaled_state)
        else:
            self.state[param][state_name] = unscaled_state.to(self.name_to_dtype_map[state_name])

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None, **_):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            by_kind: dict[tuple, list] = {}
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param, self.store_param_remainders)
                target = _local(self.state[param].get("master_param", param))
                grad = _local(grad)
                by_kind.setdefault((target.dtype, grad.dtype, param.dtype), []).append((param, grad, target))
            for tensors in by_kind.values():
                self._update(group, tensors)
        return loss

    def _update(self, group, tensors) -> None:
        params, grads, targets = map(list, zip(*tensors))
        first = [_local(self.state[p]["exp_avg"]) for p in params]
        second = [_local(self.state[p]["exp_avg_sq"]) for p in params]
        steps = [_step(params[0].device)] * len(params)
        torch.ops.aten._fused_adamw_(
            targets,
            grads,
            first,
            second,
            [],
            steps,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a distributed tensor."""
    return getattr(tensor, "_local_tensor", tensor)


_steps: dict[torch.device, torch.Tensor] = {}


def _step(device: torch.device) -> torch.Tensor:
    """Torch's kernel reads the number of the step from the device."""
    if device not in _steps:
        _steps[device] = torch.empty((), dtype=torch.float32, device=device)
    return _steps[device]


class FusedSGD(torch.optim.SGD):
    """SGD in one kernel per chunk of tensors."""

    def __init__(self, params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, *_, **__):
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=True,
        )


class MultiTensorApply:
    """Calls a multi-tensor function on lists of tensors."""

    available = True

    def __init__(self, chunk_size: int):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)

    def check_avail(self) -> None:
        pass


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_l2norm(_chunk, _overflow, tensor_lists, per_tensor=False, *_):
    """(norm over all tensors, norms of each or None)."""
    norms = torch._foreach_norm([_local(t) for t in tensor_lists[0]])
    device = norms[0].device
    total = torch.empty(1, dtype=torch.float32, device=device)  # the same kernel sums up
    return total, torch.stack(norms) if per_tensor else torch.empty(0, device=device)


multi_tensor_unscale_l2norm = multi_tensor_l2norm


def multi_tensor_scale(_chunk, _overflow, tensor_lists, scale, *_):
    """Each tensor of the second list becomes one of the first, scaled, in one kernel."""
    sources, targets = tensor_lists
    if all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(sources, targets)):
        torch._foreach_mul_(list(targets), scale.reshape(()) if isinstance(scale, torch.Tensor) else scale)
    else:
        torch._foreach_copy_(list(targets), list(sources))


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_axpby(_chunk, _overflow, tensor_lists, a, b, *_):
    x, y, out = (list(t) for t in tensor_lists)
    torch._foreach_copy_(out, torch._foreach_add(x, y))


def multi_tensor_adam(_chunk, _overflow, tensor_lists, *_):
    raise NotImplementedError("multi_tensor_adam called by itself is not simulated; use FusedAdam")


multi_tensor_sgd = multi_tensor_adam
