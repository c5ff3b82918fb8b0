"""From trained weights to a folder that others load: weights, configuration, tokenizer, model card.

Owns the export (train.py writes every checkpoint step-NNNN through it) and the card, which docs/model_card.md words.
The command exports any training state that was kept, whatever the number of processes that wrote it, or renews a card:

    python publish.py runs/.../state-0200                                            -> runs/.../step-0200
    python publish.py runs/.../step-0200 --evaluation evals/...-step-0200            the card shows these results

Without --evaluation a renewed card shows the held-out results of training.
"""

import itertools
import json
import re
import shutil
import string
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError

import checkpoint
import data
from console import CommandLine, UserError, exits_cleanly
from model import read_json, save_weights

TEMPLATE = Path(__file__).resolve().parent / "docs" / "model_card.md"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
                   "special_tokens_map.json", "added_tokens.json")  # fmt: skip


def export(tensors, source_dir, folder, tokenizer, card=lambda: ""):
    """Writes a checkpoint folder that loads in transformers, vLLM and here; on a full disk a UserError, and nothing.

    tensors: (name, bf16 tensor) pairs of all parameters, perhaps a generator that must be exhausted on every process
    and yields None for tensors on those that do not write. source_dir: the checkpoint that training began from, whose
    config and tokenizer are copied; tokenizer: its data.Tokenizer. card() -> text of README.md; "" for none.
    """
    folder, source, tensors = Path(folder), Path(source_dir), iter(tensors)
    temporary, first = folder.with_name(folder.name + ".tmp"), next(tensors)
    writes = first[1] is not None
    if not writes:
        for _ in tensors:  # takes part in every gather, keeps nothing
            pass
        return
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_weights(itertools.chain([first], tensors), temporary)
        _write_rest(source, temporary, tokenizer, card())
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        for _ in tensors:  # the others are still taking part
            pass
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{folder}: {getattr(error, 'strerror', None) or error}") from error


def _write_rest(source, folder, tokenizer, card):
    for file in TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copyfile(source / file, folder / file)
    config = {key: value for key, value in read_json(source / "config.json").items() if key != "dtype"}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2))
    # without every stop id a served model never ends; temperature 1 and no top-k is what it was trained and judged at
    generation = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
                  "eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    if card:
        (folder / "README.md").write_text(card)


def model_card(run, step, evaluation=None):
    """The text of a checkpoint's README.md from its run folder's config.json and metrics.jsonl.

    evaluation: the folder that eval.py wrote its results to; None: held-out results of training alone.
    """
    config = read_json(run / "config.json")
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] <= step]
    try:
        values = {**config, **_derived(config, step)}
        values |= {"curve": curve(rows), "evaluation": _evaluation(rows, evaluation)}
        return string.Template(TEMPLATE.read_text()).substitute(values)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run}: config.json or metrics.jsonl is not what train.py writes ({error!r})") from error


