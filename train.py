"""Trains Qwen3 with RLOO to reason about math: sample, grade, subtract the others' mean, one policy-gradient step.

    torchrun --nproc_per_node 4 train.py                                            the reference recipe, 4 GPUs
    torchrun --standalone --nproc_per_node 2 train.py --config tiny/train.json      a laptop, two minutes

Owns the configuration, the loop, the schedule, the log and the run folder; the only file that knows all the others.
Every Config field is a flag (`--lr 2e-6`), and a key of a --config file. The run folder holds config.json,
metrics.jsonl (a row a step), rollouts.jsonl (samples to read) and the checkpoints step-NNNN and state-NNNN.
"""

import argparse
import dataclasses
import inspect
import json
import math
import re
import sys
import time
from dataclasses import field
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import data
import fsdp_utils
import grader
import rloo
from console import CommandLine, Progress, UserError, exits_cleanly, nearest
from eval import all_pairs, attempt, check_grader, evaluate, exchange, load_tokenizer, share
from model import Qwen3, Qwen3Config, empty_model, load_weights, read_json
from publish import export, model_card
from rollout import stream_key


@dataclasses.dataclass
class Config:
    """The reference recipe. Each field is a flag, and the comment beside it the flag's help."""

    model: str = "Qwen/Qwen3-1.7B"  # checkpoint folder, or a name on the Hugging Face hub
    train_data: list[str] = field(default_factory=lambda: ["gsm8k_train", "math_train"])  # known names or files, mixed
    eval_data: list[str] = field(default_factory=lambda: ["gsm8k_test", "math_500"])  # held-out ones, pooled
    out: str = ""  # run folder; empty: a new one under runs/
    resume: bool = False  # continue the run in --out from its newest checkpoint
    seed: int = 0  # of the problem order and of every rollout's random stream

    group_size: int = 16  # rollouts a problem (G), at least 2: the others are the baseline
    batch_size: int = 256  # sequences an optimiser step, over all ranks; a multiple of group_size
    steps: int = 1500  # optimiser steps
    lr: float = 1e-6  # peak learning rate; cosine to 0
    warmup_steps: int = 25  # linear warm-up
    adam_beta1: float = 0.9  # AdamW, first moment
    adam_beta2: float = 0.999  # AdamW, second moment
    weight_decay: float = 0.01  # AdamW, on all parameters
    grad_clip: float = 0.3  # global gradient norm is scaled down to this
    epsilon: float = 0.02  # importance weights are truncated at 1 + epsilon
    kl_coef: float = 0.0  # weight of the KL to the initial model; 0: no reference model is loaded
    gamma: float = 1.0  # reward is multiplied by gamma^(completion tokens)
    divide_by_std: bool = False  # divide advantages by the group's standard deviation
    filter_groups: bool = False  # drop groups without signal from the batch and the denominator
    reward: str = "correct"  # "correct": 1 for a right answer; "random": a coin, the control that must not learn
    reward_cut: bool = True  # a right answer in a completion cut at the limit counts

    sequence_length: int = 8192  # prompt + completion, tokens
    max_new_tokens: int = 0  # limit of the completion alone; 0: what the sequence length leaves
    temperature: float = 1.0  # of sampling, and of the trainer's log-probs
    instruction: str = data.INSTRUCTION  # stands before the problem in the user turn
    system: str = ""  # system prompt; empty: none
    thinking: bool = False  # let the model think (Qwen3's enable_thinking)
    max_batch: int = 256  # sequences decoding together, a process

    micro_batch_tokens: int = 4 * 8192  # tokens of a packed forward and backward, a process; any value, same gradient
    activation_checkpointing: bool = True  # recompute blocks in backward: 1/3 more compute, far less memory
    dtype: str = "auto"  # compute: "bfloat16" or "float32"; auto: bfloat16 on GPUs, float32 on CPU. Masters are float32
    device: str = "auto"  # "cuda" or "cpu"

    eval_every: int = 50  # steps between evaluations; there is one at start and at the end too
    eval_problems: int = 256  # problems an evaluation, drawn from all files; 0: all
    eval_samples: int = 4  # completions a problem, at temperature 1
    save_every: int = 200  # steps between checkpoints, one at the end too; 0: none. step-NNNN: 2 bytes a weight
    keep: int = 2  # newest training states to keep (12 bytes a weight each); 0: all. Exports step-NNNN are all kept
    log_rollouts: int = 16  # completions of each step written to rollouts.jsonl, spread over rank 0's
    wandb: str = ""  # Weights & Biases project; empty: off

    def __post_init__(self):
        for name, option in self.__dataclass_fields__.items():
            setattr(self, name, _typed(name, getattr(self, name), option.type))
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:  # NaN is refused as well
                raise UserError(f"{name} is {getattr(self, name)}, it must lie in {least:g}..{most:g}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(choices)}")
        if self.batch_size % self.group_size:
            raise UserError(f"batch_size {self.batch_size} must be a multiple of group_size {self.group_size}")
        if self.micro_batch_tokens < self.sequence_length:
            raise UserError(f"micro_batch_tokens {self.micro_batch_tokens} must be at least sequence_length "
                            f"{self.sequence_length}: a sequence is never split")  # fmt: skip


