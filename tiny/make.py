"""Makes everything in tiny/ but the text files: tokenizer, problems, and a Qwen3 of 0.8 million parameters that can
do the arithmetic but often slips. `python tiny/make.py` makes all of it, in about 7 minutes if a core is free.

The model first learns from clean demonstrations, then from careless ones, in which each digit of a result is wrong
with a fixed probability. What it has at the end is the skill without the habit: two first tries in five are right, and
nearly always one of sixteen. That is the state in which RL finds a base model, in small.
"""

import argparse
import itertools
import json
import math
import random
import sys
import time
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, normalizers, pre_tokenizers, processors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data import INSTRUCTION, Tokenizer, load_problems
from estimates import pass_at_k
from eval import all_pairs, attempt, share
from model import Qwen3, Qwen3Config, load_weights, save_weights
from tiny.problems import careless, demonstration, distinct, draw_split, row

HERE = Path(__file__).resolve().parent
PARTS = ["tokenizer", "problems", "clean", "careless"]
PROBLEMS = {"train": 4096, "test": 1024}
CLEAN = {"steps": 1200, "lr": 2e-3, "muon_lr": 0.02, "error_rate": 0.0}  # the skill
CARELESS = {"steps": 150, "lr": 3e-4, "muon_lr": 0.0, "error_rate": 0.2}  # the lost habit
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# single tokens by decree, so that prompts and completions are short; the pre-tokenizer would split the sentence
PLAIN = ["<think>", "</think>", INSTRUCTION, "\\boxed{"]
MERGED = ["system", "user", "assistant", "ĊĊ"]  # single tokens by BPE merges (Ċ is the byte-level form of a newline)
# Qwen's rule: words, single digits, runs of punctuation, line breaks, blanks
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def make_tokenizer(folder):
    """tokenizer.json, tokenizer_config.json and generation_config.json in Qwen3's form. Returns the number of ids."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in MERGED:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            vocab.setdefault(word[: end + 1], len(vocab))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    ])  # fmt: skip
    tokenizer.post_processor, tokenizer.decoder = processors.ByteLevel(**byte_level), decoders.ByteLevel(**byte_level)
    added = [tokenizers.AddedToken(text, normalized=False, special=text in SPECIAL) for text in SPECIAL + PLAIN]
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL + PLAIN}
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "Qwen2Tokenizer", "model_max_length": 1024, "add_bos_token": False,
        "add_prefix_space": False, "bos_token": None, "unk_token": None, "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "errors": "replace",
        "clean_up_tokenization_spaces": False, "split_special_tokens": False,
        "added_tokens_decoder": {str(ids[token.content]): token_form(token) for token in added},
        "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "temperature": 1.0,
    })  # fmt: skip
    return ids


def token_form(token):
    return {name: getattr(token, name)
            for name in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}  # fmt: skip


def make_config(folder, ids):
    """config.json: 4 layers of width 128. More logit rows than ids, as Qwen3 has: the surplus must never be sampled."""
    write_json(folder / "config.json", {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
        "head_dim": 32, "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.02,
        "intermediate_size": 384, "max_position_embeddings": 1024, "num_attention_heads": 4,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000, "tie_word_embeddings": True, "torch_dtype": "float32", "use_cache": True,
        "use_sliding_window": False, "sliding_window": None,
        "vocab_size": -(-(max(ids.values()) + 1) // 64) * 64,
    })  # fmt: skip


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make_problems(folder, train, test, seed=0):
    """train.jsonl and test.jsonl, each with the given number of problems, no two alike."""
    for name, held_out, count in (("train", False, train), ("test", True, test)):
        expressions = distinct(draw_split(random.Random(f"{name} {seed}"), held_out), count)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(e)) + "\n" for e in expressions))


class EqualLengths:
    """model.py's `attend` for rows of one length: one call for all, where PackedAttention makes a call a row:
    the step then takes 0.3 s instead of 0.5.
    Padding at the end does no harm: attention is causal."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, layer, q, k, v):
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class Teacher:
    """Supervised training on demonstrations of problems that are not held out, with the model code of the RL run."""

    def __init__(self, model, folder, seed):
        self.model, self.prompts = model, Tokenizer(folder)
        self.text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.rng = random.Random(seed)
        self.problems = draw_split(self.rng, test=False)

    def batch(self, size, error_rate):
        """Fresh demonstrations, every digit of a result wrong with probability error_rate, padded to one length L:
        tokens (size, L), and which of them are completion (size, L)."""
        problems = list(itertools.islice(self.problems, size))
        prompts = self.prompts.encode_prompts([str(problem) for problem in problems])
        texts = [demonstration(careless(problem, self.rng, error_rate)) + "<|im_end|>" for problem in problems]
        completions = [self.text.encode(text, add_special_tokens=False).ids for text in texts]
        rows = [torch.tensor([prompt + completion, [0] * len(prompt) + [1] * len(completion)])
                for prompt, completion in zip(prompts, completions)]  # fmt: skip
        padded = torch.nn.utils.rnn.pad_sequence([row.T for row in rows], batch_first=True)
        return padded[..., 0], padded[..., 1].bool()

    def loss(self, tokens, trained):
        """Mean cross-entropy of the completion tokens."""
        rows, length = tokens[:, :-1].shape
        hidden = self.model(tokens[:, :-1].flatten(), torch.arange(length).repeat(rows), EqualLengths(rows))
        logits = self.model.logits(hidden[trained[:, 1:].flatten()])[:, : self.prompts.valid_vocab]
        return F.cross_entropy(logits, tokens[:, 1:][trained[:, 1:]])

    def train(self, steps, lr, muon_lr, error_rate, size=64):
        """Warm-up over a tenth of the steps, cosine to 0. Matrices are trained by Muon (Jordan 2024) if muon_lr is not
        0: it learns the arithmetic in clearly fewer steps than AdamW, which trains everything else."""
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in name and muon_lr]
        rest = [p for p in self.model.parameters() if not any(p is m for m in matrices)]
        rates = {torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01): lr}
        if muon_lr:
            rates[torch.optim.Muon(matrices, weight_decay=0.01)] = muon_lr
        begin, average = time.perf_counter(), None
        for step in range(steps):
            factor = min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))
            loss = self.loss(*self.batch(size, error_rate))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer, rate in rates.items():
                optimizer.param_groups[0]["lr"] = rate * factor
                optimizer.step()
                optimizer.zero_grad()
            average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
            if (step + 1) % 100 == 0 or step + 1 == steps:
                seconds = time.perf_counter() - begin
                print(f"  step {step + 1:>5} of {steps}  loss {average:.4f}  {seconds:.0f} s", flush=True)