def read_rows(path):
    """The rows of metrics.jsonl; a last line that a kill has torn is passed over."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _derived(config, step):
    """What the card says in other words than config.json."""
    folder = Path(config["model"]).is_absolute()  # else a name on the hub
    base = "/".join(Path(config["model"]).parts[-2:])
    user = f"{config['instruction']}\n\n1 + 1 = ?" if config["instruction"] else "1 + 1 = ?"
    turns = (("system", config["system"]), ("user", user))
    data_names = {key: [Path(name).stem for name in config[key]] for key in ("train_data", "eval_data")}
    reward = {"correct": "1 for an answer equivalent to the reference, else 0", "random": "a coin: the control run"}
    return {
        "step": step, "folder": f"step-{step:04d}",
        "title": f"{base.replace('/', '-') if folder else Path(base).name}-RLOO, step {step}",
        "base": base if folder else f"[{base}](https://huggingface.co/{base})",
        "base_metadata": "# base_model: a local folder" if folder else f"base_model: {base}",
        "train_data": " and ".join(data_names["train_data"]),
        "thinking_note": " with thinking" if config["thinking"] else " without thinking",
        "system_note": ", after a system prompt" if config["system"] else "",
        "messages": repr([{"role": role, "content": text} for role, text in turns if text]),
        "max_new_tokens": config["max_new_tokens"] or config["sequence_length"], "others": config["group_size"] - 1,
        "reward_note": reward[config["reward"]]
                       + (f", times {config['gamma']}^(completion tokens)" if config["gamma"] != 1 else ""),
        "config": json.dumps({**config, "model": base, **data_names}, indent=1),
    }  # fmt: skip


def curve(rows, buckets=12):
    """Metrics rows -> lines of bars: mean training reward over up to `buckets` equal runs of steps."""
    rows = [row for row in rows if "reward" in row]
    cuts = [len(rows) * i // min(buckets, len(rows)) for i in range(min(buckets, len(rows)) + 1)] if rows else []
    lines = []
    for part in (rows[a:b] for a, b in zip(cuts, cuts[1:])):
        mean = sum(row["reward"] for row in part) / len(part)
        lines.append(f"{part[0]['step']:>5} to {part[-1]['step']:<5} {mean:.3f} {'█' * round(40 * mean)}")
    return "\n".join(lines) or "(no step yet)"


def _evaluation(rows, folder):
    if folder:
        s, table = read_json(folder / "results.json")["settings"], (folder / "results.md").read_text().strip()
        limits = "".join(f", {name} {s[name]}" for name, unset in (("top_k", 0), ("top_p", 1.0)) if s[name] != unset)
        return (f"{s['samples']} samples a problem at temperature {s['temperature']}{limits}, at most "
                f"{s['max_new_tokens']} new tokens; unbiased pass@k, 95 % bootstrap intervals.\n\n{table}")  # fmt: skip
    held_out = [row for row in rows if "eval/pass@1" in row]
    if not held_out:
        return "None yet."
    names = [name for name in held_out[0] if name.startswith("eval/pass@")]
    lines = ["| step | " + " | ".join(name[5:] for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {row['step']} | " + " | ".join(f"{100 * row[name]:.2f}" for name in names) + " |" for row in held_out]
    return "Held-out problems while training (a small sample; eval.py is the full evaluation):\n\n" + "\n".join(lines)


def parse(argv):
    """The command line -> (run folder, step, whether to export, folder of the evaluation or None)."""
    parser = CommandLine(__doc__)
    parser.add_argument("checkpoint", type=Path, help="state-NNNN (to export it) or step-NNNN (for its card) of a run")
    parser.add_argument("--evaluation", type=Path, help="folder that eval.py wrote, to be shown on the card")
    args = parser.parse_args(argv)
    name = re.fullmatch(r"(state|step)-(\d+)", args.checkpoint.name)
    if not name or not args.checkpoint.is_dir():
        raise UserError(f"{args.checkpoint}: give the folder of a checkpoint, state-NNNN or step-NNNN of a run")
    if args.evaluation and not (args.evaluation / "results.json").is_file():
        raise UserError(f"{args.evaluation}: no results.json; give the folder that eval.py printed when it finished")
    return args.checkpoint.parent, int(name[2]), name[1] == "state", args.evaluation


@exits_cleanly
def main(argv=None):
    """The command: exports a training state, or renews the card of an exported checkpoint."""
    run, step, exporting, evaluation = parse(argv)
    target = run / f"step-{step:04d}"
    try:
        if evaluation:
            weights = checkpoint.digest_files(target.glob("*.safetensors"))
            if read_json(evaluation / "results.json").get("settings", {}).get("weights") != weights:
                raise UserError(f"{evaluation}: the results of other weights than those of {target}")
        card = model_card(run, step, evaluation)
        if exporting:
            source = data.local_model(read_json(run / "config.json")["model"])
            tensors = checkpoint.state_tensors(run / f"state-{step:04d}", torch.bfloat16)
            export(tensors, source, target, data.Tokenizer(source), lambda: card)
        else:
            checkpoint.write(target / "README.md", card)
    except OSError as error:
        raise UserError(f"{error.filename or target}: {error.strerror}; nothing was replaced") from error
    print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
