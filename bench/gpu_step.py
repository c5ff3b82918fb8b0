"""One machine, one process: whole steps of train.py with a random-weight Qwen3 of a published shape, phases timed.

    python bench/gpu_step.py --tokenizer DIR                      1.7B, 256 rollouts of 512 tokens, needs one GPU
    python bench/gpu_step.py --tokenizer tiny/model --tiny        the same code in seconds on CPU

A random model never stops and never earns: completions run to the limit and --reward random gives the signal. DIR holds
tokenizer.json, tokenizer_config.json and generation_config.json of Qwen3. Prints a line a step and the medians.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from model import Qwen3, Qwen3Config, save_weights  # noqa: E402

SHAPE_1_7B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192}  # fmt: skip


def make_model(folder, shape, tokenizer):
    """A checkpoint folder with random bf16 weights of `shape` and the given tokenizer's files."""
    missing = [name for name in TOKENIZER if not (Path(tokenizer) / name).is_file()]
    if missing:
        sys.exit(f"error: {tokenizer} lacks {', '.join(missing)}: --tokenizer takes a folder with Qwen3's tokenizer files")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    for file in TOKENIZER:
        shutil.copyfile(Path(tokenizer) / file, folder / file)
    model = Qwen3(Qwen3Config.from_json(folder / "config.json")).init_weights()
    save_weights(((name, p.detach().bfloat16()) for name, p in model.named_parameters()), folder)


def make_problems(path, count):
    """Additions in the GSM8K form: only their prompts matter."""
    lines = [{"question": f"What is {i} plus {3 * i}?", "answer": f"#### {4 * i}"} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder with Qwen3's tokenizer files")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="a two-layer model and short completions, for CPU")
    args = parser.parse_args()
    if args.tiny:
        args.new_tokens, args.batch_size = 16, 32
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        make_model(work / "model", {**SHAPE_1_7B, **(TINY if args.tiny else {})}, args.tokenizer)
        make_problems(work / "problems.jsonl", 64)
        flags = dict(model=work / "model", train_data=work / "problems.jsonl", eval_data=work / "problems.jsonl",
                     out=work / "run", steps=args.steps, batch_size=args.batch_size, max_new_tokens=args.new_tokens,
                     reward="random", eval_problems=4, eval_samples=1, save_every=0)  # fmt: skip
        command = [sys.executable, str(ROOT / "train.py"), *(f"--{name}={value}" for name, value in flags.items())]
        if status := subprocess.run(command, timeout=1200).returncode:
            return status  # train.py has said why
        rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{device}, torch {torch.__version__}; median of the last {max(1, len(rows) - 1)} of {len(rows)} steps:")
    for name in ("seconds_rollout", "seconds_update", "seconds", "tokens_per_second", "memory_gb",
                 "logprob_gap_mean", "logprob_gap_max", "grad_norm"):  # fmt: skip
        print(f"  {name:<18} {statistics.median(row[name] for row in rows[1:] or rows):.4g}")


if __name__ == "__main__":
    main()
