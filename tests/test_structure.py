"""The shape of the project: who may import whom, sizes, docstrings, and what may appear nowhere.

Together: the files can be read one by one in the order of the README, every file is short, nothing in the repository
runs code that came out of a file or a model, and nothing depends on the machine it was written on. All of it is read
from the source text (ast): no file is imported.
"""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(ROOT.glob("*.py"))
FLOW = {  # design.md, section 1: who may import which project file
    "console": set(),
    "model": {"console"},
    "grader": set(),
    "meaning": {"grader"},  # the grader's child process: a program of its own, which nobody imports
    "fsdp_utils": {"console"},
    "data": {"console", "grader"},
    "rollout": {"console", "model"},
    "rloo": {"model", "rollout"},  # Rollout, and the attention that it hands to the network
    "checkpoint": {"console", "fsdp_utils"},
    "estimates": {"console", "grader"},
    "eval": {"console", "checkpoint", "data", "rollout", "grader", "model", "fsdp_utils", "estimates"},
    "publish": {"console", "checkpoint", "data", "model"},
    "train": {"console", "data", "rollout", "grader", "model", "fsdp_utils", "rloo", "eval", "publish", "checkpoint"},
}
HOMES = {"torch.distributed": {"fsdp_utils"}, "tokenizers": {"data"}, "wandb": {"train"}, "jinja2": {"data"}, "sympy": {"meaning"},
         "huggingface_hub": {"data"}, "pyarrow": {"data"}}  # fmt: skip
SKIPPED = {"__pycache__", ".git", ".venv", "venv", "runs", "wandb"}  # what .gitignore names, and caches


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path):
    """Every module name imported anywhere in a file, inside functions too; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno} is a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def within(names, package):
    return {name for name in names if name == package or name.startswith(package + ".")}


def project_files():
    """All files of the repository, without asking git: a source archive has none."""
    for folder, children, files in os.walk(ROOT):
        children[:] = [c for c in children if c not in SKIPPED and (not c.startswith(".") or c == ".ci")]
        yield from (Path(folder, name) for name in files if not name.endswith((".pyc", ".tmp")))


def test_the_files_are_those_of_the_design():
    assert {path.stem for path in SOURCES} == FLOW.keys()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_follow_the_one_direction_of_flow(path):
    own = {name.split(".")[0] for name in imported(path)} & FLOW.keys()
    assert own <= FLOW[path.stem], f"{path.name} imports {own - FLOW[path.stem]}"


@pytest.mark.parametrize("package", HOMES)
def test_a_dependency_has_one_home(package):
    users = {path.stem for path in SOURCES if within(imported(path), package)}
    assert users <= HOMES[package]
    assert users or package in ("wandb",), f"nobody imports {package}: the rule is stale"


@pytest.mark.parametrize("name", ["grader", "meaning", "data", "console", "estimates"])
def test_text_files_know_no_tensors(name):
    assert not within(imported(ROOT / f"{name}.py"), "torch")


def test_nobody_imports_train_but_tests():
    outside = [path for path in project_files() if path.suffix == ".py" and path.parent.name != "tests"]
    assert not [path for path in outside if "train" in imported(path)]


def test_no_code_comes_out_of_files_or_text():
    """No pickle in any form, no eval, no exec, no sympy parser (which is eval): faults.md L5 and the file format rule."""
    forbidden_modules = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
    forbidden_names = {"eval", "exec", "__import__"}
    forbidden_methods = {"parse_expr", "sympify", "parse_latex"}
    found = []
    for path in (path for path in project_files() if path.suffix == ".py"):
        found += [f"{path.name} imports {name}" for m in forbidden_modules for name in within(imported(path), m)]
        for node in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            called = node.func
            if isinstance(called, ast.Name) and called.id in forbidden_names | forbidden_methods:
                found.append(f"{path.name}:{node.lineno} calls {called.id}")
            if isinstance(called, ast.Attribute) and (
                called.attr in forbidden_methods
                or (isinstance(called.value, ast.Name) and (called.value.id, called.attr) in
                    {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")})
            ):  # fmt: skip
                found.append(f"{path.name}:{node.lineno} calls {ast.unparse(called)}")
    assert not found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_files_and_functions_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= (500 if path.stem == "grader" else 400), f"{path.name} has {lines} lines"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {node.name: node.end_lineno - node.lineno + 1 for node in ast.walk(tree(path)) if isinstance(node, kinds)}
    assert not {
        name: n for name, n in long.items() if n > 40 and (path.stem, name) != ("train", "main")
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_public_names_say_what_they_are(path):
    module = tree(path)
    assert ast.get_docstring(module), f"{path.name} does not say what it owns"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in module.body if isinstance(node, kinds) and not node.name.startswith("_")]
    assert public
    assert not [node.name for node in public if not ast.get_docstring(node)]


def test_no_file_names_this_machine():
    """An absolute path of one machine in a shipped file works on that machine only."""
    machine = re.compile(r"(?<![\w.}])/(?:wor" + r"k|far" + r"m|roo" + r"t|hom" + r"e)/|\.librar" + r"y\b|/tmp/ven" + "v")
    found, read = [], 0
    for path in project_files():
        if path.suffix in (".safetensors", ".png") or path.stat().st_size > 2_000_000:
            continue
        read += 1
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := machine.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number} {match.group(0)}")
    assert read > 20 and not found, (read, found)


def test_only_the_standard_library_and_what_requirements_name():
    """requirements.txt is what a user installs; torch brings jinja2, and what is optional is imported in a try or late."""
    named = {re.split(r"[=<>~!\[ ]", line)[0].lower() for line in (ROOT / "requirements.txt").read_text().split("\n")}
    known = {*named, "jinja2", *FLOW, *sys.stdlib_module_names}
    optional = {"flash_attn", "wandb", "sympy"}
    roots = {name.split(".")[0] for path in SOURCES for name in imported(path)}
    assert roots - known <= optional, roots - known


def test_the_readme_counts_lines_as_they_are():
    rows = re.findall(r"^\| `([\w./]+)` \|.*\| (\d+) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert {name for name, _ in rows} >= {path.name for path in SOURCES}
    for name, lines in rows:
        counted = (ROOT / name).read_text(encoding="utf-8").count("\n")
        assert counted == int(lines), f"README.md says {lines} lines for {name}, it has {counted}"
