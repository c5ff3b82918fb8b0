"""train.py as a user runs it: whole runs of a random Qwen3 of 60,000 parameters with a byte tokenizer made here.

Together: one seed gives one run, whatever the number of processes and whether or not it was interrupted; every flag
does what it says and the defaults are the published recipe; a step that has nothing to learn from does exactly what the
recipe says; every mistake of a user ends in one line before any work; and a broken rank takes the others down at once.

Runs within this process are worlds of one (1 s each); those that need more, or an exit status, are launched. Between
numbers of processes the rollouts are equal token for token and sums differ by fp32 rounding in another order: 1e-4
relative for a gradient norm. Interrupted against uninterrupted: bits.
"""

import ast
import dataclasses
import json
import math
import re
import shutil
import time

import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from workers_common import (
    ROOT,
    launch,
    tiny_config,
    tiny_model,
    tiny_rollouts,
    write_model,
)

import checkpoint
import fsdp_utils
import grader
import train
from console import UserError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VALID, VOCAB = 259, 263  # 256 bytes and the special tokens; the logits have more rows, and a prime number of them
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TIMES = ("seconds", "seconds_rollout", "seconds_update", "tokens_per_second", "memory_gb")


def write_tokenizer(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VALID - 1, VALID - 3]}))


def write_problems(folder):
    gsm = [{"question": f"{i}+{i % 3}=", "answer": f"So\n#### {i + i % 3}"} for i in range(7)]
    maths = [{"problem": f"{i}*2=", "solution": rf"\boxed{{{2 * i}}}"} for i in range(4)]
    for name, rows in (("gsm", gsm), ("math", maths), ("held_out", gsm[:3] + maths[:2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with model/ and the problem files, which no test changes."""
    folder = tmp_path_factory.mktemp("made")
    write_model(tiny_model(tiny_config(vocab=VOCAB, hidden_size=32, initializer_range=0.15)), folder / "model")
    write_tokenizer(folder / "model")
    write_problems(folder)
    return folder


@pytest.fixture
def flags(made, tmp_path):
    """A function: overrides -> the command line of a small run whose random reward gives signal at every step."""
    return lambda out=tmp_path / "run", **overrides: command(made, out, **overrides)


def command(made, out, **overrides):
    settings = dict(
        model=made / "model", train_data=[made / "gsm.jsonl", made / "math.jsonl"], eval_data=[made / "held_out.jsonl"],
        out=out, group_size=4, batch_size=12, steps=3, lr=1e-2, warmup_steps=2, instruction="Go.", sequence_length=64,
        max_new_tokens=9, micro_batch_tokens=150, reward="random", eval_every=2, eval_problems=4, eval_samples=2,
        save_every=0, device="cpu", temperature=0.9, log_rollouts=100,
    ) | overrides  # fmt: skip
    line = []
    for name, value in settings.items():
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return line


@pytest.fixture
def run(flags, tmp_path, monkeypatch):
    """A function: overrides -> the rows of metrics.jsonl of a run in this process, a world of one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads, count = torch.get_num_threads(), iter(range(100))

    def go(out=None, **overrides):
        out = out or tmp_path / f"run-{next(count)}"
        try:
            train.main.__wrapped__(flags(out, **overrides))
        finally:
            if torch.distributed.is_initialized():
                fsdp_utils.shutdown()
            checkpoint.unlock()
        return read(out, "metrics")

    yield go
    torch.set_num_threads(threads)


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def without_times(rows):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


# One seed, one run


@pytest.fixture(scope="module")
def worlds(made, tmp_path_factory):
    """{number of processes: run folder} of the same command; the one on 2 keeps its state at every step."""
    folders = {}
    for world in (1, 2, 3):
        folders[world] = tmp_path_factory.mktemp("worlds") / f"run-{world}"
        overrides = dict(steps=4 if world == 2 else 1, save_every=int(world == 2), keep=0)
        # steps decides the learning rate after step 1 only; python alone for 1, torchrun for the others
        done = launch(world if world > 1 else 0, "train.py", *command(made, folders[world], **overrides))
        assert done.returncode == 0, done.stderr[-3000:]
        assert re.search(r"step +1 .*reward", done.stdout) and "nan" not in done.stdout
    return folders


def test_step_1_is_the_same_on_1_2_and_3_processes(worlds):
    """Completions token for token, rewards, and everything reported but the times."""
    first = {world: [row for row in read(folder, "metrics") if row["step"] == 1][0] for world, folder in worlds.items()}
    for world in (2, 3):
        assert abs(first[world]["grad_norm"] / first[1]["grad_norm"] - 1) < 1e-4
        for key in ("reward", "length", "length_max", "cut", "groups_with_signal", "sequences_trained", "lr", "epoch"):
            assert first[world][key] == first[1][key], key
        assert abs(first[world]["entropy"] / first[1]["entropy"] - 1) < 1e-4
    assert first[1]["grad_norm"] > 0.1 and first[1]["groups_with_signal"] > 0.5  # M4: there is something to compare
    assert first[1]["logprob_gap_max"] < 1e-4


def test_rollouts_of_step_1_are_the_same_and_all_different(worlds):
    """M1, M2, M3: no two ranks and no two members of a group share a random stream."""
    logged = {}
    for world, folder in worlds.items():
        logged[world] = [r for r in read(folder, "rollouts") if r["step"] == 1]
    keys = ("question", "answer", "completion", "reward", "reason", "tokens", "finish_reason")
    entire = [{key: row[key] for key in keys} for row in logged[1]]
    assert len(entire) == 12 and len({(r["question"], r["completion"]) for r in entire}) == 12
    assert len({r["completion"][:1] for r in entire[:4]}) > 1
    for world in (2, 3):  # rank 0 logs its own share, the first of the batch
        share = [{key: row[key] for key in keys} for row in logged[world]]
        assert len(share) == 12 // world and share == entire[: 12 // world]


def test_a_resumed_run_is_the_unbroken_run(worlds, made, tmp_path):
    """J1 to J6: as if killed during step 4, after its rows were half written and its checkpoint begun.

    Same state files, byte for byte, and the same metrics but for the times.
    """
    whole, broken = worlds[2], tmp_path / "broken"
    shutil.copytree(whole, broken)
    for step in (3, 4):
        shutil.rmtree(broken / f"state-000{step}")
        shutil.rmtree(broken / f"step-000{step}")
    (broken / "state-0003.tmp").mkdir()
    done = launch(2, "train.py", "--out", broken, "--resume")  # every other setting is the run folder's own
    assert done.returncode == 0, done.stderr[-3000:]
    for step in (3, 4):
        for name in ("rank-00000.safetensors", "rank-00001.safetensors", "state.json"):
            assert (broken / f"state-000{step}/{name}").read_bytes() == (whole / f"state-000{step}/{name}").read_bytes()
        exported = f"step-000{step}/model.safetensors"
        assert (broken / exported).read_bytes() == (whole / exported).read_bytes()
    assert without_times(read(broken, "metrics")) == without_times(read(whole, "metrics"))
    assert read(broken, "rollouts") == read(whole, "rollouts")
    moved = [load_file(whole / f"state-000{step}/rank-00000.safetensors") for step in (3, 4)]
    assert all(not torch.equal(moved[0][name], moved[1][name]) for name in moved[0])  # there was something to miss


def test_resuming_on_another_number_of_processes(worlds, run, tmp_path):
    """J8: 2 -> 1. The rollouts of the next step are those of the unbroken run; sums differ by rounding."""
    copy = tmp_path / "copy"
    shutil.copytree(worlds[2], copy)
    for step in (3, 4):
        shutil.rmtree(copy / f"state-000{step}")
    rows = run(copy, steps=4, save_every=1, resume=True)
    whole = read(worlds[2], "metrics")
    assert [row["step"] for row in rows] == [row["step"] for row in whole] == [0, 1, 2, 3, 4]
    assert abs(rows[3]["grad_norm"] / whole[3]["grad_norm"] - 1) < 1e-3
    assert rows[3]["reward"] == whole[3]["reward"] and rows[3]["length"] == whole[3]["length"]


def test_an_exported_checkpoint_loads_as_it_is(worlds, made):
    """F1, F2, F5, F6: bf16, tied head not written, stop ids and tokenizer beside it; it can be trained from."""
    folder = worlds[2] / "step-0004"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}
        assert "lm_head.weight" not in file.keys()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (made / "model" / name).read_bytes()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [VALID - 3, VALID - 1]
    masters = [load_file(worlds[2] / f"state-0004/rank-0000{rank}.safetensors") for rank in (0, 1)]
    for name, tensor in load_file(folder / "model.safetensors").items():
        full = torch.cat([rank[f"{name}.master"] for rank in masters])
        assert full.dtype == torch.float32 and torch.equal(full.bfloat16(), tensor)


# Records


def test_metrics_and_rollouts_files(run, tmp_path):
    rows = run(tmp_path / "run", steps=5, eval_every=2, save_every=2, log_rollouts=3)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [0, 2, 4, 5]  # first and last among them
    assert all({"eval/pass@1", "eval/pass@2", "eval/length", "eval/cut"} <= row.keys() for row in rows if row["step"] in (0, 5))
    names = {"epoch", "reward", "groups_with_signal", "length", "length_max", "cut", "sequences_trained", "lr", "loss",
             "grad_norm", "entropy", "logprob_gap_mean", "logprob_gap_p95", "logprob_gap_max", "truncated_share",
             "effective_sample_share", *TIMES}  # fmt: skip
    for row in rows[1:]:
        assert names <= row.keys()
        assert all(math.isfinite(value) for value in row.values())
        assert sum(row[f"grade/{reason}"] for reason in grader.REASONS) == 12  # every verdict of the grader has a name
        assert row["seconds"] > 0 and 0.01 < row["memory_gb"] < 100
    assert [row["epoch"] for row in rows[1:]] == [step * 3 / 11 for step in (1, 2, 3, 4, 5)]
    assert len(read(tmp_path / "run", "rollouts")) == 5 * 3
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        ".lock", "config.json", "metrics.jsonl", "rollouts.jsonl", "state-0004", "state-0005",  # the newest two
        *(f"step-000{s}" for s in (2, 4, 5))}  # fmt: skip


def test_the_saved_config_is_the_effective_one(run, tmp_path):
    run(tmp_path / "run", steps=1, gamma=0.5)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved.keys() == {field.name for field in dataclasses.fields(train.Config)}
    assert saved["gamma"] == 0.5 and saved["steps"] == 1 and saved["adam_beta2"] == 0.999
    assert train.Config(**saved)  # and it is a valid --config file


def test_the_readmes_command_can_be_run_twice(monkeypatch, tmp_path, made):
    """Without --out every run gets a folder of its own under runs/."""
    monkeypatch.chdir(tmp_path)
    config, name = train.parse_config(["--model", str(made / "model")])
    assert config.out == "" and name == "model"
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/train.json").write_text('{"steps": 7}')
    config, name = train.parse_config(["--config", "tiny/train.json", "--steps", "8"])
    assert config.steps == 8 and name == "tiny"  # a flag wins over the file


# What the knobs do


def test_the_kl_term_starts_at_zero_and_then_pulls(run):
    """At step 1 policy = reference: gradient of k3 is exactly 0, so the norm is that without KL. Then it is not."""
    plain, pulled = run(kl_coef=0.0, steps=2), run(kl_coef=5.0, steps=2)
    assert pulled[1]["sequences_trained"] == 12 > plain[1]["sequences_trained"]  # those without advantage run as well
    assert abs(pulled[1]["grad_norm"] / plain[1]["grad_norm"] - 1) < 1e-4
    assert abs(pulled[2]["grad_norm"] / plain[2]["grad_norm"] - 1) > 1e-2


@pytest.mark.parametrize("change", [{"gamma": 0.8}, {"divide_by_std": True}, {"temperature": 0.5}, {"thinking": True},
                                    {"system": "Be brief."}, {"seed": 1}, {"reward": "correct"}])  # fmt: skip
def test_a_knob_reaches_the_first_gradient(run, baseline, change):
    thinks = change == {"thinking": True}  # this checkpoint's template has no such branch: nothing may change
    row = run(steps=1, **change)[1]
    assert (row["grad_norm"] == pytest.approx(baseline["grad_norm"], rel=1e-6)) == thinks
    if change == {"reward": "correct"}:
        assert row["grad_norm"] == 0 and row["reward"] == 0  # a random model boxes nothing


@pytest.fixture(scope="module")
def baseline(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("baseline") / "run"
    try:
        train.main.__wrapped__(command(made, out, steps=1))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return read(out, "metrics")[1]


@pytest.mark.parametrize("change", [{"micro_batch_tokens": 64}, {"activation_checkpointing": False}, {"max_batch": 3},
                                    {"epsilon": 0.5}])  # fmt: skip
def test_what_must_not_change_the_first_gradient(run, baseline, change):
    """How the work is cut is no part of the result; on policy nothing is truncated. 1e-5: fp32 sums in another order."""
    row = run(steps=1, **change)[1]
    assert row["grad_norm"] == pytest.approx(baseline["grad_norm"], rel=1e-5)
    assert row["length"] == baseline["length"] and row["reward"] == baseline["reward"]


def test_at_a_learning_rate_of_zero_nothing_drifts(run, made, tmp_path):
    """A5, A10: with frozen weights the gap between sampler and trainer stays at fp32 noise, step after step."""
    rows = run(tmp_path / "run", lr=0.0, steps=4, save_every=4)
    gaps = [row["logprob_gap_max"] for row in rows[1:]]
    assert max(gaps) < 1e-5, gaps
    assert all(row["grad_norm"] > 0.1 for row in rows[1:])
    assert all(abs(row["effective_sample_share"] - 1) < 1e-6 and row["truncated_share"] == 0 for row in rows[1:])
    before, after = load_file(made / "model/model.safetensors"), load_file(tmp_path / "run/state-0004/rank-00000.safetensors")
    assert all(torch.equal(after[f"{name}.master"], tensor) for name, tensor in before.items())


def test_a_problem_met_again_gets_new_samples(run, tmp_path):
    """J3, M1: streams are keyed by the step too, so a second epoch of frozen weights still explores."""
    (tmp_path / "one.jsonl").write_text('{"question": "1+1=", "answer": "#### 2"}\n')
    run(tmp_path / "run", lr=0.0, steps=2, batch_size=4, train_data=[tmp_path / "one.jsonl"])
    drawn = [(row["step"], row["completion"]) for row in read(tmp_path / "run", "rollouts")]
    assert [step for step, _ in drawn] == [1] * 4 + [2] * 4 and len({text for _, text in drawn}) == 8


def test_the_gap_stays_flat_while_the_weights_move(run):
    """K1, A10: a sampler left with the weights of the step before would show a gap of the size of the update."""
    rows = run(steps=4, lr=3e-2, warmup_steps=0, grad_clip=10.0)
    assert max(row["logprob_gap_max"] for row in rows[1:]) < 1e-4
    assert len({round(row["entropy"], 3) for row in rows[1:]}) == 4  # the weights did move


# Steps with nothing to learn from


@pytest.fixture
def alone(made, flags, monkeypatch):
    """config, ranks, model and optimiser of a world of one, and a function that makes one update of them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    ranks = fsdp_utils.init_distributed("cpu")

    def build(**overrides):
        config = train.parse_config(flags(warmup_steps=0, weight_decay=0.1, **overrides))[0]
        model = train.build_model(config, config.model, ranks, torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=config.weight_decay, fused=True)
        rollouts = tiny_rollouts([(4, 3), (4, 6)] * 4, VALID)

        def update(advantages, step):
            advantages = torch.tensor(advantages, dtype=torch.float64)
            return train.update(model, None, optimizer, config, rollouts, advantages, step, ranks, VALID)

        return config, model, optimizer, update

    yield build
    fsdp_utils.shutdown()
    torch.set_num_threads(threads)


SIGNAL, FLAT = [[1.0, -1.0, 0.5, -0.5], [0.0] * 4], [[0.0] * 4, [0.0] * 4]


def snapshot(model, optimizer):
    weights = [p.detach().to_local().clone() for p in model.parameters()]
    moments = [[optimizer.state[p][k].to_local().clone() for p in model.parameters()] for k in ("exp_avg", "exp_avg_sq")]
    return weights, *moments


def test_a_flat_step_still_steps(alone):
    """design.md, section 2: zero gradients; the moments decay by their betas, and the old momentum and the weight decay
    still move the weights."""
    config, model, optimizer, update = alone()
    assert update(SIGNAL, 0)["grad_norm"] > 0
    weights, first, second = snapshot(model, optimizer)
    metrics = update(FLAT, 1)
    assert metrics["grad_norm"] == 0 and metrics["loss"] == 0 and metrics["sequences_trained"] == 0
    after = snapshot(model, optimizer)
    lr = train.learning_rate(config, 1)
    assert metrics["lr"] == lr > 0
    for w, m, v, w2, m2, v2 in zip(weights, first, second, *after):
        torch.testing.assert_close(m2, 0.9 * m, rtol=1e-6, atol=0)
        torch.testing.assert_close(v2, 0.999 * v, rtol=1e-6, atol=0)
        step = (m2 / (1 - 0.9**2)) / ((v2 / (1 - 0.999**2)).sqrt() + 1e-8)
        torch.testing.assert_close(w2, w * (1 - lr * config.weight_decay) - lr * step, rtol=1e-5, atol=1e-7)
        assert not torch.equal(w, w2)


def test_a_batch_emptied_by_filtering_does_not_step(alone):
    _, model, optimizer, update = alone(filter_groups=True)
    assert update(SIGNAL, 0)["grad_norm"] > 0  # only the first group counts
    before = snapshot(model, optimizer)
    metrics = update(FLAT, 1)
    assert "grad_norm" not in metrics and metrics["sequences_trained"] == 0
    after = snapshot(model, optimizer)
    assert all(torch.equal(a, b) for x, y in zip(before, after) for a, b in zip(x, y))
    assert all(p.grad is None for p in model.parameters())


def test_filtering_leaves_the_denominator(alone):
    """One of two groups is flat: without it B is half as large, and the gradient twice."""
    norms = [alone(filter_groups=filtered)[3](SIGNAL, 0)["grad_norm"] for filtered in (False, True)]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-6)


def test_a_whole_run_that_filtering_empties(run):
    rows = run(reward="correct", filter_groups=True, steps=2)
    assert [row["step"] for row in rows] == [0, 1, 2] and all("grad_norm" not in row for row in rows)
    assert "eval/pass@1" in rows[2]


def test_a_gradient_that_is_no_number_stops_the_run(alone):
    """I4: the step is named and not taken."""
    _, model, optimizer, update = alone()
    with torch.no_grad():
        next(model.parameters()).to_local()[70:80] = float("nan")
    before = [p.detach().to_local().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="step 8.*nan"):
        update(SIGNAL, 7)
    assert all(torch.equal(a, p.to_local().detach()) for a, p in list(zip(before, model.parameters()))[1:])
    assert not optimizer.state


# Configuration


def test_the_defaults_are_the_reference_recipe():
    """design.md, section 2, row by row."""
    recipe = dict(
        model="Qwen/Qwen3-1.7B", train_data=["gsm8k_train", "math_train"], group_size=16, batch_size=256,
        epsilon=0.02, kl_coef=0.0, gamma=1.0, divide_by_std=False, filter_groups=False, lr=1e-6, warmup_steps=25,
        steps=1500, adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.01, grad_clip=0.3, sequence_length=8192,
        max_new_tokens=0, temperature=1.0, micro_batch_tokens=4 * 8192, save_every=200, thinking=False, system="",
        instruction=r"Please reason step by step, and put your final answer within \boxed{}.", reward="correct",
        reward_cut=True, eval_problems=256, eval_samples=4, wandb="", dtype="auto", resume=False, out="",
        eval_data=["gsm8k_test", "math_500"], keep=2,
    )  # fmt: skip
    config = dataclasses.asdict(train.parse_config([])[0])
    assert {name: config[name] for name in recipe} == recipe


def test_the_learning_rate_is_a_function_of_the_step():
    """J1, J2: warm-up over 25 steps from 1/25, times a cosine that reaches 0 at the end."""
    config = train.parse_config([])[0]
    values = {0: 1e-6 / 25, 9: 1e-6 * 10 / 25 * 0.5 * (1 + math.cos(math.pi * 9 / 1500)),
              24: 1e-6 * 0.5 * (1 + math.cos(math.pi * 24 / 1500)), 750: 0.5e-6,
              1499: 1e-6 * 0.5 * (1 - math.cos(math.pi / 1500))}  # fmt: skip
    for step, value in values.items():
        assert train.learning_rate(config, step) == pytest.approx(value, rel=1e-9), step
    rates = [train.learning_rate(config, step) for step in range(1500)]
    assert max(rates) <= 1e-6 and rates.index(max(rates)) == 24 and min(rates) > 0
    assert train.learning_rate(dataclasses.replace(config, warmup_steps=0), 0) == 1e-6


def test_every_field_of_the_config_is_read():
    """No knob is wired to nothing: each is an attribute of `config` somewhere outside the class and its checks."""
    source = ast.parse((ROOT / "train.py").read_text())
    outside = [node for node in source.body if not (isinstance(node, ast.ClassDef) and node.name == "Config")]
    read = {
        node.attr for part in outside for node in ast.walk(part)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config")
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(train.Config)} - read == set()


def test_help_shows_every_field(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.parse_config(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(f"--{field.name}" in text for field in dataclasses.fields(train.Config))


# Mistakes of a user: one line, before any work


@pytest.mark.parametrize("line, words", [
    (["--learning_rate", "1"], ["unknown", "learning_rate"]),
    (["--grop_size", "4"], ["--grop_size", "group_size"]),
    (["--steps=3", "--wandbb=x"], ["--wandbb", "wandb"]),
    (["stray"], ["stray"]),
    (["--lr", "fast"], ["lr", "fast"]),
    (["--lr", "nan"], ["lr", "nan"]),
    (["--steps", "2.5"], ["steps", "2.5"]),
    (["--steps"], ["steps"]),
    (["--group_size", "1"], ["group_size is 1", "2.."]),
    (["--group_size", "0"], ["group_size"]),
    (["--group_size", "-4"], ["group_size"]),
    (["--batch_size", "250"], ["batch_size 250", "multiple of group_size 16"]),
    (["--batch_size", "0"], ["batch_size"]),
    (["--temperature", "0"], ["temperature"]),
    (["--temperature", "-1"], ["temperature"]),
    (["--gamma", "1.5"], ["gamma"]),
    (["--reward", "always"], ["reward", "random"]),
    (["--dtype", "float16"], ["dtype"]),
    (["--device", "tpu"], ["device"]),
    (["--steps", "0"], ["steps"]),
    (["--eval_every", "0"], ["eval_every"]),
    (["--grad_clip", "0"], ["grad_clip"]),
    (["--micro_batch_tokens", "100"], ["micro_batch_tokens 100", "8192"]),
    (["--resume"], ["--out"]),
    (["--resume", "--out", "nowhere"], ["nowhere"]),
    (["--config", "nowhere.json"], ["nowhere.json"]),
    (["--lr", "inf"], ["lr"]),
])  # fmt: skip
def test_wrong_flags(line, words):
    refused(lambda: train.parse_config(line), words)


@pytest.mark.parametrize("content, words", [
    ({"learning_rate": 1}, ["unknown", "learning_rate"]),
    ({"grop_size": 1}, ["grop_size", "group_size"]),
    ({"lr": "1e-6"}, ["lr", "1e-6"]),
    ({"steps": 2.5}, ["steps", "2.5"]),
    ({"steps": True}, ["steps", "True"]),
    ({"resume": 1}, ["resume", "1"]),
    ({"train_data": "one.jsonl"}, ["train_data", "one.jsonl"]),
    ({"train_data": []}, ["train_data"]),
    ({"train_data": [3]}, ["train_data", "3"]),
    ({"system": None}, ["system", "None"]),
    (["lr"], ["list"]),
    ("{not json", ["JSON"]),
])  # fmt: skip
def test_wrong_config_files(tmp_path, content, words):
    path = tmp_path / "train.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    refused(lambda: train.parse_config(["--config", str(path)]), words)


def refused(function, words):
    with pytest.raises(UserError) as caught:
        function()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    assert all(word in message for word in words), message


def broken(name):
    """-> what to do to a copy of the made folder, the overrides, and words of the message."""
    weights = "model/model.safetensors"

    def drop(folder):
        tensors = load_file(folder / weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / weights)

    def line(text):
        return lambda folder: (folder / "gsm.jsonl").write_bytes(text)

    good = b'{"question": "1+1=", "answer": "#### 2"}\n'
    return {
        "no model folder": (lambda f: shutil.rmtree(f / "model"), {}, ["model", "no such folder"]),
        "no config": (lambda f: (f / "model/config.json").unlink(), {}, ["config.json"]),
        "no weights": (lambda f: (f / weights).unlink(), {}, ["model.safetensors"]),
        "a tensor missing": (drop, {}, ["missing", "model.layers.1.mlp.up_proj.weight"]),
        "weights cut short": (lambda f: (f / weights).write_bytes((f / weights).read_bytes()[:5000]), {}, ["model.safetensors"]),
        "no tokenizer": (lambda f: (f / "model/tokenizer.json").unlink(), {}, ["tokenizer.json"]),
        "no data file": (lambda f: (f / "gsm.jsonl").unlink(), {}, ["gsm.jsonl"]),
        "empty data": (line(b""), {}, ["gsm.jsonl", "empty"]),
        "malformed data": (line(good + b'{"question": '), {}, ["gsm.jsonl", "2"]),
        "missing field": (line(good + b'{"question": "1+1="}'), {}, ["gsm.jsonl", "2", "answer"]),
        "no held-out file": (lambda f: (f / "held_out.jsonl").unlink(), {}, ["held_out.jsonl"]),
        "too long": (lambda f: None, {"sequence_length": 4097, "micro_batch_tokens": 8192}, ["4097", "4096"]),
        "all prompts too long": (lambda f: None, {"sequence_length": 5}, ["skipped", "4"]),
        "another run's folder": (lambda f: ((f / "run").mkdir(), (f / "run/config.json").write_text("{}")), {}, ["another run", "--resume"]),
        "a file for a folder": (lambda f: (f / "run").write_text(""), {}, ["cannot write"]),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", [
    "no model folder", "no config", "no weights", "a tensor missing", "weights cut short", "no tokenizer", "no data file",
    "empty data", "malformed data", "missing field", "no held-out file", "too long", "all prompts too long",
    "another run's folder", "a file for a folder",
])  # fmt: skip
def test_broken_input_ends_before_any_work(made, run, tmp_path, monkeypatch, name):
    folder = tmp_path / "input"
    shutil.copytree(made, folder)
    damage, overrides, words = broken(name)
    damage(folder)
    monkeypatch.setattr(train, "attempt", lambda *a, **k: pytest.fail("sampling began"))
    monkeypatch.setattr(train, "evaluate", lambda *a, **k: pytest.fail("evaluation began"))
    paths = dict(model=folder / "model", train_data=[folder / "gsm.jsonl", folder / "math.jsonl"],
                 eval_data=[folder / "held_out.jsonl"])  # fmt: skip
    refused(lambda: run(folder / "run", **paths, **overrides), words)
    assert not (folder / "run/metrics.jsonl").exists()


def test_resuming_on_other_problems_is_refused(made, run, tmp_path):
    """J4: the order of problems would silently be another one."""
    run(tmp_path / "run", steps=2, save_every=1)
    shutil.rmtree(tmp_path / "run/state-0002")
    refused(lambda: run(tmp_path / "run", steps=2, resume=True, train_data=[made / "gsm.jsonl"]), ["train_data", "--model"])
    lines = (made / "gsm.jsonl").read_text().splitlines(keepends=True)
    (made / "gsm.jsonl").write_text("".join(lines[1:] + lines[:1]))
    try:
        refused(lambda: run(tmp_path / "run", steps=2, resume=True), ["training problems or prompts are not the run"])
    finally:
        (made / "gsm.jsonl").write_text("".join(lines))
    assert [row["step"] for row in read(tmp_path / "run", "metrics")] == [0, 1, 2]


@pytest.mark.parametrize("change", [{"lr": 1.0}, {"seed": 1}, {"model": "elsewhere"}, {"eval_samples": 3}, {"reward": "correct"}])
def test_resuming_with_other_settings_is_refused(run, tmp_path, change):
    """It once overwrote config.json with lr 1.0 and mixed two held-out sets in one curve, and exited 0."""
    run(tmp_path / "run", steps=1, save_every=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    refused(lambda: run(tmp_path / "run", resume=True, **{"steps": 2, **change}), [f"--resume: {[*change][0]}"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before


def test_a_finished_run_has_nothing_to_resume(run, tmp_path):
    run(tmp_path / "run", steps=2, save_every=1)
    before = (tmp_path / "run/config.json").read_bytes()
    for steps in (1, 2):
        refused(lambda steps=steps: run(tmp_path / "run", steps=steps, resume=True), ["step 2 of", "nothing left"])
    assert (tmp_path / "run/config.json").read_bytes() == before


def test_two_runs_never_share_a_folder(made, tmp_path, monkeypatch):
    """Started in the same second, they once mixed their records in one folder, and both exited 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint.time, "strftime", lambda layout: "now")
    fsdp_utils.init_distributed("cpu")
    try:
        folders = [checkpoint.open_run_folder("", False, "tiny")[0] for _ in range(3)]
        assert [str(folder) for folder in folders] == ["runs/tiny-now", "runs/tiny-now-2", "runs/tiny-now-3"]
        with pytest.raises(UserError, match="holds another run|another process"):
            checkpoint.open_run_folder("runs/tiny-now", False, "tiny")
    finally:
        fsdp_utils.shutdown()
        checkpoint.unlock()


def test_keep_leaves_the_newest_states_and_every_export(run, tmp_path):
    run(tmp_path / "run", steps=4, save_every=1, keep=1)
    assert sorted(path.name for path in (tmp_path / "run").glob("st*")) == [
        "state-0004", "step-0001", "step-0002", "step-0003", "step-0004"]  # fmt: skip
    shutil.rmtree(tmp_path / "run/state-0004")
    refused(lambda: run(tmp_path / "run", steps=4, resume=True), ["no checkpoint to resume from"])


def error_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def test_plain_python_exits_2_with_one_line():
    done = launch(0, "train.py", "--grop_size", "4")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == error_lines(done) and "group_size" in done.stderr
    assert len(error_lines(done)) == 1


def test_under_torchrun_every_rank_exits_2_and_the_line_is_printed_once(made, flags, tmp_path):
    """A mistake found after the process group has formed; nobody waits for anybody."""
    start = time.perf_counter()
    done = launch(2, "train.py", *flags(model=tmp_path / "nowhere"))
    assert time.perf_counter() - start < 60  # seconds on a quiet machine; the process group's own timeout is 2 hours
    assert done.returncode != 0 and len(error_lines(done)) == 1 and "nowhere" in error_lines(done)[0]
    assert f'{ROOT}/train.py", line' not in done.stderr  # no traceback of ours; torchrun adds a report of its own
    codes = set(re.findall(r"exitcode\s*:\s*(-?\d+)", done.stderr))
    assert "2" in codes and codes <= {"2", "-15"}, done.stderr[-2000:]


def test_an_exception_on_one_rank_brings_the_others_down(made, flags):
    """G7: rank 1 breaks while rank 0 waits for it in a collective. The cause is shown, and nobody waits two hours."""
    start = time.perf_counter()
    done = launch(2, ROOT / "tests/workers_train.py", 1, 2, *flags(), timeout=90)
    assert time.perf_counter() - start < 80
    assert done.returncode != 0 and "planted fault: the sampler broke" in done.stderr
    assert re.search(r"step +1 .*reward", done.stdout) and not re.search(r"step +2 ", done.stdout)  # it had been running


# Full width: the real tokenizer and vocabulary


def full_width(shared, folder, layers, **sizes):
    """A random-weight Qwen3-0.6B cut to `layers`, with the published tokenizer, in bf16 as it is published."""
    raw = json.loads((shared / "qwen3/0.6b/config.json").read_text()) | {"num_hidden_layers": layers, **sizes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(shared / "qwen3" / name, folder / name)
    with torch.device("meta"):
        model = train.Qwen3(train.Qwen3Config.from_json(folder / "config.json"))
    model = model.to_empty(device="cpu").init_weights(0)
    tensors = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def full_width_run(shared, tmp_path, processes, train_data, model, **overrides):
    data = [shared / f"data/{name}.jsonl" for name in train_data]
    settings = dict(model=model, train_data=data, eval_data=[shared / "data/math_500.jsonl"], out=tmp_path / "run",
                    group_size=16, batch_size=32, steps=2, reward="random", sequence_length=8192, max_new_tokens=64,
                    eval_problems=1, eval_samples=1, save_every=0, device="cpu")  # fmt: skip
    line = []
    for name, value in (settings | overrides).items():
        line += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    done = launch(processes, "train.py", *line, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read(tmp_path / "run", "metrics")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["grad_norm"] > 0 and row["length_max"] <= (settings | overrides)["max_new_tokens"]
        assert row["logprob_gap_max"] < 1e-3
        print(f"step {row['step']}: {row['memory_gb']:.2f} GB a process, {row['seconds']:.1f} s "
              f"(rollouts {row['seconds_rollout']:.1f}), grad_norm {row['grad_norm']:.3f}")  # fmt: skip
    return rows


def test_full_vocabulary_in_small(shared, tmp_path):
    """The real tokenizer and 151,936 rows on a network of width 64: two steps, in about 15 s.

    32 completions of 8 tokens are 256 trained tokens a step; the logits of all of them would be 156 MB a copy.
    """
    model = full_width(shared, tmp_path / "model", 2, hidden_size=64, intermediate_size=128, head_dim=32,
                       num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    rows = full_width_run(shared, tmp_path, 0, ["math_500"], model, max_new_tokens=8)
    assert rows[1]["entropy"] == pytest.approx(math.log(151669), rel=0.01)  # nearly uniform, over the tokenizer's ids only


@pytest.mark.slow
def test_full_width(shared, tmp_path, capsys):
    """Qwen3-0.6B of 4 layers, GSM8K + MATH, sequence length 8192, G = 16, 2 problems, 2 processes: two steps.

    A process needs, in fp32: its half of master, gradient and two moments, and the sampler's whole copy, a gathered
    root group and its gradient; measured 5.5 GB a process, 120 s a step on 2 busy cores. The logits of one process's
    1024 trained tokens would add 0.62 GB for each of three tensors, which the bound would not let pass.
    """
    model = full_width(shared, tmp_path / "model", 4)
    with capsys.disabled():
        rows = full_width_run(shared, tmp_path, 2, ["gsm8k_train", "math_train"], model)
    assert max(row["memory_gb"] for row in rows[1:]) < 6.5


def test_the_gpu_script_runs_on_cpu():
    """bench/gpu_step.py is for a GPU, and must be known to work before one is at hand."""
    done = launch(0, "bench/gpu_step.py", "--tokenizer", "tiny/model", "--tiny", "--steps", "2")
    assert done.returncode == 0 and "seconds_rollout" in done.stdout and "logprob_gap_max" in done.stdout, done.stderr[-2000:]
    done = launch(0, "bench/gpu_step.py", "--tokenizer", "nowhere", "--tiny")
    assert done.returncode == 1 and done.stderr.startswith("error: nowhere lacks") and done.stderr.count("\n") == 1
