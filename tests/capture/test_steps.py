"""Where a training step ends, whatever the loop looks like."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from echo_hooks.capture.steps import StepsDone
from echo_hooks.graph.program import Kind, Phase

pytestmark = pytest.mark.usefixtures("stage")


def loop(step, limit=10):
    """Calls of ``step`` until the capture ends it; that it does is part of the test."""
    done = 0
    with pytest.raises(StepsDone):
        for _ in range(limit):
            step()
            done += 1
    return done


def linear():
    return nn.Linear(4, 4).cuda()


def batch():
    return torch.randn(2, 4, device="cuda")


def measured(echo) -> list[str]:
    """Names of the kernels of the measured steps."""
    trace = echo.capture.trace()
    return [trace.ops[op].name.split(".")[1] for op in trace.program.op[trace.program.kind == Kind.COMPUTE]]


def test_a_plain_loop_gives_one_period(echo):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()

    assert loop(step) == 2  # it ends once the backward pass of the third begins
    trace = echo.capture.trace()
    assert trace.steps == 1 and echo.capture.missing_steps() is None
    # From just after one optimizer call to just after the next: the input needs no gradient, the bias is a sum.
    assert measured(echo) == ["randn", "addmm", "sum", "ones_like", "mm", "sum", "_foreach_add_"]
    program = trace.program
    names = [trace.ops[op].name for op in program.op[program.kind == Kind.MARK]]
    assert names == ["step_begin", "step_end"]
    assert program.kind[0] == program.kind[-1] == Kind.MARK
    assert program.phase[-2] == Phase.OPTIMIZER


@pytest.mark.parametrize("warmup, steps", [(0, 1), (1, 1), (1, 3), (3, 2)])
def test_as_many_steps_as_asked_for(watch, warmup, steps):
    echo = watch(warmup, steps)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(batch()).sum().backward()
        optimizer.step()

    assert loop(step) == warmup + steps
    assert echo.capture.trace().steps == steps
    assert measured(echo).count("addmm") == steps
    assert len(echo.capture.trace().prologue) > 0


def test_the_first_step_without_warm_up_begins_at_the_first_module(watch):
    echo = watch(0, 1)
    model = linear()
    nn.init.ones_(model.weight)  # set-up
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = batch()

    def step():
        model(data).sum().backward()
        optimizer.step()

    loop(step)
    assert measured(echo)[0] == "addmm"


def test_gradient_accumulation_is_one_step(echo):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        for _ in range(4):
            model(batch()).sum().backward()
        optimizer.step()

    assert loop(step) == 2
    assert measured(echo).count("addmm") == 4


def test_several_calls_in_a_row_are_one_step(echo):
    """ZeRO steps each of its parameter groups by a call of its own."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(batch()).sum().backward()
        for _ in range(3):
            optimizer.step()

    assert loop(step) == 2
    assert measured(echo).count("_foreach_add_") == 3 and measured(echo).count("addmm") == 1


def test_two_optimizers_after_one_backward(echo):
    """Muon for the matrices, AdamW for the rest: the period holds both once."""
    model = linear()
    matrices, rest = torch.optim.SGD([model.weight], 0.1), torch.optim.AdamW([model.bias], foreach=True)

    def step():
        model(batch()).sum().backward()
        matrices.step()
        rest.step()

    assert loop(step) == 2
    assert measured(echo).count("_foreach_addcdiv_") == 1 and measured(echo).count("_foreach_add_") >= 1
    assert measured(echo).count("addmm") == 1


def test_two_optimizers_in_turn(echo):
    """A GAN: the discriminator's step, then the generator's, are one step together."""
    generator, critic = linear(), linear()
    of_critic, of_generator = (torch.optim.SGD(m.parameters(), 0.1) for m in (critic, generator))

    def step():
        critic(generator(batch()).detach()).sum().backward()
        of_critic.step()
        critic(generator(batch())).sum().backward()
        of_generator.step()

    assert loop(step) == 1  # from the critic's first step to its second
    assert measured(echo).count("addmm") == 4 and measured(echo).count("_foreach_add_") == 2


def test_the_optimizer_inside_backward(echo):
    model = nn.Sequential(linear(), linear())
    optimizers = {p: torch.optim.SGD([p], 0.1, foreach=False) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step():
        model(batch()).sum().backward()

    loop(step)
    assert measured(echo).count("addmm") == 2
    assert measured(echo).count("add_") == 4


def test_a_closure(echo):
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).sum()
        loss.backward()
        return loss

    loop(lambda: optimizer.step(closure))
    assert measured(echo).count("addmm") == 1


def test_a_training_loop_in_a_thread_ends_too(echo):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    done = []

    def train():
        for _ in range(5):
            model(batch()).sum().backward()
            optimizer.step()
            done.append(1)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(done) == 2 and echo.capture.trace().steps == 1


def test_tokens_are_those_trained_on(echo):
    """An evaluation looks up more; a table of positions looks up fewer."""
    words, places = nn.Embedding(50, 4, device="cuda"), nn.Embedding(8, 4, device="cuda")
    optimizer = torch.optim.SGD([*words.parameters(), *places.parameters()], 0.1)

    def embedded(rows):
        return words(torch.randint(50, (rows, 8), device="cuda")) + places(torch.arange(8, device="cuda"))

    def step():
        embedded(3).sum().backward()
        optimizer.step()
        with torch.no_grad():
            embedded(100)

    loop(step)
    assert echo.capture.trace().tokens_per_step == 3 * 8


def test_tokens_of_frozen_embeddings(echo):
    words, head = nn.Embedding(50, 4, device="cuda").requires_grad_(False), linear()
    optimizer = torch.optim.SGD(head.parameters(), 0.1)

    def step():
        head(words(torch.randint(50, (3, 8), device="cuda"))).sum().backward()
        optimizer.step()

    loop(step)
    assert echo.capture.trace().tokens_per_step == 3 * 8


# ---- too few ----


def test_a_last_step_without_another_backward_counts(echo):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(batch()).sum().backward()
        optimizer.step()
    assert echo.capture.trace().steps == 1 and echo.capture.missing_steps() is None


def test_too_few_steps_are_said_with_what_was_made_up(echo):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    flag = torch.empty((), device="cuda") < 0
    model(batch()).sum().backward()
    optimizer.step()
    if flag:
        raise AssertionError
    trace = echo.capture.trace()
    assert trace.steps == 0 and len(trace.program) == 0 and len(trace.prologue) > 0
    sentence = echo.capture.missing_steps()
    assert sentence.startswith("rank 0: the script ended after 1 optimizer step(s), but 1 warm-up and 1 measured")
    assert "value of an unknown bool tensor answered with False at test_steps.py:" in sentence
    assert "\n" not in sentence


def test_the_hooks_of_optimizers_are_taken_out(stage, watch):
    echo = watch()
    echo.capture.stop()
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    assert not _global_optimizer_post_hooks and not _global_optimizer_pre_hooks
    echo.capture.start()
