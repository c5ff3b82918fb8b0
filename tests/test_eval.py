"""eval.py against enumeration and recounts, on a random Qwen3 whose every answer is one token.

Together these tests prove: pass@k is the unbiased estimate and is refused where there is none, every attempt is made
exactly once whatever the number of processes, and what the command prints is what a recount of its rollouts says.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

import data
import eval as eval_file
import fsdp_utils
from errors import UserError
from eval import Attempt, attempt, evaluate, exchange, load_model, pass_at_k, share, table
from fsdp_utils import Ranks
from model import Qwen3, Qwen3Config, save_weights
from rollout import Rollout

fsdp_utils.reproducible_matmul()  # at import, that is before any test file has multiplied anything

# An answer is a token, so that a random model gives right and wrong ones, and a recount needs no grader.
WORDS = ["<unk>", "<end>", "<user>", "<assistant>", *(rf"\boxed{{{i}}}" for i in range(8)), *(f"q{i}" for i in range(8)),
         *"so thus hence and or but then if".split()]  # fmt: skip
SHAPE = {"model_type": "qwen3", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
         "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 1}  # fmt: skip
SAMPLING = dict(temperature=1.0, max_new_tokens=8, max_length=64)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint folder with 32 logits rows and 28 tokens, and two problem files beside it."""
    folder = tmp_path_factory.mktemp("eval") / "model"
    folder.mkdir()
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
                 "added_tokens": [{"id": i, "content": WORDS[i], **special} for i in (1, 2, 3)],
                 "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(WORDS)}, "unk_token": "<unk>"}}  # fmt: skip
    template = "{% for m in messages %}<user> {{ m.content }} {% endfor %}<assistant>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    model = Qwen3(Qwen3Config.from_json(folder / "config.json"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    save_weights(model.state_dict().items(), folder)
    for name, numbers in (("short", range(2)), ("long", range(7))):
        rows = [json.dumps({"question": f"q{i} q{i + 1}", "answer": f"#### {i}"}) for i in numbers]
        (folder.parent / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def setup(folder):
    """(model, tokenizer, problems, prompts) of the long file."""
    tokenizer = data.Tokenizer(folder)
    problems = data.load_problems([folder.parent / "long.jsonl"])
    problems, prompts = data.encode_problems(tokenizer, problems, 50)
    assert tokenizer.valid_vocab == 28 and tokenizer.stop_ids == (1,) and len({tuple(p) for p in prompts}) == 7
    return load_model(folder, CPU, torch.float32), tokenizer, problems, prompts


@pytest.fixture
def world_of_one():
    threads = torch.get_num_threads()
    yield fsdp_utils.init_distributed("cpu")
    fsdp_utils.shutdown()
    torch.set_num_threads(threads)


# pass@k and shares


def test_pass_at_k_is_the_exact_enumeration():
    """All subsets of k of n samples, the first c of which are right. 1e-12: one division of integers in float64."""
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations(range(n), k))
            exact = Fraction(sum(any(i < c for i in subset) for subset in subsets), len(subsets))
            assert math.isclose(pass_at_k(n, c, k), exact, abs_tol=1e-12), (n, c, k)
    assert pass_at_k(4, 1, 4) == 1 and pass_at_k(32, 0, 32) == 0 and pass_at_k(6, 6, 1) == 1
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)  # no overflow either


@pytest.mark.parametrize("n, k", [(2, 5), (4, 5), (1, 2), (3, 0), (3, -1)])
def test_pass_at_k_beyond_the_samples_is_refused(n, k):
    """estimate_pass_at_k([2], [0], 5) gave 1.0 without a single right sample (openai/human-eval issue 35)."""
    with pytest.raises(UserError, match=f"pass@{k}"):
        pass_at_k(n, 0, k)


