"""The six object collectives: the objects are answered directly, the tensors they would have moved are recorded.

Message sequences as in torch/distributed/distributed_c10d.py: sizes (int64) first, then the pickled bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import distributed_c10d as c10d

from echo_hooks.graph.ops import TensorMeta
from echo_hooks.graph.program import Kind
from echo_hooks.world.payloads import ABSENT, Payload, json_plain
from echo_hooks.world.record import Call, Message, issue, issue_message

if TYPE_CHECKING:
    from echo_hooks.world.group import RecordingGroup
    from echo_hooks.world.virtual_world import VirtualWorld


def pickled_size(world: VirtualWorld, obj: Any) -> int:
    """Bytes that torch's own pickler makes of the object (only counted: nothing is ever unpickled)."""
    buffer = io.BytesIO()
    try:
        c10d._pickler(buffer).dump(obj)
    except Exception as error:  # whatever __reduce__ raises: on a real device it might not
        world.recorder.assume(f"size of an object that cannot be pickled here ({type(error).__name__})", 0)
        return 0
    return buffer.tell()


class ObjectCollectives:
    """Replacements for the functions of the same names; each raises as torch does on bad arguments."""

    def __init__(self, world: VirtualWorld):
        self.world = world
        self.encode: Callable[[Any], Any] = lambda obj: obj  # pipelining sets a codec for its metadata
        self.decode: Callable[[Any], Any] = lambda obj: obj

    # ---- to all, from all ----

    def all_gather_object(self, object_list: list, obj: Any, group=None) -> None:
        group = self._group(group)
        if group is None:
            c10d._warn_not_in_group("all_gather_object")
            return
        world = self.world
        with world.recorder.own_time():
            device = _device(group)
            size = pickled_size(world, obj)
            seq = self._gather(group, "all_gather", "int64", 8, device)
            objects, sizes = self._exchange(group, seq, "all_gather_object", obj, size)
            self._read(device)
            self._gather(group, "all_gather", "uint8", max(sizes), device)
            self._read(device)
            for i, value in enumerate(objects):
                object_list[i] = value

    def gather_object(
        self, obj: Any, object_gather_list: list | None = None, dst=None, group=None, group_dst=None, **_
    ):
        pg = c10d._group_or_default_group(group)
        if dst is None and group_dst is None:
            dst = 0
        root = c10d._canonicalize_group_rank(pg, dst, group_dst, return_global=False)
        group = self._group(pg)
        if group is None:
            c10d._warn_not_in_group("gather_object")
            return
        world = self.world
        c10d._validate_output_list_for_rank(group.rank(), root, object_gather_list)
        with world.recorder.own_time():
            device = _device(group)
            size = pickled_size(world, obj)
            seq = self._gather(group, "all_gather", "int64", 8, device)
            objects, sizes = self._exchange(group, seq, "gather_object", obj, size)
            self._read(device)
            self._gather(group, "gather", "uint8", max(sizes), device, root)
            if group.rank() == root:
                self._read(device)
                assert object_gather_list is not None
                for i, value in enumerate(objects):
                    object_gather_list[i] = value

    # ---- from one ----

    def broadcast_object_list(self, object_list: list, src=None, group=None, device=None, group_src=None, **_) -> None:
        pg = c10d._group_or_default_group(group)
        if src is None and group_src is None:
            src = 0
        root = c10d._canonicalize_group_rank(pg, src, group_src, return_global=False)
        group = self._group(pg)
        if group is None:
            c10d._warn_not_in_group("broadcast_object_list")
            return
        world = self.world
        with world.recorder.own_time():
            device = torch.device(device) if device is not None else _device(group)
            mine = root == group.rank()
            seq = self._rooted(group, "broadcast", "int64", 8 * len(object_list), device, root)
            key = f"collective/{group.entry.index}/{seq}/objects"
            if mine:
                size = sum(pickled_size(world, obj) for obj in object_list)
                self._keep(key, "broadcast_object_list", list(object_list), size)
            else:
                own = list(object_list)
                objects, size = self._replay(key, "broadcast_object_list", group.ranks[root], lambda: own)
                object_list[:] = objects
                self._read(device)
            self._rooted(group, "broadcast", "uint8", size, device, root)
            if not mine:
                self._read(device)

    def scatter_object_list(
        self,
        scatter_object_output_list: list,
        scatter_object_input_list=None,
        src=None,
        group=None,
        group_src=None,
        **_,
    ) -> None:
        pg = c10d._group_or_default_group(group)
        if src is None and group_src is None:
            src = 0
        root = c10d._canonicalize_group_rank(pg, src, group_src, return_global=False)
        group = self._group(pg)
        if group is None:
            c10d._warn_not_in_group("scatter_object_list")
            return
        if not isinstance(scatter_object_output_list, list) or len(scatter_object_output_list) < 1:
            raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
        world = self.world
        with world.recorder.own_time():
            device = _device(group)
            mine = root == group.rank()
            if mine and scatter_object_input_list is None:
                raise ValueError("source rank must provide non-None scatter_object_input_list")
            seq = self._rooted(group, "broadcast", "int64", 8, device, root)
            key = f"collective/{group.entry.index}/{seq}/objects"
            if mine:
                objects = list(scatter_object_input_list)
                size = max(pickled_size(world, obj) for obj in objects)
                self._keep(key, "scatter_object_list", objects, size)
                answer = objects[group.rank()]
            else:
                own = [scatter_object_output_list[0]] * group.size()
                objects, size = self._replay(key, "scatter_object_list", group.ranks[root], lambda: own, total=max)
                answer = objects[group.rank()]
            self._read(device)
            self._scattered(group, "uint8", size, device, root)
            self._scattered(group, "int64", 8, device, root)
            self._read(device)
            scatter_object_output_list[0] = answer

    # ---- one to one ----

    def send_object_list(
        self, object_list: list, dst=None, group=None, device=None, group_dst=None, use_batch=False, **_
    ) -> None:
        pg = c10d._group_or_default_group(group)
        peer = c10d._canonicalize_group_rank(pg, dst, group_dst)
        c10d._check_not_self_rank(pg, peer, "destination")
        group = self._group(pg)
        if group is None:
            c10d._warn_not_in_group("send_object_list")
            return
        world = self.world
        with world.recorder.own_time():
            device = torch.device(device) if device is not None else _device(group)
            destination = group.ranks[peer]
            lane = f"objects/{group.entry.index}/{world.rank}/{destination}"
            key = f"{lane}/{world.next_message(lane)}"
            size = sum(pickled_size(world, obj) for obj in object_list)
            self._keep(key, "send_object_list", [self.encode(obj) for obj in object_list], size)
            self._message(group, Kind.SEND, "int64", len(object_list), destination, device, use_batch)
            self._message(group, Kind.SEND, "uint8", size, destination, device, use_batch)

    def recv_object_list(
        self, object_list: list, src=None, group=None, device=None, group_src=None, use_batch=False, **_
    ) -> int:
        pg = c10d._group_or_default_group(group)
        group = self._group(pg)
        if group is None:
            c10d._warn_not_in_group("recv_object_list")
            return -1
        peer = c10d._canonicalize_group_rank(pg, src, group_src)
        c10d._check_not_self_rank(pg, peer, "source")
        world = self.world
        with world.recorder.own_time():
            device = torch.device(device) if device is not None else _device(group)
            source = group.ranks[peer]
            lane = f"objects/{group.entry.index}/{source}/{world.rank}"
            key = f"{lane}/{world.next_message(lane)}"
            fallback = world.missing_objects(list(object_list))
            objects, size = self._replay(key, "send_object_list", source, fallback, decode=self.decode)
            object_list[:] = objects
            self._message(group, Kind.RECV, "int64", len(object_list), source, device, use_batch)
            self._read(device)
            self._message(group, Kind.RECV, "uint8", size, source, device, use_batch)
            self._read(device)
        return source

    # ---- answers ----

    def _exchange(self, group: RecordingGroup, seq: int, kind: str, own: Any, size: int) -> tuple[list, list[int]]:
        """Every member's object and size; a member not traced before is taken to hold this rank's own."""
        world = self.world
        key = f"collective/{group.entry.index}/{seq}/objects"
        self._keep(key, kind, [own], size)
        objects, sizes, unknown = [], [], False
        for rank in group.ranks:
            theirs = world.payloads.get(rank, key) if rank != world.rank else None
            if theirs is not None and theirs.object is not ABSENT:
                objects.append(theirs.object[0])
            else:
                unknown |= rank != world.rank
                objects.append(own)
            sizes.append(theirs.bytes if theirs is not None else size)
        if unknown:
            world.recorder.assume(f"peers' objects in {kind}", "as this rank's own")
        return objects, sizes

    def _keep(self, key: str, kind: str, objects: list, size: int) -> None:
        payload = Payload(kind, size, "object", object=objects if json_plain(objects) else ABSENT)
        self.world.payloads.put(self.world.rank, key, payload)

    def _replay(
        self,
        key: str,
        kind: str,
        source: int,
        fallback: Callable[[], list],
        *,
        decode: Callable[[Any], Any] = lambda obj: obj,
        total: Callable[..., int] = sum,
    ) -> tuple[list, int]:
        """The source's objects and their size, else the fallback's, counted. ``total``: of the objects' sizes."""
        theirs = self.world.payloads.get(source, key)
        if theirs is not None and theirs.object is not ABSENT:
            return [decode(obj) for obj in theirs.object], theirs.bytes
        own = fallback()
        self.world.recorder.assume(f"{kind} from rank {source}", "the caller's own objects")
        if theirs is not None:
            return own, theirs.bytes
        return own, total(pickled_size(self.world, obj) for obj in own)

    # ---- records ----

    def _group(self, group) -> RecordingGroup | None:
        if c10d._rank_not_in_group(group):
            return None
        return cast("RecordingGroup", c10d._group_or_default_group(group))

    def _read(self, device: torch.device) -> None:
        """The host reads what arrived: on a device it waits for the stream first."""
        if device.type != "cpu":
            self.world.recorder.sync(stream=self.world.recorder.stream)

    def _gather(self, group, name: str, dtype: str, size: int, device: torch.device, root: int = -1) -> int:
        """all_gather or gather of ``size`` bytes per member; returns its running number."""
        elements = size // 8 if dtype == "int64" else size
        own, all_ = TensorMeta((elements,), dtype), TensorMeta((group.size(), elements), dtype)
        outputs = (all_,) if root in (-1, group.rank()) else ()
        call = Call(name, (own,), outputs, size * group.size(), dtype, root)
        return self._issue(group, call, device)

    def _rooted(self, group, name: str, dtype: str, size: int, device: torch.device, root: int) -> int:
        own = TensorMeta((size // 8 if dtype == "int64" else size,), dtype)
        return self._issue(group, Call(name, (own,), (own,), size, dtype, root), device)

    def _scattered(self, group, dtype: str, size: int, device: torch.device, root: int) -> int:
        own = TensorMeta((size // 8 if dtype == "int64" else size,), dtype)
        inputs = (TensorMeta((group.size(), *own.shape), dtype),) if root == group.rank() else ()
        return self._issue(group, Call("scatter", inputs, (own,), size * group.size(), dtype, root), device)

    def _issue(self, group, call: Call, device: torch.device) -> int:
        seq, completion = issue(self.world, group, call, device, asynchronous=False)
        completion.wait(self.world.recorder)
        return seq

    def _message(
        self, group: RecordingGroup, kind: Kind, dtype: str, elements: int, peer: int, device: torch.device, batch: bool
    ) -> None:
        size = elements * (8 if dtype == "int64" else 1)
        message = Message(kind, TensorMeta((elements,), dtype), size, peer)
        if batch and not group.runs_on_host(device):
            with group.batched(device) as works:
                issue_message(self.world, group, message, device)
            works[0].wait()
        else:
            issue_message(self.world, group, message, device).wait(self.world.recorder)


def _device(group: RecordingGroup) -> torch.device:
    return torch.device(c10d._get_object_coll_device(group))


OBJECT_FUNCTIONS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)

__all__ = ["OBJECT_FUNCTIONS", "ObjectCollectives", "pickled_size"]
