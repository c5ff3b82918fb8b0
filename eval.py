"""How good is a model? pass@k over problem sets, from the same prompt, sampler and grader as training.

Owns the sample-and-grade path (train.py's rollouts come through it too), the pass@k estimate and the table. Knows
nothing of optimisers, losses or training configuration.

    torchrun --nproc_per_node 2 eval.py --model tiny/model --data tiny=tiny/test.jsonl --samples 16
    python eval.py --model tiny/model --prompt "(12+7)*3=" --samples 4
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

import data
import fsdp_utils
import grader
from errors import UserError, exits_cleanly
from model import Qwen3Config, empty_model, load_weights
from rollout import Rollout, generate, stream_key


@dataclass
class Attempt:
    """One graded rollout: sample number `sample` at entry `problem` of the list that was asked for."""

    problem: int
    sample: int
    rollout: Rollout
    text: str  # the completion decoded, without special tokens
    correct: bool
    reason: str  # the grader's


def share(problems, samples, rank, world):
    """This rank's part of problems x samples attempts: {problem: [samples]}. Contiguous: groups stay together."""
    total = problems * samples
    part = {}
    for index in range(total * rank // world, total * (rank + 1) // world):
        part.setdefault(index // samples, []).append(index % samples)
    return part


def attempt(model, tokenizer, answers, prompts, samples, key, ranks, **sampling):
    """Samples and grades this rank's share of `samples` completions of every prompt -> list[Attempt], in order.

    answers[i] is the reference of prompts[i]; key, a tuple such as (seed, step), names the random streams: together
    with problem and sample number it decides every token, whatever the number of ranks. sampling: as rollout.generate.
    """
    part = share(len(prompts), samples, ranks.rank, ranks.world)
    keys = [[stream_key(*key, problem, sample) for sample in mine] for problem, mine in part.items()]
    rollouts = iter(generate(
        model, [prompts[problem] for problem in part], keys,
        stop_ids=tokenizer.stop_ids, valid_vocab=tokenizer.valid_vocab, **sampling,
    ))  # fmt: skip
    attempts = []
    for problem, mine in part.items():
        for sample in mine:
            rollout = next(rollouts)
            text = tokenizer.decode(rollout.completion)
            attempts.append(Attempt(problem, sample, rollout, text, *grader.grade(text, answers[problem])))
    return attempts


def exchange(attempts):
    """Collective. Every rank's attempts (in global order) -> all attempts, on every rank, without texts and prompts."""
    whole, real = [], []
    for a in attempts:
        done = a.rollout
        stopped = done.finish_reason == "stop"
        whole += [a.problem, a.sample, a.correct, grader.REASONS.index(a.reason), stopped, len(done.completion)]
        whole += done.completion
        real += done.logprobs
    numbers = torch.cat(fsdp_utils.all_gather_ragged(torch.tensor(whole, dtype=torch.long))).tolist()
    logprobs = torch.cat(fsdp_utils.all_gather_ragged(torch.tensor(real, dtype=torch.float32))).tolist()
    result, i, j = [], 0, 0
    while i < len(numbers):
        problem, sample, correct, reason, stopped, n = numbers[i : i + 6]
        rollout = Rollout([], numbers[i + 6 : i + 6 + n], logprobs[j : j + n], "stop" if stopped else "length")
        result.append(Attempt(problem, sample, rollout, "", bool(correct), grader.REASONS[reason]))
        i, j = i + 6 + n, j + n
    return result


def pass_at_k(samples, correct, k):
    """Chance that one of k samples is right, unbiased, from `correct` of `samples` (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= samples:
        raise UserError(f"pass@{k} needs at least {k} samples a problem, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate(model, tokenizer, problems, prompts, samples, seed, ranks, **sampling):
    """Collective. -> {"pass@1", "pass@2", "pass@4", ..., "length", "cut", "no_answer"}, the same on all ranks.

    pass@k (up to `samples`) is the mean over problems of the per-problem estimate; length is in tokens; cut and
    no_answer are shares of the attempts that hit a length limit and that hold no answer. The random streams depend on
    `seed` alone: two checkpoints are compared on the same draws.
    """
    answers = [problem.answer for problem in problems]
    attempts = attempt(model, tokenizer, answers, prompts, samples, (seed, "eval"), ranks, **sampling)
    correct = [0] * len(problems)
    for a in attempts:
        correct[a.problem] += a.correct
    done = [a.rollout for a in attempts]
    facts = [(len(d.completion), d.finish_reason == "length", a.reason == "no answer") for d, a in zip(done, attempts)]
    sums = [sum(column) for column in zip(*facts)] or [0, 0, 0]
    total = fsdp_utils.all_sum([*sums, *correct])
    names = ("length", "cut", "no_answer")
    metrics = {name: value / (len(problems) * samples) for name, value in zip(names, total)}
    for k in (2**i for i in range(samples.bit_length())):
        estimates = [pass_at_k(samples, int(c), k) for c in total[3:]]
        metrics[f"pass@{k}"] = sum(estimates) / len(estimates)
    return metrics


def load_model(model_dir, device, dtype):
    """A plain, unsharded Qwen3 with the weights of a checkpoint folder, for sampling."""
    model = empty_model(Qwen3Config.from_json(f"{model_dir}/config.json"), device, dtype)
    load_weights(model, model_dir)
    return model


def check_grader():
    """UserError unless the grader's child process runs here: without it right answers would pass for wrong ones."""
    if not grader.is_equivalent(r"\sqrt{8}", r"2\sqrt{2}"):
        raise UserError("the grader cannot run its child process (is sympy installed? python meaning.py says why)")


def load_tokenizer(model_dir, config):
    """The Tokenizer of a checkpoint folder; UserError if it has more ids than the model has rows."""
    tokenizer = data.Tokenizer(model_dir)
    if tokenizer.valid_vocab > config.vocab_size:
        ids, rows = tokenizer.valid_vocab, config.vocab_size
        raise UserError(f"{model_dir}: the tokenizer has {ids} ids, the model only {rows} rows")
    return tokenizer


def progress_bar(total, description, shown):
    """A tqdm bar over finished completions and the callback that `generate` moves it with."""
    bar = tqdm(total=total, desc=description, unit="seq", disable=not shown, leave=False, dynamic_ncols=True)
    start = time.perf_counter()

    def update(finished, tokens):
        bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):,.0f} tok/s", refresh=False)
        bar.update(finished - bar.n)

    return bar, update