MANY = 10**9
CHOICES = {"reward": ("correct", "random"), "dtype": ("auto", "bfloat16", "float32"), "device": ("auto", "cuda", "cpu")}
RANGES = {
    "seed": (-MANY, MANY), "group_size": (2, MANY), "batch_size": (2, MANY), "steps": (1, MANY), "lr": (0, 10),
    "warmup_steps": (0, MANY), "adam_beta1": (0, 1 - 1e-9), "adam_beta2": (0, 1 - 1e-9), "weight_decay": (0, 10),
    "grad_clip": (1e-9, MANY), "epsilon": (0, MANY), "kl_coef": (0, MANY), "gamma": (1e-3, 1),
    "sequence_length": (2, MANY), "max_new_tokens": (0, MANY), "temperature": (1e-3, 1e3), "max_batch": (1, MANY),
    "micro_batch_tokens": (2, MANY), "eval_every": (1, MANY), "eval_problems": (0, MANY), "eval_samples": (1, MANY),
    "save_every": (0, MANY), "keep": (0, MANY), "log_rollouts": (0, MANY),
}  # fmt: skip
# what may differ when a run is resumed: how long and how fast, not what is computed (steps: another cosine from there)
FREE = {"out", "resume", "steps", "eval_every", "save_every", "keep", "log_rollouts", "wandb", "max_batch",
        "micro_batch_tokens", "activation_checkpointing", "device", "dtype"}  # fmt: skip


def _typed(name, value, kind):
    """`value` as the field's type: ints pass as floats, nothing else is bent."""
    if kind == list[str]:
        if not isinstance(value, list) or not value:
            raise UserError(f"{name} is {value!r}, expected a list of names")
        return [_typed(name, item, str) for item in value]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UserError(f"{name} is {value!r}, expected {kind.__name__}")
    return float(value) if kind is float and abs(value) < 2**63 else value


def parse_config(argv):
    """Defaults, then --config (or the run folder's own config.json on --resume), then flags -> (Config, run name)."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
    parser = CommandLine(__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE.json", help="saved overrides of the defaults")
    fields = Config.__dataclass_fields__
    kinds = {bool: {"action": argparse.BooleanOptionalAction}, list[str]: {"nargs": "+"}}
    for name, option in fields.items():
        kind = kinds.get(option.type, {"type": option.type})
        parser.add_argument(f"--{name}", help=comments[name].replace("%", "%%"), **kind)
    flags = vars(parser.parse_args(argv))
    saved = _saved_config(flags) if flags.get("resume") else {}
    file = flags.pop("config", None)
    overrides = saved or (read_json(file) if file else {})
    for name in (name for name in overrides if name not in fields):
        raise UserError(f"{file or flags['out']}: unknown key {name}{nearest(name, fields)}")
    config = Config(**{**overrides, **flags})
    if Path(config.model).is_dir():
        config.model = str(Path(config.model).resolve())  # a folder stays a folder, wherever the run is looked at from
    for name in (name for name in saved if name not in FREE and saved[name] != getattr(config, name)):
        raise UserError(f"--resume: {name} {getattr(config, name)!r} is not the run's {saved[name]!r}; for another run "
                        f"from these weights give its step-NNNN as --model")  # fmt: skip
    return config, Path(file).resolve().parent.name if file else Path(config.model).name


def _saved_config(flags):
    file = Path(flags.get("out", "")) / "config.json"
    if not flags.get("out") or not file.is_file():
        raise UserError(f"--resume needs --out, the folder of a run to continue; there is no {file}")
    return read_json(file)


def learning_rate(config, step):
    """Of optimiser step `step`, counted from 0: linear warm-up times cosine to 0. A function of the step alone."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    return config.lr * warmup * 0.5 * (1.0 + math.cos(math.pi * step / config.steps))


