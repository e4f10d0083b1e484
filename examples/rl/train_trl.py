"""Two steps of GRPO with TRL on the real reward: a random two-layer model and a byte tokenizer, all on the CPU. Nothing is downloaded.

    pip install 'peerlane[serve]' trl
    export PEERLANE_TOKEN=$(openssl rand -hex 16) PEERLANE_URL=http://127.0.0.1:8300
    peerlane serve --device cpu --world-size 2 &
    python examples/rl/train_trl.py

A random model writes no kernels, so two of four completions are replaced by candidates: one that is right and one that is wrong.
"""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from peerlane.service.adapters.reward import RewardSettings
from peerlane.service.adapters.trl import reward_function

RIGHT = """```python
import torch.distributed as dist

def solution(tensor):
    out = tensor.clone()
    dist.all_reduce(out)
    return out
```"""
WRONG = "```python\ndef solution(tensor):\n    return tensor.clone()\n```"

seen: list[list[float | None]] = []
judge = reward_function(RewardSettings(options={"presets": ("small",), "modes": (), "track": "open"}))


async def kernel_reward(prompts, completions, problem, **columns):
    """The real reward, with two replies that mean something."""
    replies = [RIGHT, WRONG, *completions[2:]]
    rewards = await judge(prompts, replies, problem, **columns)
    seen.append(rewards)
    return rewards


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<pad>": len(vocabulary), "<eos>": len(vocabulary) + 1}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def main() -> None:
    tokens = tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"pad_token_id": tokens.pad_token_id, "eos_token_id": tokens.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), max_position_embeddings=256, **shape, **ends))
    data = Dataset.from_list([{"prompt": "Write an all-reduce.", "problem": 1} for _ in range(4)])
    settings = GRPOConfig(
        output_dir="peerlane-rl",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        max_steps=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    GRPOTrainer(model=model, reward_funcs=[kernel_reward], args=settings, train_dataset=data, processing_class=tokens).train()
    print("rewards by step:", seen)


if __name__ == "__main__":
    main()