@pytest.mark.parametrize("problems, samples", [(1, 1), (5, 3), (7, 16), (2, 1), (256, 4), (0, 4)])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 7, 64])
def test_share_covers_every_attempt_once(problems, samples, world):
    """DistributedSampler repeats items where the set is not divisible, and accuracy then depends on the GPUs."""
    parts = [share(problems, samples, rank, world) for rank in range(world)]
    made = [(problem, sample) for part in parts for problem, mine in part.items() for sample in mine]
    assert made == list(itertools.product(range(problems), range(samples)))  # in order, too
    sizes = [sum(map(len, part.values())) for part in parts]
    assert max(sizes) - min(sizes) <= 1


# Attempts


def recount(rollouts, answers):
    """What the metrics must be, from (problem, rollout) pairs alone: right if the last box token is the answer."""
    right = [[] for _ in answers]
    empty = 0
    for problem, rollout in rollouts:
        boxes = [token - 4 for token in rollout.completion if 4 <= token < 12]
        right[problem].append(bool(boxes) and boxes[-1] == int(answers[problem]))
        empty += not boxes
    total = len(rollouts)
    expected = {"length": sum(len(r.completion) for _, r in rollouts) / total, "no_answer": empty / total,
                "cut": sum(r.completion[-1] != 1 for _, r in rollouts) / total}  # fmt: skip
    n = len(right[0])
    for k in (k for k in (1, 2, 4, 8, 16) if k <= n):
        chances = [sum(any(s) for s in itertools.combinations(r, k)) / math.comb(n, k) for r in right]
        expected[f"pass@{k}"] = sum(chances) / len(chances)
    return expected


def test_evaluate_counts_what_a_recount_counts(setup, world_of_one):
    """1e-9: the same ratios in another order. Per problem first, then the mean: with all attempts of all problems put
    in as one problem's, pass@10 came out as 97.7 % (paiml/aprender PR 2118)."""
    model, tokenizer, problems, prompts = setup
    metrics = evaluate(model, tokenizer, problems, prompts, 5, 3, world_of_one, **SAMPLING)
    attempts = attempt(model, tokenizer, [p.answer for p in problems], prompts, 5, (3, "eval"), world_of_one, **SAMPLING)
    expected = recount([(a.problem, a.rollout) for a in attempts], [p.answer for p in problems])
    assert metrics.keys() == expected.keys() == {"length", "cut", "no_answer", "pass@1", "pass@2", "pass@4"}
    assert metrics == pytest.approx(expected, abs=1e-9)
    assert 0 < metrics["pass@1"] < metrics["pass@2"] < metrics["pass@4"] < 1
    assert all(0 < metrics[name] < 1 for name in ("cut", "no_answer"))
    assert metrics == evaluate(model, tokenizer, problems, prompts, 5, 3, world_of_one, **SAMPLING)
    assert metrics != evaluate(model, tokenizer, problems, prompts, 5, 4, world_of_one, **SAMPLING)


def test_attempts_do_not_depend_on_the_number_of_ranks(setup):
    model, tokenizer, problems, prompts = setup

    def all_of(world):
        parts = [attempt(model, tokenizer, [p.answer for p in problems], prompts, 3, (0, 1), Ranks(rank, world, CPU),
                         **SAMPLING) for rank in range(world)]  # fmt: skip
        return [(a.problem, a.sample, a.rollout.completion, a.text, a.correct, a.reason) for part in parts for a in part]

    alone = all_of(1)
    assert [row[:2] for row in alone] == list(itertools.product(range(7), range(3)))
    assert len({tuple(row[2]) for row in alone}) > 15, "samples of a group differ"
    assert all(all_of(world) == alone for world in (2, 3, 23))


def test_attempt_decodes_without_special_tokens_and_grades_the_text(setup):
    model, tokenizer, problems, prompts = setup
    for a in attempt(model, tokenizer, [p.answer for p in problems], prompts, 4, (1,), Ranks(0, 1, CPU), **SAMPLING):
        assert a.text == " ".join(WORDS[t] for t in a.rollout.completion if t not in (1, 2, 3))
        assert a.rollout.prompt == prompts[a.problem] and a.correct is (a.reason == "right")
        assert max(a.rollout.completion) < 28


