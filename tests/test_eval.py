"""eval.py against enumeration and recounts, on a random Qwen3 whose every answer is one token.

Together these tests prove: every attempt is made exactly once whatever the number of processes and however often they
were killed, what the command prints is what a recount of its rollouts says, and results of other settings never mix.
"""

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from workers_common import launch

import checkpoint
import data
import eval as eval_file
import fsdp_utils
from console import UserError
from eval import Attempt, all_pairs, attempt, evaluate, exchange, load_model, share
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


# Shares


@pytest.mark.parametrize("problems, samples", [(1, 1), (5, 3), (7, 16), (2, 1), (256, 4), (0, 4)])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 7, 64])
def test_share_covers_every_attempt_once(problems, samples, world):
    """DistributedSampler repeats items where the set is not divisible, and accuracy then depends on the GPUs."""
    parts = [share(all_pairs(problems, samples), rank, world) for rank in range(world)]
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


def every_attempt(model, tokenizer, problems, prompts, samples, seed):
    return attempt(model, tokenizer, [p.answer for p in problems], prompts, share(all_pairs(len(problems), samples), 0, 1),
                   [(seed, "eval", p.question) for p in problems], **SAMPLING)  # fmt: skip


def test_evaluate_counts_what_a_recount_counts(setup, world_of_one):
    """1e-9: the same ratios in another order. Per problem first, then the mean: with all attempts of all problems put
    in as one problem's, pass@10 came out as 97.7 % (paiml/aprender PR 2118)."""
    model, tokenizer, problems, prompts = setup
    metrics = evaluate(model, tokenizer, problems, prompts, 5, 2, world_of_one, **SAMPLING)
    attempts = every_attempt(model, tokenizer, problems, prompts, 5, 2)
    expected = recount([(a.problem, a.rollout) for a in attempts], [p.answer for p in problems])
    assert metrics.keys() == expected.keys() == {"length", "cut", "no_answer", "pass@1", "pass@2", "pass@4"}
    assert metrics == pytest.approx(expected, abs=1e-9)
    assert 0 < metrics["pass@1"] < metrics["pass@2"] < metrics["pass@4"] < 1
    assert all(0 < metrics[name] < 1 for name in ("cut", "no_answer"))
    assert metrics == evaluate(model, tokenizer, problems, prompts, 5, 2, world_of_one, **SAMPLING)
    assert metrics != evaluate(model, tokenizer, problems, prompts, 5, 4, world_of_one, **SAMPLING)


def test_attempts_do_not_depend_on_the_number_of_ranks(setup):
    model, tokenizer, problems, prompts = setup

    def all_of(world):
        parts = [attempt(model, tokenizer, [p.answer for p in problems], prompts, share(all_pairs(7, 3), rank, world),
                         [(0, 1, p) for p in range(7)], **SAMPLING) for rank in range(world)]  # fmt: skip
        return [(a.problem, a.sample, a.rollout.completion, a.text, a.correct, a.reason) for part in parts for a in part]

    alone = all_of(1)
    assert [row[:2] for row in alone] == list(itertools.product(range(7), range(3)))
    assert len({tuple(row[2]) for row in alone}) > 15, "samples of a group differ"
    assert all(all_of(world) == alone for world in (2, 3, 23))


def test_attempt_decodes_without_special_tokens_and_grades_the_text(setup):
    model, tokenizer, problems, prompts = setup
    for a in every_attempt(model, tokenizer, problems, prompts, 4, 1):
        assert a.text == " ".join(WORDS[t] for t in a.rollout.completion if t not in (1, 2, 3))
        assert a.rollout.prompt == prompts[a.problem] and a.correct is (a.reason == "right")
        assert max(a.rollout.completion) < 28


