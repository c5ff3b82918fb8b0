"""tiny/: the split, the answers, the files as their generator writes them, transformers' view, the start of the run.

Marked slow: the whole run for three seeds, and the control run whose reward is a coin.
"""

import ast
import json
import operator
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
import rloo
from data import INSTRUCTION, Tokenizer, load_problems
from eval import load_model
from grader import grade
from rollout import generate, stream_key
from tiny import make, problems

TINY, MODEL = ROOT / "tiny", ROOT / "tiny" / "model"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
STRANGE = ["  two  blanks", "naïve 中文 🙂 \x07", "a\r\n\n\n\tb", "I'LL pay 12,345.60$ (5%)", "\\boxed{{", "assistants"]


pytestmark = pytest.mark.usefixtures("one_thread")


def tree(text):
    return ast.parse(text, mode="eval").body


def value(node):
    if isinstance(node, ast.Constant):
        return node.value
    return OPERATORS[type(node.op)](value(node.left), value(node.right))


def canonical(node):
    """The set of commuted forms of an expression, as one value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    sides = canonical(node.left), canonical(node.right)
    return (type(node.op).__name__, *(sides if isinstance(node.op, ast.Sub) else sorted(sides, key=str)))


def rows(name):
    return [json.loads(line) for line in (TINY / f"{name}.jsonl").read_text().splitlines()]


def test_splits_are_distinct_and_disjoint():
    forms = {name: [canonical(tree(row["question"])) for row in rows(name)] for name in ("train", "test")}
    assert len(forms["train"]) == len(set(forms["train"])) >= 2000
    assert len(forms["test"]) == len(set(forms["test"])) >= 512
    assert not set(forms["train"]) & set(forms["test"])


def test_split_ignores_commuted_operands():
    for a, b in ((3, 4), (4, 3)):
        assert problems.Expression(a, "+", b, "*", 5).canonical() == "((3+4)*5)"
    assert problems.Expression(7, "*", 4, "+", 9).canonical() == problems.Expression(4, "*", 7, "+", 9).canonical()
    assert problems.Expression(7, "-", 4, "*", 9).canonical() != problems.Expression(4, "-", 7, "*", 9).canonical()
    assert problems.Expression(7, "*", 4, "-", 9).canonical() != problems.Expression(9, "*", 4, "-", 7).canonical()


@pytest.mark.parametrize("name", ["train", "test"])
def test_every_answer_is_right(name):
    for row, problem in zip(rows(name), load_problems([str(TINY / f"{name}.jsonl")]), strict=True):
        steps, _, answer = row["answer"].rpartition("\n#### ")
        assert problem.question == row["question"] and problem.answer == answer
        assert value(tree(row["question"])) == int(answer)
        for step in steps.split("\n"):
            left, _, right = step.partition("=")
            assert value(tree(left)) == int(right)
        completion = f"{steps}\n\\boxed{{{answer}}}"
        assert grade(completion, problem.answer)[0]
        assert not grade(completion.replace(f"{{{answer}}}", f"{{1{answer}}}"), problem.answer)[0]


def test_careless_demonstrations_carry_their_slips_on():
    stream = problems.draw_split(make.random.Random(5), test=False)
    right = 0
    for _ in range(2000):
        expression = next(stream)
        first, second = problems.careless(expression, make.random.Random(str(expression)), 0.16)
        assert first[:3] == (expression.a, expression.first, expression.b)
        assert second[:3] == (first[3], expression.second, expression.c)
        right += [first, second] == expression.steps()
    assert 0.35 < right / 2000 < 0.55


def test_files_are_what_the_generator_writes(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    make.make_config(made, make.make_tokenizer(made))
    make.make_problems(tmp_path, **make.PROBLEMS)
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 6
    for path in written:
        assert (tmp_path / path).read_bytes() == (TINY / path).read_bytes(), path


def test_tokenizer():
    tokenizer, config = Tokenizer(MODEL), json.loads((MODEL / "config.json").read_text())
    assert tokenizer.valid_vocab < config["vocab_size"] and config["vocab_size"] % 64 == 0
    ids = tokenizer.encode_prompt("(37-12)*4")
    assert len(ids) <= 24 and tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_prompt("(37-12)*4")
    assert sum(INSTRUCTION == tokenizer.decode([i]) for i in ids) == 1
    for text in STRANGE:
        whole = tokenizer.encode_prompt(text)
        assert tokenizer.decode(whole, skip_special_tokens=False) == tokenizer.render_prompt(text)


def test_transformers_tokenizer_agrees():
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(MODEL), Tokenizer(MODEL)
    assert theirs.eos_token_id in ours.stop_ids and theirs.pad_token_id == ours.pad_id
    for system in (None, "Be brief."):
        for thinking in (False, True):
            for question in ["(37-12)*4", *STRANGE]:
                turns = [{"role": "system", "content": system}] if system else []
                turns += [{"role": "user", "content": f"{INSTRUCTION}\n\n{question}"}]
                options = {"add_generation_prompt": True, "enable_thinking": thinking}
                assert ours.render_prompt(question, system=system, thinking=thinking) == theirs.apply_chat_template(
                    turns, tokenize=False, **options)  # fmt: skip
                if "boxed{" not in question:  # data.py takes a token's text in a question as mere characters
                    assert ours.encode_prompt(question, system=system, thinking=thinking) == theirs.apply_chat_template(
                        turns, tokenize=True, return_dict=False, **options)  # fmt: skip


def test_transformers_model_agrees():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ours, tokenizer = load_model(MODEL, "cpu", torch.float32), Tokenizer(MODEL)
    prompts = tokenizer.encode_prompts([row["question"] for row in rows("test")[:16]])
    rollouts = generate(ours, prompts, [[0]] * 16, max_new_tokens=40, max_length=96, temperature=0.0,
                        stop_ids=tokenizer.stop_ids, valid_vocab=tokenizer.valid_vocab)  # fmt: skip
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        with torch.no_grad():
            whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
        assert rollout.finish_reason == "stop"
        assert tokenizer.decode(rollout.completion) == tokenizer.decode(whole[len(prompt) :])


def test_checkpoint_starts_weak_with_room():
    passes = make.held_out(load_model(MODEL, "cpu", torch.float32), MODEL, problems=64)
    assert passes[1] <= 0.5 and passes[16] >= 0.8, passes


def test_sampler_and_trainer_agree_on_a_trained_network():
    """The committed checkpoint: sharp distributions magnify fp32 noise where a rare token was drawn (design 4.3)."""
    model, tokenizer = load_model(MODEL, "cpu", torch.float32), Tokenizer(MODEL)
    prompts = tokenizer.encode_prompts([row["question"] for row in rows("test")[:16]])
    keys = [[stream_key("gap", p, sample) for sample in range(16)] for p in range(len(prompts))]
    for temperature in (1.0, 0.7):
        rollouts = generate(model, prompts, keys, max_new_tokens=48, max_length=96, temperature=temperature,
                            stop_ids=tokenizer.stop_ids, valid_vocab=tokenizer.valid_vocab)  # fmt: skip
        batch = rloo.pack(rollouts, [0.0] * len(rollouts))
        logprobs, _ = rloo.token_logprobs(model, batch, temperature, tokenizer.valid_vocab)
        gap = (logprobs - batch.rollout_logprobs)[batch.loss_mask].abs()
        assert len(gap) > 4000 and gap.mean() <= 1e-6 and gap.max() <= 1e-4, (gap.mean(), gap.max())


def run(tmp_path, *flags):
    """One run of the README's command with further flags -> rows of its metrics.jsonl."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    command += ["--config", "tiny/train.json", "--out", str(tmp_path / "run"), *flags]
    subprocess.run(command, cwd=ROOT, check=True)
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_ten_steps_of_rloo_help_and_ten_of_coin_flips_do_not(tmp_path):
    """The short form of the two slow tests. In ten steps the real run gains 0.3 or more; 0.05 is noise of 1,024 draws."""
    flags = ("--steps", "10", "--eval_every", "1000", "--save_every", "0")
    for name, reward in (("real", "correct"), ("control", "random")):
        metrics = run(tmp_path / name, *flags, "--reward", reward)
        gain = metrics[-1]["eval/pass@1"] - metrics[0]["eval/pass@1"]
        assert gain >= 0.2 if reward == "correct" else gain <= 0.05, (reward, gain)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rloo_learns(tmp_path, seed):
    metrics = run(tmp_path, "--seed", str(seed))
    assert metrics[0]["eval/pass@1"] <= 0.5 and metrics[-1]["eval/pass@1"] >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_reward_does_not_help(tmp_path, seed):
    metrics = run(tmp_path, "--seed", str(seed), "--reward", "random", "--eval_samples", "16", "--eval_every", "1000")
    assert metrics[-1]["eval/pass@1"] - metrics[0]["eval/pass@1"] <= 0.03