def parse(argv):
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.error = _refuse
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=FILE", help="problem files (JSONL)")
    parser.add_argument("--prompt", help="print completions of this question instead of a table")
    parser.add_argument("--samples", type=int, help="completions a problem (default 32), or of --prompt (default 4)")
    parser.add_argument("--limit", type=int, help="only the first so many problems of each file")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0, help="0: all")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--sequence_length", type=int, default=0, help="prompt + completion; 0: 8192, or what fits")
    parser.add_argument("--max_new_tokens", type=int, default=0, help="0: what the sequence length leaves")
    parser.add_argument("--max_batch", type=int, default=256, help="sequences decoding together, a process")
    parser.add_argument("--thinking", action="store_true", help="let the model think (Qwen3's enable_thinking)")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--instruction", default=data.INSTRUCTION, help="stands before the question in the user turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(f"unknown argument {unknown[0]}; see python eval.py --help")
    if args.samples is None:
        args.samples = 4 if args.prompt else 32
    if bool(args.prompt) == bool(args.data):
        raise UserError("give either --data NAME=FILE ... or --prompt TEXT")
    if min(args.samples, args.max_batch, 1 if args.limit is None else args.limit) < 1:
        raise UserError("--samples, --max_batch and --limit must be at least 1")
    if min(args.max_new_tokens, args.sequence_length, args.top_k) < 0 or not 0 <= args.top_p <= 1:
        raise UserError("--max_new_tokens, --sequence_length and --top_k must not be negative, --top_p in 0..1")
    if not (args.temperature == 0 or 1e-3 <= args.temperature <= 1e3):
        raise UserError("--temperature must be 0 (greedy) or lie in 0.001..1000")
    if wrong := [entry for entry in args.data if not all(entry.partition("="))]:
        raise UserError(f"--data {wrong[0]}: expected NAME=FILE")
    return args


