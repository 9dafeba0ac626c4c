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
from echo_hooks.world.pipelining import decode, encode
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

    # ---- to all, from all ----

    def all_gather_object(self, object_list: list, obj: Any, group=None) -> None:
        joined = self._group("all_gather_object", group)
        if joined is None:
            return
        with self.world.recorder.own_time():
            device = _device(joined)
            objects, size = self._sizes_and_objects(joined, "all_gather_object", obj, device)
            self._gather(joined, "all_gather", "uint8", size, device)
            self._read(device)
            for i, value in enumerate(objects):
                object_list[i] = value

    def gather_object(self, obj: Any, object_gather_list=None, dst=None, group=None, group_dst=None, **_) -> None:
        joined = self._group("gather_object", group)
        if joined is None:
            return
        root = _root(joined, dst, group_dst)
        c10d._validate_output_list_for_rank(joined.rank(), root, object_gather_list)
        with self.world.recorder.own_time():
            device = _device(joined)
            objects, size = self._sizes_and_objects(joined, "gather_object", obj, device)
            self._gather(joined, "gather", "uint8", size, device, root)
            if joined.rank() == root:
                self._read(device)
                for i, value in enumerate(objects):
                    object_gather_list[i] = value

    def _sizes_and_objects(self, group: RecordingGroup, kind: str, own: Any, device: torch.device) -> tuple[list, int]:
        """The all-gather of sizes that both begin with; every member's object, and the size of the largest.

        A member not traced before is taken to hold this rank's own.
        """
        world = self.world
        size = pickled_size(world, own)
        seq = self._gather(group, "all_gather", "int64", 8, device)
        self._read(device)
        key = _key(group, seq)
        self._keep(key, kind, [own], size)
        objects, unknown = [], False
        for rank in group.ranks:
            theirs = world.payloads.get(rank, key) if rank != world.rank else None
            if theirs is not None:
                size = max(size, theirs.bytes)
            if theirs is not None and theirs.object is not ABSENT:
                objects.append(theirs.object[0])
            else:
                objects.append(own)
                unknown |= rank != world.rank
        if unknown:
            world.recorder.assume(f"peers' objects in {kind}", "as this rank's own")
        return objects, size

    # ---- from one ----

    def broadcast_object_list(self, object_list: list, src=None, group=None, device=None, group_src=None, **_) -> None:
        joined = self._group("broadcast_object_list", group)
        if joined is None:
            return
        root = _root(joined, src, group_src)
        with self.world.recorder.own_time():
            device = _device(joined, device)
            seq = self._rooted(joined, "int64", 8 * len(object_list), device, root)
            if joined.rank() == root:
                size = sum(pickled_size(self.world, obj) for obj in object_list)
                self._keep(_key(joined, seq), "broadcast_object_list", list(object_list), size)
                self._rooted(joined, "uint8", size, device, root)
                return
            self._read(device)
            own, source = list(object_list), joined.ranks[root]
            object_list[:], size = self._replay(_key(joined, seq), "broadcast_object_list", source, lambda: own)
            self._rooted(joined, "uint8", size, device, root)
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
        kind, output, inputs = "scatter_object_list", scatter_object_output_list, scatter_object_input_list
        joined = self._group(kind, group)
        if joined is None:
            return
        root = _root(joined, src, group_src)
        if not isinstance(output, list) or len(output) < 1:
            raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
        if joined.rank() == root and inputs is None:
            raise ValueError("source rank must provide non-None scatter_object_input_list")
        with self.world.recorder.own_time():
            device = _device(joined)
            seq = self._rooted(joined, "int64", 8, device, root)
            if joined.rank() == root:
                objects, size = list(inputs), max(pickled_size(self.world, obj) for obj in inputs)
                self._keep(_key(joined, seq), kind, objects, size)
            else:
                own, source = output[:1] * joined.size(), joined.ranks[root]
                objects, size = self._replay(_key(joined, seq), kind, source, lambda: own, total=max)
            self._read(device)
            self._scattered(joined, "uint8", size, device, root)
            self._scattered(joined, "int64", 8, device, root)
            self._read(device)
            output[0] = objects[joined.rank()]

    # ---- one to one ----

    def send_object_list(
        self, object_list: list, dst=None, group=None, device=None, group_dst=None, use_batch=False, **_
    ) -> None:
        joined = self._group("send_object_list", group)
        if joined is None:
            return
        peer = c10d._canonicalize_group_rank(joined, dst, group_dst)
        c10d._check_not_self_rank(joined, peer, "destination")
        with self.world.recorder.own_time():
            device, destination = _device(joined, device), joined.ranks[peer]
            size = sum(pickled_size(self.world, obj) for obj in object_list)
            key = self._message_key(joined, self.world.rank, destination)
            self._keep(key, "send_object_list", [encode(obj) for obj in object_list], size)
            self._message(joined, Kind.SEND, "int64", len(object_list), destination, device, use_batch)
            self._message(joined, Kind.SEND, "uint8", size, destination, device, use_batch)

    def recv_object_list(
        self, object_list: list, src=None, group=None, device=None, group_src=None, use_batch=False, **_
    ) -> int:
        joined = self._group("recv_object_list", group)
        if joined is None:
            return -1
        peer = c10d._canonicalize_group_rank(joined, src, group_src)
        c10d._check_not_self_rank(joined, peer, "source")
        with self.world.recorder.own_time():
            device, source = _device(joined, device), joined.ranks[peer]
            key = self._message_key(joined, source, self.world.rank)
            fallback = self.world.missing_objects(list(object_list))
            objects, size = self._replay(key, "send_object_list", source, fallback)
            object_list[:] = [decode(obj) for obj in objects]
            self._message(joined, Kind.RECV, "int64", len(object_list), source, device, use_batch)
            self._read(device)
            self._message(joined, Kind.RECV, "uint8", size, source, device, use_batch)
            self._read(device)
        return source

    def _message_key(self, group: RecordingGroup, source: int, destination: int) -> str:
        lane = f"objects/{group.entry.index}/{source}/{destination}"
        return f"{lane}/{self.world.next_message(lane)}"

    # ---- answers ----

    def _keep(self, key: str, kind: str, objects: list, size: int) -> None:
        payload = Payload(kind, size, "object", object=objects if json_plain(objects) else ABSENT)
        self.world.payloads.put(self.world.rank, key, payload)

    def _replay(
        self, key: str, kind: str, source: int, fallback: Callable[[], list], total: Callable[..., int] = sum
    ) -> tuple[list, int]:
        """The source's objects and their size, else the fallback's, counted. ``total``: of the objects' sizes."""
        theirs = self.world.payloads.get(source, key)
        if theirs is not None and theirs.object is not ABSENT:
            return theirs.object, theirs.bytes
        self.world.unanswered.add(source)
        own = fallback()
        self.world.recorder.assume(f"{kind} from rank {source}", "the caller's own objects")
        if theirs is not None:
            return own, theirs.bytes
        return own, total(pickled_size(self.world, obj) for obj in own)

    # ---- records ----

    def _group(self, name: str, group: Any) -> RecordingGroup | None:
        """The group meant by the caller; None, with torch's warning, when this rank is no member."""
        if c10d._rank_not_in_group(group):
            c10d._warn_not_in_group(name)
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
        call = Call(name, (own,), outputs, size * group.size(), dtype, root, _attributes(dtype))
        return self._issue(group, call, device)

    def _rooted(self, group, dtype: str, size: int, device: torch.device, root: int) -> int:
        own = TensorMeta((size // 8 if dtype == "int64" else size,), dtype)
        return self._issue(group, Call("broadcast", (own,), (own,), size, dtype, root, _attributes(dtype)), device)

    def _scattered(self, group, dtype: str, size: int, device: torch.device, root: int) -> int:
        own = TensorMeta((size // 8 if dtype == "int64" else size,), dtype)
        inputs = (TensorMeta((group.size(), *own.shape), dtype),) if root == group.rank() else ()
        call = Call("scatter", inputs, (own,), size * group.size(), dtype, root, _attributes(dtype))
        return self._issue(group, call, device)

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


def _attributes(dtype: str) -> tuple[tuple[str, bool], ...]:
    """Pickled objects travel in messages as long as the longest, which no rank alone knows."""
    return (("objects", True),) if dtype == "uint8" else ()


def _device(group: RecordingGroup, asked: Any = None) -> torch.device:
    """Where the tensors of an object collective live: as asked, else as torch chooses."""
    return torch.device(asked if asked is not None else c10d._get_object_coll_device(group))


def _root(group: RecordingGroup, global_rank: int | None, group_rank: int | None) -> int:
    """Group rank of the root; global rank 0 when neither is given."""
    if global_rank is None and group_rank is None:
        global_rank = 0
    return c10d._canonicalize_group_rank(group, global_rank, group_rank, return_global=False)


def _key(group: RecordingGroup, seq: int) -> str:
    return f"collective/{group.entry.index}/{seq}/objects"


OBJECT_FUNCTIONS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)

__all__ = ["OBJECT_FUNCTIONS", "ObjectCollectives", "pickled_size"]
