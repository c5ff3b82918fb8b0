"""Where problems and prompts come from: files and the hub, the order of training, chat prompts, text to ids and back.

Owns problems and their order (a function of seed and epoch), what is fetched by name, the instruction that asks for the
box, the checkpoint's chat template, tokenizer and stop ids. Knows no tensor, device, reward, sampling or process; torch
is not imported.
Whatever bytes are in the files it reads, only UserError comes out.
"""

import hashlib
import json
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from console import UserError
from grader import extract_answer

# Rust threads that live through a fork can deadlock the child, and one thread encodes 15,000 prompts in seconds.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
DATASETS = {  # name: (repository of data sets on the Hugging Face hub, its files)
    "gsm8k_train": ("openai/gsm8k", ["main/train-00000-of-00001.parquet"]),
    "gsm8k_test": ("openai/gsm8k", ["main/test-00000-of-00001.parquet"]),
    "math_train": ("EleutherAI/hendrycks_math", [f"{subject}/train-00000-of-00001.parquet" for subject in (
        "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
        "precalculus")]),
    "math_500": ("HuggingFaceH4/MATH-500", ["test.jsonl"]),
}  # fmt: skip
MODEL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja", "model*.safetensors", "model.safetensors.index.json"]  # fmt: skip
PROBE = "What is 1 + 1?"  # a harmless question: shows what the template does by itself
MARK = "\ufdd0"  # a Unicode noncharacter, so no template looks for it


@dataclass(frozen=True)
class Problem:
    """One row of a data set: what is asked, and what counts as right."""

    question: str
    answer: str  # the reference answer alone, as the file writes it
    level: str | None = None
    subject: str | None = None


def local_model(name: str) -> str:
    """The folder of a checkpoint: `name` itself where it is one, else fetched from the hub into its cache (or found
    there, without network). UserError: neither. Call it on one process a node."""
    if (Path(name) / "state.json").exists():
        raise UserError(f"{name} is a training state; python publish.py {name} makes a checkpoint of it")
    if (Path(name) / "metrics.jsonl").exists():
        raise UserError(f"{name} is a run folder; give one of its checkpoints, {name}/step-NNNN")
    if Path(name).is_dir():
        return name
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name}: no such folder; --model takes a checkpoint folder or a hub name like Qwen/Qwen3-1.7B")
    return _fetch(name, "model", MODEL_FILES, "give --model a checkpoint folder")


def local_files(name: str) -> list[str]:
    """The files of a data set: those of DATASETS by name, from the hub as local_model, anything else is a path."""
    if name not in DATASETS:
        return [name]
    repository, files = DATASETS[name]
    folder = _fetch(repository, "dataset", files, f"give a file (JSONL or parquet) in place of {name}")
    return [f"{folder}/{file}" for file in files]


def fetch(model: str, *sets: list[str]) -> list:
    """[folder of the model, the files of each set], a set being names of data sets and files, mixed."""
    return [local_model(model), *([file for name in names for file in local_files(name)] for names in sets)]


def _fetch(repository, kind, patterns, instead):
    from huggingface_hub import snapshot_download  # here, not above: a run on local files should not wait for it

    try:
        folder = snapshot_download(repository, repo_type=kind, allow_patterns=patterns)
        if all(any(Path(folder).glob(pattern)) for pattern in patterns[: None if kind == "dataset" else 1]):
            return folder
        reason = f"it has no {patterns[0]}"
    except Exception as error:  # a dozen kinds, from 404 to a broken connection, and they differ between versions
        known = {"LocalEntryNotFoundError": "no network, and not in the cache",
                 "RepositoryNotFoundError": "no such repository, or not public"}  # fmt: skip
        reason = known.get(type(error).__name__) or _one_line(error)
    raise UserError(f"{repository}: not found here, and fetching the {kind} from the hub failed ({reason}); {instead}")


