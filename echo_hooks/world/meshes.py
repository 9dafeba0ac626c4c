"""Device meshes that do not fit the world: the arithmetic behind torch's own error."""

from __future__ import annotations

from math import prod

import torch.distributed as dist

from echo_hooks.layouts import divisors, frames, nearest, product


def explain(error: BaseException) -> str | None:
    """One line for an error out of ``init_device_mesh``; None for any other."""
    for frame in frames(error):
        shape = frame.f_locals.get("mesh_shape")
        if frame.f_code.co_name != "init_device_mesh" or not isinstance(shape, (tuple, list)) or not shape:
            continue
        names = frame.f_locals.get("mesh_dim_names") or [f"dim{i}" for i in range(len(shape))]
        if len(names) != len(shape) or not all(isinstance(n, int) and n > 0 for n in shape):
            continue
        world = dist.get_world_size() if dist.is_initialized() else 1
        if prod(shape) == world:
            return None
        factors = dict(zip(map(str, names), shape))
        options = [f"world {prod(shape)}"]
        for name, size in factors.items():
            others = prod(shape) // size
            if world % others == 0:
                options.insert(0, f"{name} {world // others}")
            elif size > 1:
                near = nearest([d for d in divisors(world) if d != size], size)
                options += [f"{name} {d}" for d in near if world % d == 0 and others == 1]
        return f"mesh {product(factors)}, but the world is {world}; nearest legal: {', or '.join(options[:3])}"
    return None
