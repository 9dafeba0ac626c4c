"""The virtual world: this process believes it is rank r of N, and torch.distributed is a recorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from echo_hooks.graph.groups import Group
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.recorder import Recorder
from echo_hooks.patching import PatchSet
from echo_hooks.world import pipelining, redirect
from echo_hooks.world.functional import Functional
from echo_hooks.world.group import RecordingGroup
from echo_hooks.world.objects import ObjectCollectives
from echo_hooks.world.payloads import PayloadStore
from echo_hooks.world.store import VirtualStore
from echo_hooks.world.values import Values


class VirtualWorld:
    """One rank's view of torch.distributed.

    ``recorder`` says which rank of how many; ``values`` reads and writes tensors; ``payloads`` holds what ranks
    traced before have sent. ``seed`` seeds made-up activations.

    Attributes:
        findings: problems seen while recording (ranks that disagree about a call).
        unanswered: ranks whose payload was asked for, not known, and could steer the script: with them traced first,
            this rank would be surer.
        check_devices: refuse tensors on devices that no backend of the group serves, as torch does.
    """

    def __init__(
        self,
        recorder: Recorder,
        values: Values,
        *,
        nproc_per_node: int,
        payloads: PayloadStore,
        seed: int = 0,
        check_devices: bool = True,
    ):
        self.nproc_per_node = nproc_per_node
        self.check_devices = check_devices
        self.seed = seed
        self.objects = ObjectCollectives(self)
        self.shape_exchange = pipelining.ShapeExchange(self)
        self._installed: ExitStack | None = None
        self._become(recorder, values, payloads)

    def _become(self, recorder: Recorder, values: Values, payloads: PayloadStore) -> None:
        self.recorder = recorder
        self.values = values
        self.payloads = payloads
        self.rank = recorder.rank
        self.generator = torch.Generator().manual_seed(self.seed)  # never the script's: its data order must not move
        self._device_generators: dict[torch.device, torch.Generator] = {}
        self.findings: list[Problem] = []
        self.unanswered = recorder.unanswered
        self.store = VirtualStore(self)
        self.stores: list[VirtualStore] = []
        self.objects_fallback: Callable[[list], list] | None = None
        self.shape_exchange.forward = None
        self.last_sent: dict[tuple[int, int], int] = {}
        self.creating: tuple[Group, dict[str, str]] | None = None
        self.made_by_members = False  # the groups being made now are made by their members, or a parent's, alone
        self._functional = Functional(self)
        self._messages: dict[str, int] = {}

    def retarget(self, recorder: Recorder, values: Values, payloads: PayloadStore) -> None:
        """Become another rank before any group exists; the hooks stay (a fork server installs them once)."""
        if c10d.is_initialized():
            raise RuntimeError("a virtual world that has groups cannot become another rank")
        self._become(recorder, values, payloads)
        self.payloads.begin(self.rank)

    def install(self) -> None:
        """Redirect torch.distributed into this world. Raises RuntimeError when it is installed already."""
        if self._installed is not None:
            raise RuntimeError("this virtual world is installed already")
        self.payloads.begin(self.rank)
        stack = ExitStack()
        try:
            stack.enter_context(redirect.echo_backend(self))
            patches = PatchSet(redirect.patches(self))
            patches.install()
            stack.callback(patches.remove)
            for late in redirect.late_patches(self):
                late.install()
                stack.callback(late.remove)
        except BaseException:
            stack.close()
            raise
        self._installed = stack

    def remove(self) -> None:
        """Put torch.distributed back exactly as it was; groups that are still open are closed."""
        if self._installed is None:
            return
        if c10d.is_initialized():
            c10d.destroy_process_group()
        self._installed.close()
        self._installed = None

    def functional(self, func: Any, args: tuple, kwargs: dict | None = None) -> Any:
        """Answer a functional collective on pretended tensors (called by the capture's dispatch mode)."""
        return self._functional.answer(func, args, kwargs)

    # ---- for the other modules of this package ----

    def register_group(self, ranks: tuple[int, ...], backend: str, desc: str, *, default: bool = False) -> Group:
        """A line in the group table, whether this rank is a member or not."""
        local = self.made_by_members
        desc = "" if desc in ("default_pg", "undefined") else desc
        name = "world" if default else desc.removeprefix("mesh_")
        return self.recorder.groups.add(
            ranks, name=name, backend=backend, site=self.recorder.site(), desc=desc, local=local
        )

    def create_group(self, options: Any, backend_options: Any = None) -> RecordingGroup:
        """Called by torch in the middle of ``_new_process_group_helper``."""
        assert self.creating is not None, "groups are created through torch.distributed"
        (entry, backends), self.creating = self.creating, None
        return RecordingGroup(self, entry, backends)

    def split_group(self, parent: RecordingGroup, split_ranks, *, timeout=None, group_desc=None, backend=None):
        """All parts of a split become groups, in order; returns the one this rank is in, or None.

        ``split_ranks``: lists of the parent's group ranks.
        """
        backend = backend or c10d._world.pg_map[parent][0]
        desc = group_desc or f"{parent.group_desc}:split"
        mine = None
        with self.members_only():
            for part in split_ranks:
                ranks = [parent.ranks[i] for i in sorted(part)]
                group = c10d._new_group_with_tag(ranks, timeout, backend, group_desc=desc)
                if self.rank in ranks:
                    mine = group
        return mine

    @contextmanager
    def members_only(self, only: bool = True):
        """Groups made inside are made in calls that the other ranks do not make."""
        before, self.made_by_members = self.made_by_members, self.made_by_members or only
        try:
            yield
        finally:
            self.made_by_members = before

    def next_message(self, lane: str) -> int:
        """Running number of the messages on one lane (a pair of ranks, one direction)."""
        number = self._messages.get(lane, 0)
        self._messages[lane] = number + 1
        return number

    def device_generator(self, device: torch.device) -> torch.Generator:
        """The generator of made-up values on a real device."""
        found = self._device_generators.get(device)
        if found is None:
            found = self._device_generators[device] = torch.Generator(device).manual_seed(self.seed)
        return found

    def missing_objects(self, own: list) -> Callable[[], list]:
        """Objects to answer with when nobody knows what was sent."""
        fallback = self.objects_fallback
        return (lambda: own) if fallback is None else (lambda: fallback(own))