def load_problems(paths: list[str], note=print) -> list[Problem]:
    """Problems of JSONL or parquet files, in order. Forms: GSM8K (`question`, `answer` ending in "#### n") and MATH
    (`problem`, `solution` whose last \\boxed is the answer; an `answer` field wins). A problem whose answer cannot be
    found is dropped: note() gets one line a file. UserError: anything else wrong with a line (file and line named), and
    a file that is missing, empty or left with no problem."""
    if not paths:
        raise UserError("no data file given: name at least one JSONL file of problems")
    problems = []
    for path in paths:
        parsed = _parse_file(path)
        dropped = [number for number, problem in parsed if problem is None]
        lost = f"{path}: {len(dropped)} of {len(parsed)} problems dropped, no answer found"
        if len(dropped) == len(parsed):
            raise UserError(f"{lost if dropped else f'{path}: empty'}; give a JSONL file of problems with answers")
        if dropped:
            note(f"{lost} (first on line {dropped[0]})")
        problems += [problem for _, problem in parsed if problem]
    return problems


def problem_order(n: int, seed: int, epoch: int) -> list[int]:
    """The order of n problems in an epoch: a permutation of range(n), a pure function, the same on every machine."""
    # A hash, not random.shuffle, whose algorithm Python may change between versions. 27 ms for 15,000 problems.
    return sorted(range(n), key=lambda i: hashlib.sha256(f"{seed}:{epoch}:{i}".encode()).digest())