def build_model(config, model_dir, ranks, dtype):
    """The sharded Qwen3 to train: each rank materialises and reads only the rows it holds. Collective."""
    with torch.device("meta"):
        model = Qwen3(Qwen3Config.from_json(f"{model_dir}/config.json"), config.activation_checkpointing)
    fsdp_utils.shard(model, dtype).to_empty(device=ranks.device)
    load_weights(model, model_dir, fsdp_utils.local_rows)
    return model


def load_data(config, model_dir, train_files, held_out_files, note):
    """-> tokenizer, (training problems, their prompts), (held-out problems, their prompts)."""
    architecture = Qwen3Config.from_json(f"{model_dir}/config.json")
    if config.sequence_length > (limit := architecture.max_position_embeddings):
        raise UserError(f"sequence_length {config.sequence_length} exceeds the {limit} positions of {config.model}")
    tokenizer = load_tokenizer(model_dir, architecture)
    options = dict(instruction=config.instruction, system=config.system or None, thinking=config.thinking)
    train, held_out = (data.load_problems(files, note) for files in (train_files, held_out_files))
    # a seeded choice, so that it mixes the files; the same one at every evaluation and in every run of this seed
    chosen = data.problem_order(len(held_out), config.seed, epoch=-1)  # an epoch that no training reaches
    held_out = [held_out[i] for i in chosen[: config.eval_problems or None]]
    return (tokenizer, *(data.encode_problems(tokenizer, problems, config.sequence_length - 1, note, **options)
                         for problems in (train, held_out)))  # fmt: skip


def reward_of(a, config, step):
    """The reward of one attempt, before discounting."""
    if config.reward == "random":
        return float(stream_key(config.seed, "reward", step, a.problem, a.sample) & 1)
    return float(a.correct and (config.reward_cut or a.rollout.finish_reason == "stop"))


def update(model, reference, optimizer, config, rollouts, advantages, step, ranks, valid_vocab):
    """One optimiser step from all ranks' rollouts and their advantages (P, G) -> metrics, the same on all ranks."""
    kept, denominator = rloo.select(advantages, config.kl_coef, config.filter_groups)
    metrics = {"sequences_trained": len(kept), "lr": learning_rate(config, step)}
    if not denominator:  # filter_groups left nothing: no step
        return metrics
    flat = advantages.flatten().tolist()
    lengths = [len(rollouts[i].prompt) + len(rollouts[i].completion) - 1 for i in kept]
    micro_batches = rloo.schedule(lengths, ranks.world, config.micro_batch_tokens)[ranks.rank]
    members = [[kept[m] for m in micro_batch] for micro_batch in micro_batches]
    batches = (rloo.pack([rollouts[i] for i in m], [flat[i] for i in m]).to(ranks.device) for m in members)
    loss, entropy, log_ratios = rloo.backward(model, reference, batches, denominator, config.temperature, valid_vocab,
                                              config.epsilon, config.kl_coef)  # fmt: skip
    metrics["grad_norm"] = fsdp_utils.clip_grad_norm(model, config.grad_clip)
    metrics["loss"], entropy = fsdp_utils.all_sum([loss, entropy])
    log_ratios = torch.cat(fsdp_utils.all_gather_ragged(log_ratios))
    if len(log_ratios):
        metrics["entropy"] = entropy / len(log_ratios)
    if not math.isfinite(metrics["grad_norm"]):
        raise RuntimeError(f"step {step + 1}: the gradient norm is {metrics['grad_norm']}; the step was not taken")
    for group in optimizer.param_groups:
        group["lr"] = metrics["lr"]
    optimizer.step()
    optimizer.zero_grad()
    return {**metrics, **rloo.gap_metrics(log_ratios, config.epsilon)}


