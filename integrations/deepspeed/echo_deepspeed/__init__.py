"""DeepSpeed: which accelerator it should see, and the helper that it would compile for minutes."""

from __future__ import annotations

from types import ModuleType

from echo_hooks.integrations import Integration
from echo_hooks.patching import Patch, PatchSet


def _comm_torch(module: ModuleType):
    """TorchBackend builds a shared-memory extension for CPU collectives with a compiler; nothing here would use it."""
    patches = PatchSet([Patch(module, "build_shm_op", lambda _: lambda: None, "compiles an extension", "0.16")])
    patches.install()
    return patches.remove


integration = Integration(
    name="deepspeed",
    frameworks=("deepspeed",),
    preload=("deepspeed",),
    on_import={"deepspeed.comm.torch": _comm_torch},
    environment={"DS_ACCELERATOR": "cuda"},
)