@pytest.mark.parametrize("count", [0, 1, 12])
def test_exchange_round_trip(world_of_one, count):
    attempts = []
    for i in range(count):
        rollout = Rollout([1, 2], [7 + i] * (i + 1), [-0.1 * i - 1e-3] * (i + 1), ("stop", "length")[i % 2])
        attempts.append(Attempt(i // 3, i % 3, rollout, f"text {i}", i % 4 == 0, ("wrong", "right", "no answer")[i % 3]))
    back = exchange(attempts)
    assert len(back) == count
    for ours, theirs in zip(attempts, back):
        assert (theirs.rollout.prompt, theirs.text) == ([], "")  # stay home
        assert type(theirs.correct) is bool
        assert theirs.rollout.logprobs == torch.tensor(ours.rollout.logprobs).tolist()  # fp32, as sampled
        for name in ("problem", "sample", "correct", "reason"):
            assert getattr(theirs, name) == getattr(ours, name)
        assert theirs.rollout.completion == ours.rollout.completion
        assert theirs.rollout.finish_reason == ours.rollout.finish_reason


# The table and the command


def test_table_weights_overall_by_problems():
    """The reference recipe's own numbers: 1,319 problems at 80.72 and 500 at 69.94 are 77.76 overall, not 75.33."""
    rows = [("gsm8k", 1319, {"length": 100.0, "cut": 0.0, "no_answer": 0.02, "pass@1": 0.8072, "pass@32": 0.9666}),
            ("math", 500, {"length": 400.0, "cut": 0.1, "no_answer": 0.0, "pass@1": 0.6994, "pass@32": 0.9380})]  # fmt: skip
    lines = table(rows).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 5
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:4] == ["dataset", "problems", "pass@1", "pass@32"]
    assert cells[2][:4] == ["gsm8k", "1319", "80.72", "96.66"] and cells[3][:4] == ["math", "500", "69.94", "93.80"]
    assert cells[4] == ["Overall", "1819", "77.76", "95.87", "182", "2.7%", "1.5%"]


def run_main(capsys, *argv):
    threads = torch.get_num_threads()
    eval_file.main([str(a) for a in argv])
    torch.set_num_threads(threads)
    return capsys.readouterr().out


def command(folder, *names):
    return ["--model", str(folder), "--samples", "4", "--max_new_tokens", "8", "--sequence_length", "64", "--device", "cpu",
            "--data", *(f"{name}={folder.parent / name}.jsonl" for name in names)]  # fmt: skip


def test_command_prints_the_table(folder, setup, capsys):
    out = run_main(capsys, *command(folder, "short", "long"), "--seed", 3)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.strip().splitlines()]
    assert [row[:2] for row in cells[2:]] == [["short", "2"], ["long", "7"], ["Overall", "9"]]
    model, tokenizer, problems, prompts = setup
    attempts = attempt(model, tokenizer, [p.answer for p in problems], prompts, 4, (3, "eval"), Ranks(0, 1, CPU), **SAMPLING)
    expected = recount([(a.problem, a.rollout) for a in attempts], [p.answer for p in problems])
    assert cells[3][2:5] == [f"{100 * expected[f'pass@{k}']:.2f}" for k in (1, 2, 4)]
    limited = run_main(capsys, *command(folder, "long"), "--seed", 3, "--limit", 2)
    assert "| long | 2 |" in limited and "| Overall | 2 |" in limited


