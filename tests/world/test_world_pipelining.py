from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, _utils

from echo_hooks.errors import ScriptError
from echo_hooks.world.pipelining import decode, encode, greetings


def test_shapes_survive_json():
    metas = (torch.empty(2, 3, device="meta", dtype=torch.bfloat16), torch.empty(4, device="meta").requires_grad_())
    again = decode(json.loads(json.dumps(encode(metas))))
    assert [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in again] == [
        (t.shape, t.stride(), t.dtype, t.requires_grad) for t in metas
    ]
    assert encode({"a": 1}) == {"a": 1} and decode([1]) == [1] and encode((1, 2)) == (1, 2)


def test_torchs_own_metadata_survives_json():
    if not hasattr(_utils, "_StageForwardMeta"):
        pytest.skip("before torch 2.13 the metadata are tensors")
    meta = _utils._TensorMeta(shape=torch.Size([2, 3]), stride=(3, 1), dtype=torch.float16, requires_grad=True)
    for message in (_utils._StageForwardMeta((meta,)), _utils._StageBackwardMeta((meta, None))):
        assert decode(json.loads(json.dumps(encode(message)))) == message


def run_stage(rank: int, world_size: int, width: int):
    """One step of a pipeline whose stages widen their activations."""
    sizes = [width * (i + 1) for i in range(world_size + 1)]
    module = torch.nn.Linear(sizes[rank], sizes[rank + 1])
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 3, loss_fn=lambda out, target: out.sum() - target.sum())
    arguments = (torch.ones(6, sizes[0]),) if rank == 0 else ()
    keywords = dict(target=torch.ones(6, sizes[-1]), losses=[]) if rank == world_size - 1 else {}
    schedule.step(*arguments, **keywords)


def test_unequal_stages_in_order(world):
    """Forward shapes come from the stage before; the last dimensions differ, so mirroring would fail."""
    for rank in range(3):
        run = world(rank=rank, world_size=3)
        run_stage(rank, 3, 8)
        received = [
            r["bytes"] for r in run.records() if r["kind"] == "recv" and r["dtype"] == "float32" and r["bytes"] > 4
        ]
        forward, backward = [2 * 8 * (rank + 1) * 4] * 3, [2 * 8 * (rank + 2) * 4] * 3
        assert received == ([] if rank == 0 else forward) + ([] if rank == 2 else backward)


def test_a_stage_that_cannot_know_its_shapes_says_so(world):
    world(rank=2, world_size=3)
    with pytest.raises(ScriptError, match="Rank 2 runs pipeline stage 2, whose input shapes come from stage 1"):
        run_stage(2, 3, 8)
    assert dist.is_initialized()


def test_greetings_are_received_as_they_are_sent(world):
    """torch 2.9 sends its stage's number as int64 and receives a float32."""
    world(rank=1, world_size=3)

    def of_torch_2_9(_stage):
        number, answer = torch.tensor(1), torch.zeros(1)
        return [dist.P2POp(dist.irecv, answer, 0), dist.P2POp(dist.isend, number, 2), dist.P2POp(dist.irecv, answer, 2)]

    assert [op.tensor.dtype for op in greetings(of_torch_2_9)(None)] == [torch.int64] * 3


def test_chunks_name_their_micro_batch(world):
    """Forward and backward; what is between them (the sends and receives of a schedule) belongs to none."""
    run = world(rank=0, world_size=2)
    seen = []

    class Watched(torch.nn.Linear):
        def forward(self, x):
            seen.append(("forward", run.world.recorder.microbatch))
            y = super().forward(x)
            y.register_hook(lambda _: seen.append(("backward", run.world.recorder.microbatch)))
            return y

    stage = PipelineStage(Watched(8, 8), 0, 2, torch.device("cpu"))
    ScheduleGPipe(stage, 3, loss_fn=lambda out, target: out.sum()).step(torch.ones(6, 8))
    assert seen[-6:] == [(way, number) for way in ("forward", "backward") for number in range(3)]
    assert run.world.recorder.microbatch == -1
