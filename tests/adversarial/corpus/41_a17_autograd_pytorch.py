"""A17: leaves the gradient to autograd and the update to torch.optim.Adam, on the rank's stretch of one flat parameter."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def solution(X_local, y_local, W1, b1, W2, b2, exp_avg_part, exp_avg_sq_part, lr, beta1, beta2, eps, step):
    dtype, shapes, world = W1.dtype, [p.shape for p in (W1, b1, W2, b2)], dist.get_world_size()
    flat = torch.cat([p.detach().reshape(-1) for p in (W1, b1, W2, b2)])
    dist.broadcast(flat, 0)
    with torch.enable_grad():
        leaf = flat.float().requires_grad_()
        w1, c1, w2, c2 = (p.view(shape) for p, shape in zip(leaf.split([s.numel() for s in shapes]), shapes, strict=True))
        hidden = F.relu(F.linear(X_local.float(), w1, c1))
        F.mse_loss(F.linear(hidden, w2, c2), y_local.float()).backward()
    gradient = leaf.grad
    dist.all_reduce(gradient)

    size = exp_avg_part.numel()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    part = torch.nn.Parameter(flat[mine].float())
    part.grad = gradient[mine] / world
    adam = torch.optim.Adam([part], lr=lr, betas=(beta1, beta2), eps=eps)
    state = {"step": torch.tensor(float(step - 1)), "exp_avg": exp_avg_part.float(), "exp_avg_sq": exp_avg_sq_part.float()}
    adam.state[part] = {name: value.clone() for name, value in state.items()}
    adam.step()

    updated = part.detach().to(dtype)
    whole = [torch.empty_like(updated) for _ in range(world)]
    dist.all_gather(whole, updated)
    parameters = torch.cat(whole).split([s.numel() for s in shapes])
    moments = (adam.state[part][name].to(dtype) for name in ("exp_avg", "exp_avg_sq"))
    return (*(p.view(shape) for p, shape in zip(parameters, shapes, strict=True)), *moments)
