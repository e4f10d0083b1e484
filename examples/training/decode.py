"""Train a small GPT in tensor parallel, then decode from it: one CUDA graph a token with peerlane, beside eager torch on NCCL.

torchrun --nproc-per-node 2 examples/training/decode.py         on two GPUs, on one that they share, or on the CPU

The tokens must be the same. On CPU ranks there is no graph.
"""

import time

import gpt
import tensor_parallel
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

SEQUENCES, PROMPT = 8, 4


class Decoder:
    """Greedy decoding with caches of keys and values. All of its state lies in tensors that stay where they are, as a graph needs."""

    def __init__(self, model: gpt.GPT, device: torch.device) -> None:
        self.model, self.device = model, device
        heads = gpt.HEADS // dist.get_world_size()
        caches = (gpt.LAYERS, 2, SEQUENCES, heads, gpt.CONTEXT, gpt.HEAD)
        self.caches = torch.zeros(caches, device=device, dtype=tensor_parallel.precision(device))
        self.tokens = torch.zeros(SEQUENCES, gpt.CONTEXT, dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.places = torch.arange(gpt.CONTEXT, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Reads the token at ``place``, writes the one behind it unless the prompt has it, and goes on by one."""
        dtype = self.caches.dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            x = self.model.token(self.tokens.index_select(1, self.place)) + self.model.position(self.place)
            seen = (self.places <= self.place).view(1, 1, 1, -1)
            for block, cache in zip(self.model.blocks, self.caches, strict=True):
                q, *new = block.attention.heads(block.norm1(x))
                for old, own in zip(cache, new, strict=True):
                    old.index_copy_(2, self.place, own.to(dtype))
                y = functional.scaled_dot_product_attention(q.to(dtype), cache[0], cache[1], seen)
                x = x + block.attention.out(y.transpose(1, 2).flatten(2))
                x = x + block.down(functional.gelu(block.up(block.norm2(x))))
            best = self.model.head(self.model.norm(x)).float().argmax(-1)
        after = self.place + 1
        kept = self.tokens.index_select(1, after)
        self.tokens.index_copy_(1, after, torch.where(after < PROMPT, kept, best))
        self.place += 1

    def restart(self, prompt: torch.Tensor) -> None:
        self.tokens.zero_()[:, :PROMPT] = prompt
        self.place.zero_()

    def decode(self, prompt: torch.Tensor, graph: bool) -> tuple[torch.Tensor, float]:
        """All tokens, and microseconds for each."""
        run = self.step
        if graph:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step()  # kernels are compiled and bound before the capture
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self.step()
            run = captured.replay
        for _ in range(2):  # the first time warms up
            self.restart(prompt)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(gpt.CONTEXT - 1):
                run()
            tokens = self.tokens.cpu()  # waits
        return tokens, (time.perf_counter() - start) / (gpt.CONTEXT - 1) * 1e6


if __name__ == "__main__":
    options, device = gpt.arguments(), gpt.start()
    graph = device.type == "cuda"
    model, losses = tensor_parallel.trained("peerlane", device, options)
    whole = gpt.build(device)
    whole.load_state_dict({key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in model.state_dict().items()})
    other = tensor_parallel.split(whole, init_device_mesh(device.type, (dist.get_world_size(),)), "torch")
    prompt = gpt.batch(10_000, 0, device)[:SEQUENCES, :PROMPT]
    ours, ours_us = Decoder(model, device).decode(prompt, graph)
    theirs, theirs_us = Decoder(other, device).decode(prompt, False)
    if dist.get_rank() == 0:
        follows = (5 * ours[:, PROMPT - 1 : -1] + 3) % gpt.VOCABULARY == ours[:, PROMPT:]
        print(f"loss {losses[0]:.5f} to {losses[-1]:.5f}; {float(follows.float().mean()):.0%} of the tokens follow the rule")
        print(f"microseconds a token: peerlane {ours_us:.0f}{' in a graph' if graph else ''}, torch.distributed {theirs_us:.0f}")
    assert torch.equal(ours, theirs), f"{int((ours != theirs).sum())} of {ours.numel()} tokens differ"
    dist.destroy_process_group()
