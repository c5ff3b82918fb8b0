"""How good is a model? pass@k over problem sets, from the same prompt, sampler and grader as training.

Owns the sample-and-grade path (train.py's rollouts come through it too) and the evaluation on disk: every finished
sample is a line of a file at once, so an evaluation that was killed goes on where it stopped when the same command is
given again. The estimates are in estimates.py. Knows nothing of optimisers, losses or training configuration.

    torchrun --nproc_per_node 4 eval.py --model runs/.../step-1500 --data gsm8k_test --data math_500
    torchrun --standalone --nproc_per_node 2 eval.py --model tiny/model --data tiny=tiny/test.jsonl --samples 16
    python eval.py --model tiny/model --prompt "(12+7)*3=" --samples 4
"""

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import data
import fsdp_utils
import grader
from console import CommandLine, Progress, UserError, exits_cleanly, printable
from estimates import by_label, scores, summarize, table
from model import Qwen3Config, empty_model, load_weights, read_json
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


def share(pairs, rank, world):
    """This rank's part of (problem, sample) pairs: {problem: [samples]}. Contiguous: groups stay together."""
    part = {}
    for problem, sample in pairs[len(pairs) * rank // world : len(pairs) * (rank + 1) // world]:
        part.setdefault(problem, []).append(sample)
    return part


def all_pairs(problems, samples):
    """Every (problem, sample) of `problems` x `samples` attempts, problem by problem."""
    return [(problem, sample) for problem in range(problems) for sample in range(samples)]


def attempt(model, tokenizer, answers, prompts, part, streams, each=lambda attempt: None, **sampling):
    """Samples and grades completions -> list[Attempt], in the order of `part`.

    part: {problem: [sample numbers]}, such as `share` gives; answers[p] is the reference of prompts[p]; streams[p], a
    tuple such as (seed, step, p), names the random streams of prompts[p]: with the sample number it decides every
    token, whatever the number of ranks. each(attempt) is called when one has ended. sampling: as rollout.generate.
    """
    order = [(problem, sample) for problem, mine in part.items() for sample in mine]
    attempts = [None] * len(order)

    def finished(index, rollout):
        problem, sample = order[index]
        text = tokenizer.decode(rollout.completion)
        attempts[index] = Attempt(problem, sample, rollout, text, *grader.grade(text, answers[problem]))
        each(attempts[index])

    keys = [[stream_key(*streams[problem], sample) for sample in mine] for problem, mine in part.items()]
    generate(model, [prompts[problem] for problem in part], keys, stop_ids=tokenizer.stop_ids,
             valid_vocab=tokenizer.valid_vocab, on_finish=finished, **sampling)  # fmt: skip
    return attempts


def exchange(attempts, prompts):
    """Collective. Every rank's attempts at `prompts` (in global order) -> all attempts, on all ranks, without texts."""
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
        i += 6
        completion, finish_reason = numbers[i : i + n], "stop" if stopped else "length"
        rollout = Rollout(prompts[problem], completion, logprobs[j : j + n], finish_reason)
        result.append(Attempt(problem, sample, rollout, "", bool(correct), grader.REASONS[reason]))
        i, j = i + n, j + n
    return result


def record(a):
    """What is kept of an attempt: a line of samples.jsonl."""
    return {"problem": a.problem, "sample": a.sample, "correct": a.correct, "reason": a.reason,
            "answer": grader.extract_answer(a.text), "tokens": len(a.rollout.completion),
            "finish_reason": a.rollout.finish_reason, "completion": a.text}  # fmt: skip


def evaluate(model, tokenizer, problems, prompts, samples, seed, ranks, **sampling):
    """Collective. -> {"pass@1", "pass@2", "pass@4", ..., "length", "cut", "no_answer"}, the same on all ranks.

    What training shows of held-out problems. The random streams depend on seed and question alone: two checkpoints are
    compared on the same draws, here and by the command below.
    """
    answers, streams = [p.answer for p in problems], [(seed, "eval", p.question) for p in problems]
    part = share(all_pairs(len(problems), samples), ranks.rank, ranks.world)
    attempts = exchange(attempt(model, tokenizer, answers, prompts, part, streams, **sampling), prompts)
    each = [[] for _ in problems]
    for a in attempts:
        each[a.problem].append(record(a))
    each = [scores(records, voting=False) for records in each]
    return {name: sum(problem[name] for problem in each) / len(each) for name in each[0]}


# Loading, for train.py too


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


# The evaluation on disk


class Records:
    """The folder of an evaluation: settings.json, samples.jsonl and, while it runs, samples-RANK.jsonl of each rank.

    On several machines it must lie on a file system that they share. A full disk is a UserError; what is there stays.
    """

    def __init__(self, folder, settings, sizes, ranks):
        """Collective. Takes up what an earlier, interrupted evaluation left; UserError if its settings were others.

        sizes: {name of the data set: number of its problems}.
        """
        self.folder, self.path = folder, folder / f"samples-{ranks.rank:05d}.jsonl"
        self.settings, self.sizes = settings, sizes
        fsdp_utils.once(self._open)
        self.done = {(r["data"], r["problem"], r["sample"]) for r in self.read()}
        self.file = None

    def _open(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint.lock(self.folder)
        path = self.folder / "settings.json"
        old = read_json(path) if path.exists() else self.settings
        changed = [name for name in {**old, **self.settings} if old.get(name) != self.settings.get(name)]
        if changed:
            was, now = ([values.get(changed[0])] for values in (old, self.settings))
            raise UserError(f"{self.folder} holds an evaluation with {changed[0]} {was[0]!r}, not {now[0]!r}: give "
                            f"another --out")  # fmt: skip
        checkpoint.write(path, json.dumps(self.settings, indent=1))
        self.merge()

    def read(self):
        """The records of samples.jsonl."""
        path = self.folder / "samples.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def add(self, entry):
        """Appends one sample's record. At once, and line by line: a kill can tear the last line alone."""
        try:
            self.file = self.file or open(self.path, "a")
            self.file.write(json.dumps(entry) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; the same command goes on from what is finished") from error

    def merge(self):
        """Gathers the ranks' files into samples.jsonl, in order and each sample once. Rank 0 only."""
        found = {}
        for path in (*self.folder.glob("samples-*.jsonl"), *self.folder.glob("samples.jsonl")):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(keepends=True), 1):
                if line.endswith("\n"):
                    key = self._key(line)
                    if key is None:
                        raise UserError(f"{path}, line {number}: no sample of this evaluation; remove the line, or "
                                        f"give another --out")  # fmt: skip
                    found[key] = line
        checkpoint.write(self.folder / "samples.jsonl", "".join(found[key] for key in sorted(found)))
        for path in self.folder.glob("samples-*.jsonl"):
            path.unlink()

    def _key(self, line):
        """What a line is the sample of, (data, problem, sample); None if it is not one."""
        try:
            r = json.loads(line)
            kinds = {"problem": int, "sample": int, "correct": bool, "tokens": int, "reason": str, "finish_reason": str}
            good = all(type(r[name]) is kind for name, kind in kinds.items()) and isinstance(r["answer"], str | None)
            fits = 0 <= r["problem"] < self.sizes[r["data"]] and 0 <= r["sample"] < self.settings["samples"]
            return (r["data"], r["problem"], r["sample"]) if good and fits else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


# The command


def parse(argv):
    """The command line, checked."""
    parser = CommandLine(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder, or the name of a model on the hub")
    parser.add_argument("--data", nargs="+", action="extend", default=[], metavar="NAME=FILE",
                        help=f"problem files (JSONL or parquet), or {', '.join(data.DATASETS)}")  # fmt: skip
    parser.add_argument("--prompt", help="print completions of this question instead of a table")
    parser.add_argument("--out", help="folder of samples and results; default evals/NAME-OF-MODEL")
    parser.add_argument("--samples", type=int, help="completions a problem (default 32), or of --prompt (default 4)")
    parser.add_argument("--limit", type=int, help="only the first so many problems of each file")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
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
    return _checked(parser.parse_args(argv))


def _checked(args):
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
    if args.samples > 65536:
        raise UserError(f"--samples {args.samples}: at most 65536")
    good = re.compile(r"[\w.+-]+=.+")  # a name is a cell of a Markdown table
    if wrong := [entry for entry in args.data if entry not in data.DATASETS and not good.fullmatch(entry)]:
        raise UserError(f"--data {wrong[0]}: expected NAME=FILE, or one of {', '.join(data.DATASETS)}")
    names = [entry.partition("=")[0] for entry in args.data]
    if len(set(names)) < len(names) or "Overall" in names:
        raise UserError(f"--data: every set needs a name of its own, not {', '.join(names)}")
    return args


@exits_cleanly
def main(argv=None):
    """The command: a table over problem files, or completions of one prompt."""
    args = parse(argv)
    ranks = fsdp_utils.init_distributed(args.device)
    sources = [[entry.partition("=")[2] or entry] for entry in args.data]
    model_dir, *files = fsdp_utils.once(lambda: data.fetch(args.model, *sources), per_node=True)
    config = Qwen3Config.from_json(f"{model_dir}/config.json")
    tokenizer, positions = load_tokenizer(model_dir, config), config.max_position_embeddings
    limit = args.sequence_length or min(8192, positions)
    if limit > positions:
        raise UserError(f"--sequence_length {limit} exceeds the {positions} positions of {args.model}")
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    options = {"system": args.system, "thinking": args.thinking, "instruction": args.instruction}
    sampling = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, max_length=limit,
                    max_new_tokens=args.max_new_tokens or limit)  # fmt: skip
    if args.prompt:
        complete(load_model(model_dir, ranks.device, dtype), tokenizer, args, ranks, options, sampling)
    else:
        check_grader()
        sets = load_sets(tokenizer, args, files, limit - 1, print if ranks.rank == 0 else (lambda text: None), options)
        settings = {**sampling, **options, "samples": args.samples, "seed": args.seed,
                    "compute": f"{ranks.device.type} {dtype}", "stop_ids": [*tokenizer.stop_ids],
                    "weights": checkpoint.digest_files(Path(model_dir).glob("*.safetensors")),
                    "architecture": checkpoint.digest(vars(config)),
                    "grader": checkpoint.digest_files([Path(grader.__file__), Path(grader.CHILD)]),
                    **{f"data {name}": checkpoint.digest([(p.question, p.answer) for p in problems], prompts)
                       for name, (problems, prompts) in sets.items()}}  # fmt: skip
        sizes = {name: len(problems) for name, (problems, _) in sets.items()}
        records = Records(Path(args.out or default_folder(args.model)), settings, sizes, ranks)
        sample_all(lambda: load_model(model_dir, ranks.device, dtype), tokenizer, sets, records, args, ranks, sampling)
        fsdp_utils.once(lambda: report(records, sets, args.model))
    fsdp_utils.shutdown()


def default_folder(model):
    """Where an evaluation goes: by the last two parts of the model's name, runs/a/step-0060 -> evals/a-step-0060."""
    return "evals/" + "-".join(Path(model).resolve().parts[-2:] if Path(model).exists() else Path(model).parts)


def load_sets(tokenizer, args, files, max_prompt_tokens, note, options):
    """{name of --data: (problems, their prompts)}."""
    sets = {}
    for entry, paths in zip(args.data, files):
        problems = data.load_problems(paths, note)[: args.limit]
        sets[entry.partition("=")[0]] = data.encode_problems(tokenizer, problems, max_prompt_tokens, note, **options)
    return sets


def sample_all(load, tokenizer, sets, records, args, ranks, sampling):
    """Collective. Samples what `records` lacks, all sets as one pool so that no process waits for another's set."""
    pool = [(name, i, problem, prompt) for name, (problems, prompts) in sets.items()
            for i, (problem, prompt) in enumerate(zip(problems, prompts))]  # fmt: skip
    pool = [pool[i] for i in data.problem_order(len(pool), 0, 0)]  # mixed: hard sets are long, each rank gets its part
    names, numbers, problems, prompts = zip(*pool)
    left = [(p, s) for p, s in all_pairs(len(pool), args.samples) if (names[p], numbers[p], s) not in records.done]
    part = share(left, ranks.rank, ranks.world)
    if not left:  # the same on all ranks
        return

    def each(a):
        records.add({"data": names[a.problem], **record(a), "problem": numbers[a.problem]})  # its number in its own set
        a.rollout.completion, a.rollout.logprobs, a.text = [], [], ""  # on disk: tens of thousands would fill memory

    model = load()
    with Progress("evaluating", len(left) // ranks.world, ranks.rank == 0) as progress:
        attempt(model, tokenizer, [p.answer for p in problems], prompts, part,
                [(args.seed, "eval", p.question) for p in problems], each, max_batch=args.max_batch, progress=progress,
                **sampling)  # fmt: skip
    fsdp_utils.barrier()  # all have finished: their files are whole


def report(records, sets, model):
    """Rank 0: prints the tables and writes results.md and results.json beside the samples."""
    records.merge()
    samples = {name: [[] for _ in problems] for name, (problems, _) in sets.items()}
    for entry in records.read():
        samples[entry["data"]][entry["problem"]].append(entry)
    scored = {name: list(map(scores, problems)) for name, problems in samples.items()}
    tables = {"": ("dataset", scored | ({"Overall": sum(scored.values(), [])} if len(scored) > 1 else {}))}
    for name, (problems, _) in sets.items():
        for label in ("level", "subject"):
            if parts := by_label([getattr(problem, label) for problem in problems], scored[name]):
                tables[f"{name} by {label}"] = label, parts
    results = {title: {row: (len(part), summarize(part)) for row, part in parts.items()}
               for title, (_, parts) in tables.items()}  # fmt: skip
    text = "\n\n".join((f"{title}:\n\n" if title else "") + table(results[title], heading)
                       for title, (heading, _) in tables.items())  # fmt: skip
    facts = {title or "all": {row: {"problems": n, **figures} for row, (n, figures) in rows.items()}
             for title, rows in results.items()}  # fmt: skip
    checkpoint.write(records.folder / "results.md", text + "\n")
    whole = {"model": model, "settings": records.settings, "results": facts}
    checkpoint.write(records.folder / "results.json", json.dumps(whole, indent=1))
    print(f"{text}\n\nsamples, results.md and results.json: {records.folder}")


def complete(model, tokenizer, args, ranks, options, sampling):
    """Prints `samples` completions of one question with the speed, on rank 0."""
    if ranks.rank:
        return
    prompt = tokenizer.encode_prompt(args.prompt, **options)
    if len(prompt) >= sampling["max_length"]:
        raise UserError(f"the prompt's {len(prompt)} tokens leave no room in a sequence of {sampling['max_length']}")
    keys = [[stream_key(args.seed, "prompt", sample) for sample in range(args.samples)]]
    start = time.perf_counter()
    ids = dict(stop_ids=tokenizer.stop_ids, valid_vocab=tokenizer.valid_vocab, max_batch=args.max_batch)
    rollouts = generate(model, [prompt], keys, **ids, **sampling)
    seconds = time.perf_counter() - start
    for number, rollout in enumerate(rollouts):
        print(f"--- sample {number}: {len(rollout.completion)} tokens, {rollout.finish_reason}")
        print(printable(tokenizer.decode(rollout.completion)))
    tokens = sum(len(rollout.completion) for rollout in rollouts)
    print(f"--- {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1:])