def held_out(model, folder, problems, samples=16):
    """{k: pass@k} of the model at temperature 1 on the first `problems` problems of the test.jsonl beside `folder`."""
    tokenizer, chosen = Tokenizer(folder), load_problems([str(folder.parent / "test.jsonl")])[:problems]
    prompts = tokenizer.encode_prompts([problem.question for problem in chosen])
    answers = [problem.answer for problem in chosen]
    streams = [("warm start", problem) for problem in range(len(chosen))]
    attempts = attempt(model, tokenizer, answers, prompts, share(all_pairs(len(chosen), samples), 0, 1), streams,
                       temperature=1.0, max_new_tokens=48, max_length=96)  # fmt: skip
    correct = [0] * len(chosen)
    for a in attempts:
        correct[a.problem] += a.correct
    return {k: sum(pass_at_k(samples, c, k) for c in correct) / len(correct) for k in (1, 4, 16) if k <= samples}


def teach(source, target, folder, name, schedule, seed=0):
    """One phase of the warm start: weights of `source` (None: random ones) -> weights in `target`, in fp32."""
    model = Qwen3(Qwen3Config.from_json(folder / "config.json")).init_weights(seed)
    if source:
        load_weights(model, source)
    print(f"{name} demonstrations")
    Teacher(model, folder, f"{name} {seed}").train(**schedule)
    passes = held_out(model, folder, problems=256)
    print("  held-out " + "  ".join(f"pass@{k} {value:.3f}" for k, value in passes.items()), flush=True)
    target.mkdir(parents=True, exist_ok=True)
    save_weights(((name, parameter.detach()) for name, parameter in model.named_parameters()), target)


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"what to make, of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(PARTS)}")
    folder, between, begin = args.out / "model", args.out / "clean", time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the weights would differ in their last bits with the number of cores
    if "tokenizer" in args.parts:
        make_config(folder, make_tokenizer(folder))
    if "problems" in args.parts:
        make_problems(args.out, **PROBLEMS)
    if "clean" in args.parts:
        teach(None, between, folder, "clean", CLEAN)
    if "careless" in args.parts:
        teach(between, folder, folder, "careless", CARELESS)
    print(f"made {', '.join(args.parts)} in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