class Log:
    """The run folder's records and the terminal: rank 0 writes, the others are silent."""

    def __init__(self, config, folder, ranks, first):
        self.config, self.folder, self.shown = config, folder, ranks.rank == 0
        self.terminal = self.shown and sys.stderr.isatty()  # elsewhere a line a step reads better than a bar
        layout = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"  # 80 columns
        self.bar = tqdm(total=config.steps, initial=first, bar_format=layout, disable=not self.terminal)
        self.tracker = None
        if config.wandb and self.shown:
            self._guard(self._start_tracker)

    def _start_tracker(self):
        import wandb  # optional, and only here: training never needs it

        settings = wandb.Settings(init_timeout=30)  # seconds
        self.tracker = wandb.init(project=self.config.wandb, name=self.folder.name, dir=str(self.folder),
                                  config=dataclasses.asdict(self.config), settings=settings)  # fmt: skip

    def _guard(self, action):
        try:
            action()
        except Exception as error:  # whatever a tracker does, training goes on: metrics.jsonl is the record
            self.tracker = None
            self.say(f"wandb is off: {type(error).__name__}: {error}".splitlines()[0])

    def guard(self, action):
        """Calls action(); where it cannot write, a warning, and training goes on."""
        try:
            action()
        except (UserError, OSError) as error:
            self.say(f"warning: not written, training goes on: {error}")

    def say(self, text):
        """Prints a line above the progress bar."""
        if self.shown:
            tqdm.write(text)

    def row(self, row, rollouts=()):
        """Appends a row to metrics.jsonl (and lines to rollouts.jsonl), moves the bar, prints what matters."""
        if not self.shown:
            return
        for name, rows in (("metrics", [row]), ("rollouts", rollouts)):
            text = "".join(json.dumps(entry) + "\n" for entry in rows)
            self.guard(partial(checkpoint.append, self.folder / f"{name}.jsonl", text))
        if self.tracker:
            self._guard(lambda: self.tracker.log(row, step=row["step"]))
        if "reward" in row:
            text = f"reward {row['reward']:.3f}, length {row['length']:.0f}, {row['tokens_per_second']:,.0f} tok/s"
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(1)
            if not self.terminal:
                norm = f"{row['grad_norm']:.2f}" if "grad_norm" in row else "none"
                print(f"step {row['step']:>5}  {text}, grad {norm}, {row['seconds']:.2f} s", flush=True)
        if "eval/pass@1" in row:
            passes = "  ".join(f"{key[5:]} {value:.3f}" for key, value in row.items() if key.startswith("eval/pass@"))
            self.say(f"step {row['step']:>5}  held-out {passes}")

    def finish(self, seconds):
        """Closes the bar and prints the curve, before and after."""
        self.bar.close()
        if self.tracker:
            self._guard(self.tracker.finish)
        if self.shown:
            rows = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
            curve = [(row["step"], row["eval/pass@1"]) for row in rows if "eval/pass@1" in row]
            for step, value in curve:
                print(f"  step {step:>5}  pass@1 {value:.3f}  {'█' * round(40 * value)}")
            ends = " -> ".join(f"{value:.3f}" for _, value in (curve[:1] + curve[-1:]))
            print(f"held-out pass@1 {ends} in {seconds:.0f} s; see {self.folder}")
            print("(the loss in metrics.jsonl is no sign of progress: read reward and eval/pass@1)")