@pytest.mark.parametrize("count", [0, 1, 12])
def test_exchange_round_trip(world_of_one, count):
    attempts = []
    for i in range(count):
        rollout = Rollout([1, 2], [7 + i] * (i + 1), [-0.1 * i - 1e-3] * (i + 1), ("stop", "length")[i % 2])
        attempts.append(Attempt(i // 3, i % 3, rollout, f"text {i}", i % 4 == 0, ("wrong", "right", "no answer")[i % 3]))
    back = exchange(attempts, [[i] for i in range(4)])
    assert len(back) == count
    for ours, theirs in zip(attempts, back):
        assert theirs.rollout.prompt == [ours.problem] and theirs.text == ""  # texts stay home
        assert type(theirs.correct) is bool
        assert theirs.rollout.logprobs == torch.tensor(ours.rollout.logprobs).tolist()  # fp32, as sampled
        for name in ("problem", "sample", "correct", "reason"):
            assert getattr(theirs, name) == getattr(ours, name)
        assert theirs.rollout.completion == ours.rollout.completion
        assert theirs.rollout.finish_reason == ours.rollout.finish_reason


# The table and the command


def run_main(capsys, *argv):
    threads = torch.get_num_threads()
    eval_file.main([str(a) for a in argv])
    torch.set_num_threads(threads)
    checkpoint.unlock()
    return capsys.readouterr().out


def command(folder, out, *names):
    return ["--model", str(folder), "--samples", "4", "--max_new_tokens", "8", "--sequence_length", "64", "--device", "cpu",
            "--out", str(out), *(f"--data={name}={folder.parent / name}.jsonl" for name in names)]  # fmt: skip


def cells_of(out):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]


def test_command_prints_the_table(folder, setup, capsys, tmp_path):
    out = run_main(capsys, *command(folder, tmp_path / "out", "short", "long"), "--seed", 3)
    cells = cells_of(out)
    assert [row[:2] for row in cells[2:8:2]] == [["short", "2"], ["long", "7"], ["Overall", "9"]]
    assert [row[0] for row in cells[8:]] == ["dataset", cells[9][0], *cells[2:8:2][0][:1], "95 % interval", "long", "95 % interval",
                                             "Overall", "95 % interval"]  # fmt: skip
    model, tokenizer, problems, prompts = setup
    expected = recount([(a.problem, a.rollout) for a in every_attempt(model, tokenizer, problems, prompts, 4, 3)],
                       [p.answer for p in problems])  # fmt: skip
    assert cells[4][2:5] == [f"{100 * expected[f'pass@{k}']:.2f}" for k in (1, 2, 4)]
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]["all"]
    assert results["long"]["problems"] == 7 and results["long"]["pass@1"][0] == pytest.approx(expected["pass@1"])
    weighted = [(2 * results["short"][name][0] + 7 * results["long"][name][0]) / 9 for name in expected]
    assert [results["Overall"][name][0] for name in expected] == pytest.approx(weighted)
    assert out.startswith((tmp_path / "out" / "results.md").read_text())
    kept = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(r["data"], r["problem"], r["sample"]) for r in kept] == [
        (name, p, s) for name, n in (("long", 7), ("short", 2)) for p in range(n) for s in range(4)]  # fmt: skip
    assert run_main(capsys, *command(folder, tmp_path / "out", "short", "long"), "--seed", 3) == out  # nothing left to do
    limited = run_main(capsys, *command(folder, tmp_path / "limited", "long"), "--seed", 3, "--limit", 2)
    assert cells_of(limited)[2][:2] == ["long", "2"] and "Overall" not in limited
    # the same question draws the same samples, whatever stands beside it
    assert (tmp_path / "limited" / "samples.jsonl").read_text().splitlines() == [json.dumps(r) for r in kept[:8]]


