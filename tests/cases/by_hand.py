"""No wrapper: gradients reduced by hand, the parameters sharded by hand, two optimizers (a GAN's), one group a node."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl", device_id=torch.device("cuda:0") if not dist.is_torchelastic_launched() else None)
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
node, _ = dist.new_subgroups(min(4, world))
generator, critic = (torch.nn.Linear(32, n, device="cuda") for n in (32, 1))
for p in (*generator.parameters(), *critic.parameters()):
    dist.broadcast(p.data, src=0)
optimizers = [torch.optim.RMSprop(m.parameters(), lr=1e-3) for m in (critic, generator)]


def average(model):
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        g.copy_(part.view_as(g))


for _ in range(10):
    noise = torch.randn(8, 32, device="cuda")
    real = torch.randn(8, 32, device="cuda")
    for sign, (model, optimizer) in zip((1, -1), ((critic, optimizers[0]), (generator, optimizers[1]))):
        optimizer.zero_grad()
        loss = sign * (critic(generator(noise)).mean() - critic(real).mean())
        loss.backward()
        average(model)
        optimizer.step()
    shard = torch.empty(32 * 32 // dist.get_world_size(node), device="cuda")
    work = dist.reduce_scatter_tensor(shard, generator.weight.detach().flatten(), group=node, async_op=True)
    work.wait()
    losses = [torch.empty_like(loss) for _ in range(world)] if rank == 0 else None
    dist.gather(loss.detach(), losses, dst=0)
    if rank == 0:
        print(f"mean loss {torch.stack(losses).mean().item():.3f}")
