"""What several test files and their worker processes share: tiny models, the naive reference, launching processes.

`naive_loss` is the whole method once more in the plainest form: full logits, one sequence at a time, no packing, no
chunks, no sharding. Everything faster is held against it.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # workers run without pytest, hence without conftest.py

from model import PackedAttention, Qwen3, Qwen3Config, save_weights  # noqa: E402
from rollout import Rollout  # noqa: E402


def tiny_config(tied=True, vocab=37, head_dim=8, **changes):
    """Sizes that divide by nothing: 37 rows over 2 or 3 processes, head_dim apart from hidden / heads."""
    sizes = dict(vocab_size=vocab, hidden_size=20, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=4096, rope_theta=10000.0,
                 rms_norm_eps=1e-6, tie_word_embeddings=tied, initializer_range=0.3)  # fmt: skip
    return Qwen3Config(**{**sizes, **changes})


def tiny_model(config, seed=0):
    """Random weights, wide enough (0.3) that the distribution is far from uniform; norms away from 1 as well."""
    model = Qwen3(config).init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def write_model(model, folder):
    """A checkpoint folder without tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {k: v for k, v in vars(model.config).items()}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **values}))
    save_weights(((name, p.detach()) for name, p in model.named_parameters()), folder)
    return folder


def config_of(raw, folder):
    """Writes the dict `raw` as config.json of `folder` and reads it back as a Qwen3Config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return Qwen3Config.from_json(folder / "config.json")


def tiny_rollouts(shapes, vocab, seed=0):
    """shapes: (prompt tokens, completion tokens) of each -> rollouts of random tokens, log-probs near log(1/vocab)."""
    draw = random.Random(seed)
    return [
        Rollout([draw.randrange(vocab) for _ in range(p)], [draw.randrange(vocab) for _ in range(c)],
                [draw.uniform(-5.0, -1.0) for _ in range(c)])
        for p, c in shapes
    ]  # fmt: skip


def naive_logprobs(model, rollout, temperature, valid_vocab):
    """(completion tokens,): one sequence alone, full logits, plain log_softmax."""
    ids = torch.tensor(rollout.prompt + rollout.completion)
    hidden = model(ids[:-1], torch.arange(len(ids) - 1), PackedAttention([0, len(ids) - 1]))
    logits = (hidden @ model.head_weight.T)[:, :valid_vocab] / temperature
    logprobs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    return logprobs[len(rollout.prompt) - 1 :]


def naive_loss(model, rollouts, advantages, denominator, temperature, valid_vocab, epsilon, kl_coef=0.0, reference=None):
    """design.md, section 3, word by word, over every sequence: those without advantage too."""
    total = 0.0
    for rollout, advantage in zip(rollouts, advantages):
        logprobs = naive_logprobs(model, rollout, temperature, valid_vocab)
        for t, recorded in enumerate(rollout.logprobs):
            ratio = float(torch.exp(logprobs[t].detach() - recorded))
            total = total - advantage * min(ratio, 1 + epsilon) * logprobs[t]
        if kl_coef:
            d = naive_logprobs(reference, rollout, temperature, valid_vocab).detach() - logprobs
            total = total + kl_coef * (torch.exp(d) - d - 1).sum()
    return total / denominator


def gradients(model):
    """{name: gradient}; a parameter that got none counts as zeros."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def distance(found, expected):
    """The largest difference between two {name: tensor}, relative to each tensor's largest element."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n].double() - e.double()).abs().max() / e.double().abs().max().clamp(min=1e-12))
        for n, e in expected.items()
    )


def launch(processes, script, *args, timeout=120, **environment):
    """Runs a script by torchrun on `processes` processes, or by plain python if that is 0."""
    distributed = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes else []
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *distributed, str(script), *map(str, args)],
        cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