def test_table_by_level_and_subject(folder, capsys, tmp_path):
    levels = ["Level 1", "Level 2", "Level 1", None]
    rows = [{"problem": f"q{i} q1", "answer": str(i), **({"level": level, "subject": "Algebra"} if level else {})}
            for i, level in enumerate(levels)]  # fmt: skip
    (folder.parent / "levels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = run_main(capsys, *command(folder, tmp_path / "out", "levels"))
    by_level, by_subject = out.split("levels by level:")[1].split("levels by subject:")
    assert [row[:2] for row in cells_of(by_level)[2:6:2]] == [["Level 1", "2"], ["Level 2", "1"]]
    assert [row[:2] for row in cells_of(by_subject)[2:4:2]] == [["Algebra", "3"]]


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
import fsdp_utils
from eval import Attempt, exchange
from rollout import Rollout

def exchange_first(*args):
    rank = args[5].rank
    mine = [Attempt(rank, i, Rollout([1], [5] * (i + 1), [-1.0 - i] * (i + 1), "stop"), "t", i == 0, ("right", "wrong", "timeout")[rank])
            for i in range((0, 3, 1)[rank])]
    found = [(a.problem, a.sample, len(a.rollout.completion), a.rollout.logprobs[0], a.correct, a.reason)
             for a in exchange(mine, [[0]] * 3)]
    assert found == [(1, 0, 1, -1.0, True, "wrong"), (1, 1, 2, -2.0, False, "wrong"),
                     (1, 2, 3, -3.0, False, "wrong"), (2, 0, 1, -1.0, True, "timeout")], found
    assert exchange([], []) == []
    return sample_all(*args)

sample_all, eval_file.sample_all = eval_file.sample_all, exchange_first
eval_file.main(sys.argv[1:])
"""


def test_three_processes_exchange_and_print_the_same_table(folder, tmp_path, capsys):
    """Three ranks exchange 0, 3 and 1 attempts, and share 9 attempts; then 2, where one of them has nothing to do."""
    (tmp_path / "worker.py").write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3", "worker.py"]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(eval_file.__file__)}
    for names in (["short", "long"], ["short"]):
        argv = ["--seed", "7", "--samples", "1"]
        done = subprocess.run([*launch, *command(folder, tmp_path / "three", *names), *argv], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, timeout=240)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        alone = run_main(capsys, *command(folder, tmp_path / "one", *names), *argv)
        assert cells_of(done.stdout) == cells_of(alone) and len(cells_of(alone)) > 3
        for name in ("samples.jsonl", "results.md"):
            assert (tmp_path / "three" / name).read_text() == (tmp_path / "one" / name).read_text()
        assert not list((tmp_path / "three").glob("samples-*"))
        for out in ("one", "three"):
            shutil.rmtree(tmp_path / out)


# Interrupted


def torn(out, kept):
    """What a killed evaluation of two processes leaves: some lines, one of them torn, and one twice."""
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").write_text("".join(lines[:3]))
    (out / "samples-00000.jsonl").write_text("".join(lines[2:kept]) + lines[kept][:20])
    (out / "samples-00001.jsonl").write_text("".join(lines[-4:]) + lines[0][:-1])
    for name in ("results.md", "results.json"):
        (out / name).unlink()


@pytest.mark.parametrize("kept", [3, 17, 31])
def test_an_interrupted_evaluation_goes_on(folder, tmp_path, capsys, kept, monkeypatch):
    out = run_main(capsys, *command(folder, tmp_path / "out", "short", "long"))
    whole = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    torn(tmp_path / "out", kept)
    made = []
    monkeypatch.setattr(eval_file.Records, "add", lambda self, entry, add=eval_file.Records.add: made.append(entry) or add(self, entry))
    assert run_main(capsys, *command(folder, tmp_path / "out", "short", "long")) == out
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == whole
    assert len(made) == 36 - kept - 4, "what was finished is not sampled again"


@pytest.mark.parametrize("change, named", [
    (["--samples", "2"], "samples 4, not 2"), (["--seed", "1"], "seed 0, not 1"), (["--temperature", "0.5"], "temperature 1.0, not 0.5"),
    (["--limit", "1"], "data short"), (["--instruction", ""], "instruction"), (["--max_new_tokens", "7"], "max_new_tokens 8, not 7"),
    (["--top_k", "3"], "top_k"), (["--system", "q3"], "system"),
])  # fmt: skip
def test_other_settings_are_refused_with_the_difference(folder, tmp_path, capsys, change, named):
    """And the results stay as they are."""
    run_main(capsys, *command(folder, tmp_path / "out", "short"))
    whole = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match="another --out") as caught:
        eval_file.main.__wrapped__([*command(folder, tmp_path / "out", "short"), *change])
    fsdp_utils.shutdown()
    checkpoint.unlock()
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == whole


def test_another_model_is_refused(folder, tmp_path, capsys):
    """One weight in 10,000 is enough: the results of two checkpoints must never be one table."""
    run_main(capsys, *command(folder, tmp_path / "out", "short"))
    shutil.copytree(folder, tmp_path / "model")
    content = bytearray((tmp_path / "model" / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    done = subprocess.run([sys.executable, eval_file.__file__, *command(tmp_path / "model", tmp_path / "out"),
                           f"--data=short={folder.parent / 'short.jsonl'}"], capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 2 and "holds an evaluation with weights" in done.stderr and done.stderr.count("\n") == 1


def test_another_architecture_is_refused(folder, tmp_path, capsys):
    """Half of the samples once came from a model with rope_theta 10, half from one with 10,000; and stop ids decide, too."""
    run_main(capsys, *command(folder, tmp_path / "out", "short"))
    for change, named in (({"rope_theta": 10.0}, "architecture"), ({"eos_token_id": 2}, "stop_ids")):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text(json.dumps({**SHAPE, **change}))
        argv = command(tmp_path / "model", tmp_path / "out")
        with pytest.raises(UserError, match=f"holds an evaluation with {named}"):
            eval_file.main.__wrapped__([*argv, f"--data=short={folder.parent / 'short.jsonl'}"])
        fsdp_utils.shutdown()
        checkpoint.unlock()


def test_a_path_may_hold_an_equals_sign(folder, tmp_path, capsys):
    """x=DIR/a=b.jsonl once evaluated the file b.jsonl of the current folder."""
    (tmp_path / "lr=1").mkdir()
    shutil.copyfile(folder.parent / "long.jsonl", tmp_path / "lr=1" / "a=b.jsonl")
    argv = [a for a in command(folder, tmp_path / "out") if not a.startswith("--data")]
    assert cells_of(run_main(capsys, *argv, "--data", f"x={tmp_path}/lr=1/a=b.jsonl"))[2][:2] == ["x", "7"]


@pytest.mark.parametrize("content", [
    "[]", "5", '{"a": 1}', '{"data": "short"', '{"data": "other", "problem": 0, "sample": 0}', "null", "[" * 50_000,
    {"problem": 99}, {"problem": "0"}, {"sample": 4}, {"sample": -1}, {"tokens": None}, {"correct": 1}, {"answer": 3},
])  # fmt: skip
def test_a_foreign_line_is_named(folder, tmp_path, capsys, content):
    """It was counted (three of two samples), or ended in a KeyError."""
    run_main(capsys, *command(folder, tmp_path / "out", "short"))
    path = tmp_path / "out" / "samples.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = content if isinstance(content, str) else json.dumps({**json.loads(lines[2]), **content})
    path.write_text("\n".join(lines) + "\n")
    before = path.read_text()
    with pytest.raises(UserError, match="samples.jsonl, line 3: no sample of this evaluation"):
        eval_file.main.__wrapped__(command(folder, tmp_path / "out", "short"))
    fsdp_utils.shutdown()
    checkpoint.unlock()
    assert path.read_text() == before


@pytest.mark.parametrize("content", ["[]", "1", "null", "{", "\xff"])
def test_damaged_settings_are_named(folder, tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="settings.json"):
        eval_file.main.__wrapped__(command(folder, tmp_path / "out", "short"))
    fsdp_utils.shutdown()
    checkpoint.unlock()


def test_two_evaluations_do_not_share_a_folder(folder, tmp_path):
    (tmp_path / "out").mkdir()
    checkpoint.lock(tmp_path / "out")
    try:
        done = subprocess.run([sys.executable, eval_file.__file__, *command(folder, tmp_path / "out", "short")],
                              capture_output=True, text=True, timeout=120)  # fmt: skip
    finally:
        checkpoint.unlock()
    assert done.returncode == 2 and "another process" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_one_line_and_loses_nothing(folder, tmp_path, capsys):
    out = run_main(capsys, *command(folder, tmp_path / "out", "short", "long"))
    torn(tmp_path / "out", 17)
    (tmp_path / "full.py").write_text(
        "import sys, eval\nsys.path.insert(0, '.')\nopen_ = open\n"
        "eval.open = lambda path, *a: open_('/dev/full' if 'samples-' in str(path) else path, *a)\neval.main(sys.argv[1:])")  # fmt: skip
    done = subprocess.run([sys.executable, str(tmp_path / "full.py"), *command(folder, tmp_path / "out", "short", "long")],
                          env={**os.environ, "PYTHONPATH": os.path.dirname(eval_file.__file__)},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 2 and "No space left" in done.stderr and "error:" in done.stderr.splitlines()[-1]
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 21
    assert run_main(capsys, *command(folder, tmp_path / "out", "short", "long")) == out


def killed(argv, processes, out, seconds):
    """Starts the evaluation on `processes` processes and kills all of them `seconds` after its first sample.

    torchrun gives every worker a session of its own: they are found as its children.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    before = count_samples(out)
    running = subprocess.Popen([sys.executable, *launch, eval_file.__file__, *argv], start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    if seconds is None:
        return running.communicate(timeout=600)[0]
    while running.poll() is None and count_samples(out) <= before:
        time.sleep(0.05)
    time.sleep(seconds)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    for pid in (str(running.pid), *(children.read_text().split() if children.exists() else ())):
        os.kill(int(pid), signal.SIGKILL)  # a zombie, too: it is not waited for yet
    running.communicate()


def count_samples(out):
    seen = set()
    for path in out.glob("samples*.jsonl"):
        try:
            lines = path.read_text().splitlines(keepends=True)
        except FileNotFoundError:  # merged this very moment
            continue
        seen |= {(json.loads(line)["problem"], json.loads(line)["sample"]) for line in lines if line.endswith("\n")}
    return len(seen)


@pytest.mark.parametrize("problems, samples, wait, processes", [
    (40, 8, 0.3, (2, 1)), pytest.param(200, 32, 2, (2, 3, 1), marks=pytest.mark.slow)])  # fmt: skip
def test_killed_at_random_moments_it_prints_the_same_table(tmp_path, problems, samples, wait, processes):
    """The tiny model, SIGKILL to every process at once, each time restarted on another number of processes."""
    root = os.path.dirname(eval_file.__file__)
    argv = ["--model", f"{root}/tiny/model", "--data", f"tiny={root}/tiny/test.jsonl", "--limit", str(problems), "--samples",
            str(samples), "--max_new_tokens", "48", "--sequence_length", "96", "--device", "cpu"]  # fmt: skip
    whole = killed([*argv, "--out", str(tmp_path / "whole")], 1, tmp_path / "whole", None)
    seed = int(time.time())
    counts, out, draw = [0], tmp_path / "out", random.Random(seed)
    for n in processes:
        killed([*argv, "--out", str(out)], n, out, draw.random() * wait)
        counts.append(count_samples(out))
    last = killed([*argv, "--out", str(out)], 2, out, None)
    print(f"seed {seed}: killed at {counts[1:]} of {problems * samples} samples")
    assert counts == sorted(counts) and 0 < counts[1]
    assert cells_of(last) == cells_of(whole) and len(cells_of(whole)) == 8, seed
    assert (out / "samples.jsonl").read_text() == (tmp_path / "whole" / "samples.jsonl").read_text()


@pytest.mark.slow
def test_real_files_end_to_end(shared, tmp_path):
    """GSM8K test and MATH-500 whole, prompts by the real Qwen3 tokenizer, 2 short samples a problem, two processes."""
    model, real = tmp_path / "model", json.loads((shared / "qwen3" / "0.6b" / "config.json").read_text())
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(shared / "qwen3" / name, model / name)
    config = {**real, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
              "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    network = Qwen3(Qwen3Config.from_json(model / "config.json")).init_weights()
    save_weights(((n, p.detach().bfloat16()) for n, p in network.named_parameters()), model)
    start = time.time()
    done = launch(2, "eval.py", "--model", model, "--data", f"gsm8k={shared}/data/gsm8k_test.jsonl", "--data",
                  f"math_500={shared}/data/math_500.jsonl", "--samples", 2, "--max_new_tokens", 16, "--out", tmp_path / "out",
                  "--device", "cpu", timeout=1200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{time.time() - start:.0f} s\n{done.stdout}")
    rows = {row[0]: row for row in reversed(cells_of(done.stdout))}  # of two tables with a row the first is kept
    assert [rows[name][1] for name in ("gsm8k", "math_500", "Overall")] == ["1319", "500", "1819"]
    assert [rows[f"Level {i}" if f"Level {i}" in rows else str(i)][1] for i in range(1, 6)] == ["43", "90", "105", "128", "134"]
    assert int(rows["Algebra"][1]) == 124 and len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 3638


# Mistakes


@pytest.mark.parametrize("options", [
    [], ["--prompt", "x", "--data", "a=b"], ["--data", "file.jsonl"], ["--data", "=file"], ["--data", "a=b", "c="],
    ["--prompt", "x", "--samples", "0"], ["--data", "a=b", "--limit", "0"], ["--prompt", "x", "--temperature", "-1"],
    ["--prompt", "x", "--top_k", "-1"], ["--prompt", "x", "--top_p", "1.5"], ["--prompt", "x", "--top_p", "nan"],
    # each of these once hung, crashed or was silently accepted
    ["--prompt", "x", "--max_batch", "0"], ["--data", "a=b", "--max_new_tokens", "-5"], ["--prompt", "x", "--flag"],
    ["--prompt", "x", "--temperature", "nan"], ["--prompt", "x", "--temperature", "1e-40"],
    ["--prompt", "x", "--sequence_length", "-1"], ["--data", "a=b", "a=c"], ["--data", "Overall=b"],
    ["--data", "gsm8k_test", "--data", "gsm8k_test=x"],
])  # fmt: skip
def test_wrong_options_are_user_errors(options):
    with pytest.raises(UserError) as caught:
        eval_file.parse(["--model", "somewhere", *options])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change, named", [
    (["--model", "nowhere"], "nowhere"), (["--data", "a=missing.jsonl"], "missing.jsonl"), (["--data", "nofile"], "NAME=FILE"),
    (["--sequence_length", "100000"], "100000"), (["--sequence_length", "3"], "2 of 2 problems skipped"),
])  # fmt: skip
def test_mistake_is_one_line_and_exit_code_2(folder, tmp_path, change, named):
    done = subprocess.run([sys.executable, eval_file.__file__, *command(folder, tmp_path / "out", "short"), *change],
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and named in done.stderr and done.stderr.startswith("error: ")


def test_loaded_model_is_for_sampling_only(folder, tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        load_model(tmp_path / "nowhere", CPU, torch.float32)
    model = load_model(folder, CPU, torch.float32)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