def _refuse(message):
    raise UserError(f"{message}; see python eval.py --help")


def table(rows):
    """[(name, number of problems, metrics)] -> a Markdown table in percent; Overall weights by number of problems."""
    keys = [key for key in rows[0][2] if key.startswith("pass@")]
    weight = sum(n for _, n, _ in rows)
    rows = [*rows, ("Overall", weight, {k: sum(n * m[k] for _, n, m in rows) / weight for k in rows[0][2]})]
    lines = ["| dataset | problems | " + " | ".join(keys) + " | tokens | cut | no answer |"]
    lines.append("|---" * (len(keys) + 5) + "|")
    for name, n, m in rows:
        passes = " | ".join(f"{100 * m[key]:.2f}" for key in keys)
        lines.append(f"| {name} | {n} | {passes} | {m['length']:.0f} | {m['cut']:.1%} | {m['no_answer']:.1%} |")
    return "\n".join(lines)


@exits_cleanly
def main(argv=None):
    """The command: a table over problem files, or completions of one prompt."""
    args = parse(argv)
    ranks = fsdp_utils.init_distributed(args.device)
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    model = load_model(args.model, ranks.device, dtype)
    tokenizer, positions = load_tokenizer(args.model, model.config), model.config.max_position_embeddings
    options = {"system": args.system, "thinking": args.thinking, "instruction": args.instruction}
    limit = args.sequence_length or min(8192, positions)
    if limit > positions:
        raise UserError(f"--sequence_length {limit} exceeds the {positions} positions of {args.model}")
    note = print if ranks.rank == 0 else (lambda text: None)
    sampling = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, max_batch=args.max_batch,
                    max_length=limit, max_new_tokens=args.max_new_tokens or limit)  # fmt: skip
    if args.prompt:
        complete(model, tokenizer, args, ranks, options, sampling)
    else:
        check_grader()
        rows = []
        for entry in args.data:
            name, _, path = entry.partition("=")
            problems = data.load_problems([path], note)[: args.limit]
            problems, prompts = data.encode_problems(tokenizer, problems, limit - 1, note, **options)
            bar, update = progress_bar(len(prompts) * args.samples // ranks.world, name, ranks.rank == 0)
            with bar:
                metrics = evaluate(model, tokenizer, problems, prompts, args.samples, args.seed, ranks,
                                   progress=update, **sampling)  # fmt: skip
            rows.append((name, len(problems), metrics))
        if ranks.rank == 0:
            print(table(rows))
    fsdp_utils.shutdown()


def complete(model, tokenizer, args, ranks, options, sampling):
    """Prints `samples` completions of one question with the speed, on rank 0."""
    if ranks.rank:
        return
    prompt = tokenizer.encode_prompt(args.prompt, **options)
    if len(prompt) >= sampling["max_length"]:
        raise UserError(f"the prompt's {len(prompt)} tokens leave no room in a sequence of {sampling['max_length']}")
    keys = [[stream_key(args.seed, "prompt", sample) for sample in range(args.samples)]]
    start = time.perf_counter()
    ids = dict(stop_ids=tokenizer.stop_ids, valid_vocab=tokenizer.valid_vocab)
    rollouts = generate(model, [prompt], keys, **ids, **sampling)
    seconds = time.perf_counter() - start
    for number, rollout in enumerate(rollouts):
        print(f"--- sample {number}: {len(rollout.completion)} tokens, {rollout.finish_reason}")
        print(tokenizer.decode(rollout.completion))
    tokens = sum(len(rollout.completion) for rollout in rollouts)
    print(f"--- {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1:])