def problems_of_step(n: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the per_step problems of a step (from 0). Epochs follow one another without a gap, so a step may
    span several; nothing is remembered, so a resumed run needs its step number alone."""
    positions = range(step * per_step, (step + 1) * per_step)
    orders = {epoch: problem_order(n, seed, epoch) for epoch in {position // n for position in positions}}
    return [orders[position // n][position % n] for position in positions]


class Tokenizer:
    """Text to ids and back for a checkpoint folder: its tokenizer.json and tokenizer_config.json and, where there,
    chat_template.jinja, generation_config.json and config.json.
    stop_ids: the end-of-sequence ids of all these files (base and chat checkpoints disagree, and models end with
    either), sorted. valid_vocab: highest id + 1; the logits have more rows, never to be sampled. pad_id: a valid id.
    UserError: a missing or malformed file (named), a template that loses the question, no stop id."""

    def __init__(self, model_dir):
        folder = Path(model_dir)
        self._file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
        with _blaming(self._file, "; give a checkpoint folder that holds its tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._file.read_bytes())
            self._tokenizer.no_truncation()  # lengths stored in the file would silently cut or fill prompts
            self._tokenizer.no_padding()
            self._added = frozenset(self._tokenizer.get_added_tokens_decoder())
            vocab = self._tokenizer.get_vocab(with_added_tokens=True)
            self.valid_vocab = max(vocab.values()) + 1
        config = _read_json(config_file)
        texts = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        texts = {name: text.get("content") if isinstance(text, dict) else text for name, text in texts.items()}
        self._special = {name: text for name, text in texts.items() if isinstance(text, str)}
        self.stop_ids = _find_stop_ids(folder, self._special.get("eos_token"), vocab)
        self.pad_id = vocab.get(self._special.get("pad_token"), self.stop_ids[0])
        self._template_file = next(path for path in (folder / "chat_template.jinja", config_file) if path.exists())
        self._template = _compile_template(self._template_file, config)
        if PROBE not in self.render_prompt(PROBE):
            raise UserError(f"{self._template_file}: the chat template does not show the user's message")

    def render_prompt(self, question: str, *, instruction=INSTRUCTION, system=None, thinking=False) -> str:
        """The prompt up to where the assistant begins, by the checkpoint's own template. User turn: instruction, blank
        line, question (no instruction: the question alone); a system turn if there is system text. thinking is the
        template's enable_thinking: False ends Qwen3's prompt with an empty think block. UserError: template fails."""
        user = f"{instruction}\n\n{question}" if instruction else question
        messages = [{"role": role, "content": text} for role, text in (("system", system), ("user", user)) if text]
        values = {**self._special, "messages": messages, "tools": None, "documents": None}
        with _blaming(self._template_file):
            return self._template.render(values, add_generation_prompt=True, enable_thinking=thinking)

    def encode_prompt(self, question: str, **options) -> list[int]:
        """Ids of one prompt, as encode_prompts."""
        return self.encode_prompts([question], **options)[0]

    def encode_prompts(self, questions: list[str], **options) -> list[list[int]]:
        """Ids of the prompts (options: render_prompt's), as by transformers' apply_chat_template but for one case: data
        may not speak the protocol. A token's text inside a question ("<|im_end|>", "<think>") is encoded as the
        characters it is made of, which transformers does only on request (sanitize_control_tokens). Instruction and
        system prompt are the operator's own and may hold control tokens. UserError: text that cannot be encoded."""
        encoded = self._encode([self.render_prompt(question, **options) for question in (PROBE, *questions)])
        controls = [[i for i in ids if i in self._added] for ids in encoded]
        return [ids if found == controls[0] else self._encode_apart(question, options)
                for question, ids, found in zip(questions, encoded[1:], controls[1:])]

    def decode(self, ids: list[int], skip_special_tokens=True) -> str:
        """Text of ids. Special tokens (<|im_end|>) stay out by default, so the grader sees words alone; <think> is not
        special and stays. Bytes that form no character come out as U+FFFD, ids of no token as nothing."""
        with _blaming(self._file):
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _encode(self, texts):
        with _blaming(self._file, " (while encoding a prompt)"):  # special tokens: the template has put them there
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_apart(self, question, options):
        """Ids of a prompt whose question holds the text of control tokens: head, question as mere text, tail."""
        head, _, rest = self.render_prompt(MARK + question + MARK, **options).partition(MARK)
        body, _, tail = rest.rpartition(MARK)
        with _blaming(self._file, " (while encoding a question)"):
            steps = self._tokenizer  # run one by one, since only the whole looks for control tokens
            text = steps.normalizer.normalize_str(body) if steps.normalizer else body
            words = steps.pre_tokenizer.pre_tokenize_str(text) if steps.pre_tokenizer else [(text, None)]
            ids = [token.id for word, _ in words for token in steps.model.tokenize(word)]
        if body != question or not self._added.isdisjoint(ids):
            raise UserError(f"{self._template_file}: the control tokens of this question cannot be kept apart from "
                            f"the template's, remove it from the data: {_one_line(question)}")
        head_ids, tail_ids = self._encode([head, tail])
        return head_ids + ids + tail_ids


def encode_problems(tokenizer, problems: list[Problem], max_prompt_tokens: int, note=print, **prompt_options):
    """(list of the problems kept, list of their prompts' ids). A prompt of over max_prompt_tokens is skipped; note()
    gets one line if any was. UserError if none is left. prompt_options are Tokenizer.render_prompt's."""
    prompts = tokenizer.encode_prompts([problem.question for problem in problems], **prompt_options)
    kept = [i for i, ids in enumerate(prompts) if len(ids) <= max_prompt_tokens]
    skipped = f"{len(prompts) - len(kept)} of {len(prompts)} problems skipped: prompt over {max_prompt_tokens} tokens"
    if not kept:
        raise UserError(f"{skipped} (the shortest has {min(map(len, prompts), default=0)}); raise the limit")
    if len(kept) < len(prompts):
        note(skipped)
    return [problems[i] for i in kept], [prompts[i] for i in kept]


def _parse_file(path):
    parsed = []
    for number, row in _rows(path):
        with _blaming(f"{path}, line {number}"):
            parsed.append((number, _problem(json.loads(row.decode("utf-8-sig")) if isinstance(row, bytes) else row)))
    return parsed


def _rows(path):
    """(line number, bytes) of a JSONL file without its blank lines, or (row number, dict) of a parquet file."""
    with _blaming(path, "; give a JSONL or parquet file of problems"):
        if str(path).endswith(".parquet"):
            from pyarrow import parquet  # here, not above: only the hub's own files need it

            return list(enumerate(parquet.read_table(path).to_pylist(), 1))
        with open(path, "rb") as file:  # bytes: text mode would not tell which line is not UTF-8
            return [(number, line) for number, line in enumerate(file, 1) if line.strip()]


def _problem(row):
    """The Problem of a row, None if its answer cannot be found (or its question is blank)."""
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, not {type(row).__name__}")
    name = "problem" if "problem" in row and "question" not in row else "question"
    question = _text(row, name)
    if name == "question":
        _, hashes, last = _text(row, "answer").strip().rpartition("####")
        answer = last if hashes and "\n" not in last else None
    else:
        answer = _text(row, "answer") if "answer" in row else extract_answer(_text(row, "solution"))
    level, subject = row.get("level"), row.get("subject", row.get("type"))
    labels = (None if label is None else _one_line(label) or None for label in (level, subject))
    return Problem(question, answer.strip(), *labels) if question.strip() and (answer or "").strip() else None


def _text(row, name):
    value = row.get(name)
    if not isinstance(value, str):
        kind = type(value).__name__ if name in row else "missing"
        raise ValueError(f"field {name} must be a string, is {kind}; fields found: {', '.join(row) or 'none'}")
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f"field {name} holds a NUL or half a surrogate pair, which cannot be encoded")
    return value


def _find_stop_ids(folder, eos_token, vocab):
    found = [vocab.get(eos_token, eos_token)]
    for path in (folder / "generation_config.json", folder / "config.json"):
        eos = _read_json(path).get("eos_token_id") if path.exists() else None
        found += eos if isinstance(eos, list) else [eos]
    found = [i for i in found if i is not None]
    if not found or not all(type(i) is int for i in found) or not set(found) <= set(vocab.values()):
        raise UserError(f"{folder}: eos_token in tokenizer_config.json and eos_token_id in generation_config.json and "
                        f"config.json must name tokens of tokenizer.json, not {_one_line(found or 'nothing')}")
    return tuple(sorted(set(found)))


def _compile_template(path, config):  # the environment is what transformers gives templates to rely on
    def raise_exception(message):
        raise jinja2.TemplateError(message)

    with _blaming(path):
        source = path.read_bytes().decode("utf-8-sig") if path.suffix == ".jinja" else config.get("chat_template")
        if isinstance(source, list):
            source = next((t["template"] for t in source if t["name"] == "default"), None)
        if not isinstance(source, str):
            raise ValueError("no chat template; it belongs there as chat_template, or in chat_template.jinja")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
        environment.globals |= dict(raise_exception=raise_exception, strftime_now=lambda f: datetime.now().strftime(f))
        return environment.from_string(source)


def _read_json(path):
    with _blaming(path, "; the checkpoint's own file is needed"):
        return {**json.loads(path.read_bytes().decode("utf-8-sig"))}  # fails unless it is an object


@contextmanager
def _blaming(place, advice=""):
    """Whatever goes wrong inside becomes a UserError that names the place."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Exception is not enough: a panic in the tokenizers library is no Exception
        raise UserError(f"{place}: {_one_line(error)}{advice}") from error


def _one_line(value):
    """An error, or text read from a file, as a short line that can be printed."""
    if isinstance(value, json.JSONDecodeError):  # its own text counts lines within the line
        value = f"{value.msg} (column {value.colno})"
    if isinstance(value, BaseException) and not isinstance(value, ValueError):
        value = getattr(value, "strerror", None) or f"{type(value).__name__}: {value}"
    return " ".join(str(value).split())[:200].encode("utf-8", "backslashreplace").decode()
