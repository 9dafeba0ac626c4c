"""Steps that do not communicate alike are told, with what changed."""

from echo_hooks.capture.steadiness import unsteady
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature
from echo_hooks.graph.program import Kind, ProgramBuilder


def sentence(*steps: list[tuple[str, int]]) -> str | None:
    groups = GroupTable()
    groups.add((0, 1), name="dp")
    names = sorted({name for step in steps for name, _ in step})
    builder, edges = ProgramBuilder(), []
    for step in steps:
        begin = len(builder)
        builder.append(Kind.COMPUTE)
        for name, size in step:
            builder.append(Kind.COLLECTIVE, op=names.index(name), group=0, bytes=size)
        edges.append((begin, len(builder)))
    return unsteady(builder.program(), [OpSignature(name) for name in names], groups, edges, 1)


def test_alike():
    step = [("all_gather", 8), ("all_reduce", 4)]
    assert sentence(step, step[::-1], step) is None
    assert sentence(step) is None


def test_a_plan_that_still_changes():
    said = sentence([("all_gather", 8)] * 2, [("all_gather", 8)] * 2, [("all_gather", 16), ("barrier", 4)])
    assert said is not None
    assert said.startswith("step 3 does not communicate as step 2 does (2 all_gather on dp fewer; 1 all_gather on dp")
    assert "--warmup-steps 3" in said