def test_command_completes_a_prompt(folder, capsys):
    argv = ["--model", folder, "--prompt", "q1 q2", "--samples", 2, "--max_new_tokens", 5, "--device", "cpu",
            "--sequence_length", 100]  # fmt: skip
    out = run_main(capsys, *argv)
    assert "sample 0" in out and "sample 1" in out and "tokens/s" in out
    assert out.splitlines()[:-1] == run_main(capsys, *argv).splitlines()[:-1]
    assert out.splitlines()[:-1] != run_main(capsys, *argv, "--seed", 1).splitlines()[:-1]


WORKER = """
import sys
import eval as eval_file
from eval import Attempt, evaluate, exchange
from rollout import Rollout

def evaluate_after_exchange(*args, **options):
    rank = args[6].rank
    mine = [Attempt(rank, i, Rollout([1], [5] * (i + 1), [-1.0 - i] * (i + 1), "stop"), "t", i == 0, ("right", "wrong", "timeout")[rank])
            for i in range((0, 3, 1)[rank])]
    found = [(a.problem, a.sample, len(a.rollout.completion), a.rollout.logprobs[0], a.correct, a.reason)
             for a in exchange(mine)]
    assert found == [(1, 0, 1, -1.0, True, "wrong"), (1, 1, 2, -2.0, False, "wrong"),
                     (1, 2, 3, -3.0, False, "wrong"), (2, 0, 1, -1.0, True, "timeout")], found
    assert exchange([]) == []
    return evaluate(*args, **options)

eval_file.evaluate = evaluate_after_exchange
eval_file.main(sys.argv[1:])
"""


def test_three_processes_exchange_and_print_the_same_table(folder, tmp_path, capsys):
    """Three ranks exchange 0, 3 and 1 attempts, and share 2 and 7 attempts: one of them has no work in the first file."""
    (tmp_path / "worker.py").write_text(WORKER)
    argv = [*command(folder, "short", "long"), "--samples", "1", "--seed", "7"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3", "worker.py"]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(eval_file.__file__)}
    done = subprocess.run([*launch, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    table = run_main(capsys, *argv)
    assert done.stdout.strip() == table.strip()
    assert "| long | 7 | 0.00 |" not in table and "| long | 7 | 100.00 |" not in table


# Mistakes


@pytest.mark.parametrize("options", [
    [], ["--prompt", "x", "--data", "a=b"], ["--data", "file.jsonl"], ["--data", "=file"], ["--data", "a=b", "c="],
    ["--prompt", "x", "--samples", "0"], ["--data", "a=b", "--limit", "0"], ["--prompt", "x", "--temperature", "-1"],
    ["--prompt", "x", "--top_k", "-1"], ["--prompt", "x", "--top_p", "1.5"], ["--prompt", "x", "--top_p", "nan"],
    # each of these once hung, crashed or was silently accepted
    ["--prompt", "x", "--max_batch", "0"], ["--data", "a=b", "--max_new_tokens", "-5"], ["--prompt", "x", "--flag"],
    ["--prompt", "x", "--temperature", "nan"], ["--prompt", "x", "--temperature", "1e-40"],
    ["--prompt", "x", "--sequence_length", "-1"],
])  # fmt: skip
def test_wrong_options_are_user_errors(options):
    with pytest.raises(UserError) as caught:
        eval_file.parse(["--model", "somewhere", *options])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change, named", [
    (["--model", "nowhere"], "nowhere"), (["--data", "a=missing.jsonl"], "missing.jsonl"), (["--data", "nofile"], "NAME=FILE"),
    (["--sequence_length", "100000"], "100000"), (["--sequence_length", "3"], "2 of 2 problems skipped"),
])  # fmt: skip
def test_mistake_is_one_line_and_exit_code_2(folder, change, named):
    done = subprocess.run([sys.executable, eval_file.__file__, *command(folder, "short"), *change],
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and named in done.stderr and done.stderr.startswith("error: ")


def test_loaded_model_is_for_sampling_only(folder, tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        load_model(tmp_path / "nowhere", CPU, torch.float32)
    model = load_model(folder, CPU, torch.float32)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
