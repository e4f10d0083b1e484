"""Train a GPT in tensor parallel, then decode from it: one CUDA graph a token with peerlane, beside eager torch on NCCL.

torchrun --nproc-per-node 2 examples/training/decode.py                                   on two GPUs, one that they share, or the CPU
torchrun --nproc-per-node 2 examples/training/decode.py --model 1.4b --steps 60           at a real size, on two GPUs
torchrun --nproc-per-node 2 examples/training/decode.py --checkpoint gpt                  what fsdp2.py has trained, at any number of ranks

The tokens must be the same. A model that has not learned the rule of the data has near ties, which two libraries may break differently.
On CPU ranks there is no graph.
"""

import copy
import time
from dataclasses import replace

import gpt
import tensor_parallel
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

SEQUENCES, PROMPT, TOKENS = 8, 4, 128


class Decoder:
    """Greedy decoding with caches of keys and values. All of its state lies in tensors that stay where they are, as a graph needs."""

    def __init__(self, model: gpt.GPT, size: gpt.Size, device: torch.device) -> None:
        self.model, self.length = model, min(size.context, TOKENS)
        heads = size.width // size.head // dist.get_world_size()
        caches = (size.layers, 2, SEQUENCES, heads, self.length, size.head)
        self.caches = torch.zeros(caches, device=device, dtype=model.token.weight.dtype)
        self.tokens = torch.zeros(SEQUENCES, self.length, dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.places = torch.arange(self.length, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Reads the token at ``place``, writes the one behind it unless the prompt has it, and goes on by one."""
        x = self.model.token(self.tokens.index_select(1, self.place)) + self.model.position(self.place)
        seen = (self.places <= self.place).view(1, 1, 1, -1)
        for block, cache in zip(self.model.blocks, self.caches, strict=True):
            q, *new = block.attention.heads(block.norm1(x))
            for old, own in zip(cache, new, strict=True):
                old.index_copy_(2, self.place, own)
            y = functional.scaled_dot_product_attention(q, cache[0], cache[1], seen)
            x = x + block.attention.out(y.transpose(1, 2).flatten(2))
            x = x + block.down(functional.gelu(block.up(block.norm2(x))))
        best = self.model.head(self.model.norm(x)).argmax(-1)
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
            for _ in range(self.length - 1):
                run()
            tokens = self.tokens.cpu()  # waits
        return tokens, (time.perf_counter() - start) / (self.length - 1) * 1e6


if __name__ == "__main__":
    options, device = gpt.arguments(), gpt.start()
    graph, size = device.type == "cuda", gpt.SIZES[options.model]
    whole, losses = gpt.build(size, device), []
    if options.checkpoint is not None:
        dcp.load({"model": whole.state_dict()}, checkpoint_id=options.checkpoint)
    else:
        model, training = tensor_parallel.trained("peerlane", device, options)
        losses, state = training.losses.tolist(), model.state_dict()
        whole.load_state_dict({key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()})
    whole = whole.to(tensor_parallel.precision(device, size))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    ours, theirs = (Decoder(tensor_parallel.split(copy.deepcopy(whole), mesh, styles), size, device) for styles in tensor_parallel.STYLES)
    prompt = gpt.batch(replace(size, batch=SEQUENCES), 10_000, 0, device)[:, :PROMPT]
    tokens, ours_us = ours.decode(prompt, graph)
    other_tokens, theirs_us = theirs.decode(prompt, False)
    if dist.get_rank() == 0:
        follows = gpt.follower(tokens[:, PROMPT - 1 : -1]) == tokens[:, PROMPT:]
        if losses:
            print(f"loss {losses[0]:.5f} to {losses[-1]:.5f}")
        print(f"{float(follows.float().mean()):.0%} of the tokens follow the rule")
        print(f"microseconds a token: peerlane {ours_us:.0f}{' in a graph' if graph else ''}, torch.distributed {theirs_us:.0f}")
        ours, theirs = {"us_a_token": ours_us, "graph": graph, "losses": losses}, {"us_a_token": theirs_us, "graph": False}
        gpt.store(options, {"peerlane": ours, "torch.distributed": theirs})
    assert torch.equal(tokens, other_tokens), f"{int((tokens != other_tokens).sum())} of {tokens.numel()} tokens differ"
    dist.destroy_process_group()