@exits_cleanly
def main(argv=None):
    """The command. Whatever can be known to be wrong with the input is found before the first rollout."""
    begin, (config, name) = time.perf_counter(), parse_config(argv)
    ranks = fsdp_utils.init_distributed(config.device)
    note = print if ranks.rank == 0 else (lambda text: None)
    sources = config.model, config.train_data, config.eval_data
    model_dir, *paths = fsdp_utils.once(lambda: data.fetch(*sources), per_node=True)
    tokenizer, (problems, prompts), held_out = load_data(config, model_dir, *paths, note)
    check_grader()
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(
        config.dtype, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32)  # fmt: skip
    model = build_model(config, model_dir, ranks, dtype)
    reference = build_model(config, model_dir, ranks, dtype).requires_grad_(False) if config.kl_coef else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(config.adam_beta1, config.adam_beta2),
                                  eps=1e-8, weight_decay=config.weight_decay, fused=True)  # fmt: skip
    sampler = empty_model(model.config, ranks.device, dtype)  # a whole copy; its memory stays in place all run long
    folder, state = checkpoint.open_run_folder(config.out, config.resume, name, note)
    fingerprint, first = checkpoint.digest(prompts, [problem.answer for problem in problems]), 0
    if state:
        facts = checkpoint.load_state(state, model, optimizer)
        if facts["data"] != fingerprint:
            raise UserError(f"{state}: the training problems or prompts are not the run's: files or template changed")
        if (first := facts["step"]) >= config.steps:
            raise UserError(f"{state} is at step {first} of {config.steps}: nothing left to do (--steps says how far)")
    checkpoint.begin_run(folder, {**dataclasses.asdict(config), "out": "", "resume": False}, first)
    fsdp_utils.copy_weights(model, sampler)
    sampling = dict(max_length=config.sequence_length, max_batch=config.max_batch,
                    max_new_tokens=config.max_new_tokens or config.sequence_length)  # fmt: skip
    log = Log(config, folder, ranks, first)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    log.say(f"{folder}: {ranks.world} x {ranks.device.type}, {dtype}, {size:,.2f} M weights, {len(prompts):,} problems")

    def held_out_metrics():
        with Progress("evaluating", len(held_out[0]) * config.eval_samples // ranks.world, log.shown) as progress:
            metrics = evaluate(sampler, tokenizer, *held_out, config.eval_samples, config.seed, ranks,
                               temperature=1.0, progress=progress, **sampling)  # fmt: skip
        return {f"eval/{name}": value for name, value in metrics.items()}

    if not state:
        log.row({"step": 0, **held_out_metrics()})
    groups = config.batch_size // config.group_size
    for step in range(first, config.steps):
        start = fsdp_utils.clock(ranks.device)

        # problems: the same ones on every rank
        chosen = data.problems_of_step(len(problems), groups, config.seed, step)
        step_prompts, answers = [prompts[i] for i in chosen], [problems[i].answer for i in chosen]

        # rollouts, graded: each rank samples its share, then all ranks know all
        part = share(all_pairs(groups, config.group_size), ranks.rank, ranks.world)
        streams = [(config.seed, step, problem) for problem in range(groups)]
        with Progress("sampling", config.batch_size // ranks.world, log.shown) as progress:
            mine = attempt(sampler, tokenizer, answers, step_prompts, part, streams,
                           temperature=config.temperature, progress=progress, **sampling)  # fmt: skip
        attempts = exchange(mine, step_prompts)
        rollout_seconds = fsdp_utils.clock(ranks.device) - start

        # rewards -> advantages
        rewards = torch.tensor([reward_of(a, config, step) for a in attempts]).view(groups, config.group_size)
        lengths = torch.tensor([len(a.rollout.completion) for a in attempts]).view(groups, config.group_size)
        advantages = rloo.rloo_advantages(rloo.discounted(rewards, lengths, config.gamma), config.divide_by_std)

        # one policy-gradient step, then the new weights go to the sampler
        rollouts = [a.rollout for a in attempts]
        metrics = update(model, reference, optimizer, config, rollouts, advantages, step, ranks, tokenizer.valid_vocab)
        fsdp_utils.copy_weights(model, sampler)
        seconds = fsdp_utils.clock(ranks.device) - start

        # records; row s holds update s, and the evaluation and checkpoint of the weights after it
        row = {
            "step": step + 1, "epoch": (step + 1) * groups / len(problems), "reward": rewards.mean().item(),
            "groups_with_signal": advantages.any(1).double().mean().item(),
            "length": lengths.double().mean().item(), "length_max": lengths.max().item(),
            "cut": sum(a.rollout.finish_reason == "length" for a in attempts) / len(attempts),
            **{f"grade/{reason}": sum(a.reason == reason for a in attempts) for reason in grader.REASONS}, **metrics,
            "seconds": seconds, "seconds_rollout": rollout_seconds, "seconds_update": seconds - rollout_seconds,
            "tokens_per_second": lengths.sum().item() / rollout_seconds,
            "memory_gb": fsdp_utils.all_max(fsdp_utils.peak_memory_gb(ranks.device)),
        }  # fmt: skip
        last = step + 1 == config.steps
        if last or (step + 1) % config.eval_every == 0:
            row |= held_out_metrics()
        stride = max(1, len(mine) // max(1, config.log_rollouts))
        shown = mine[::stride][: config.log_rollouts]
        log.row(row, [
            {"step": step + 1, "question": problems[chosen[a.problem]].question, "answer": answers[a.problem],
             "completion": a.text, "reward": rewards[a.problem, a.sample].item(), "reason": a.reason,
             "tokens": len(a.rollout.completion), "finish_reason": a.rollout.finish_reason}
            for a in shown])  # fmt: skip

        # checkpoints: step-NNNN loads as any Hugging Face model, state-NNNN continues this run
        if config.save_every and (last or (step + 1) % config.save_every == 0):
            weights, card = fsdp_utils.full_tensors(model, torch.bfloat16), partial(model_card, folder, step + 1)
            log.guard(partial(export, weights, model_dir, folder / f"step-{step + 1:04d}", tokenizer, card))
            facts, name = {"step": step + 1, "data": fingerprint}, folder / f"state-{step + 1:04d}"
            log.guard(partial(checkpoint.save_state, name, model, optimizer, facts, ranks, config.keep))
    log.finish(time.perf_counter() - begin)
    fsdp_utils.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
