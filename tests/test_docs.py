"""What the documents and help texts name is there: links, files, Python names, commands with their options, targets.

What was removed or renamed may be named in CHANGELOG.md, and docs/log.md may name what it tells about.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from twell.train.recipes import Recipe
from twell.workbench import cli

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "src", "tests", "tools", "examples", "results")
FILES = {
    path.relative_to(ROOT).as_posix()
    for top in (ROOT, *(ROOT / folder for folder in FOLDERS))
    for path in (top.glob("*") if top == ROOT else top.rglob("*"))
    if "__pycache__" not in path.parts
}
PAGES = sorted(name for name in FILES if name.endswith(".md"))
PRESENT = [page for page in PAGES if page != "docs/log.md"]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
GONE = re.compile(r"Removed|Renamed|no longer|replaces")  # items of CHANGELOG.md
NOT_OURS = {  # options of torchrun, accelerate, vLLM, SGLang, transformers and pip
    *("--nproc-per-node", "--multi_gpu", "--num_processes", "--shutdown-timeout", "--lora-target-modules"),
    *("--model-impl", "--continuous-batching", "--target", "--no-deps"),
}
NOT_OUR_FILES = {"model_manager.py"}
RECIPES = ("twell train", "twell convert", "twell sweep")  # take fields of a recipe as key=value


def stated(page: str) -> str:
    """The text of a page, less what says that something is gone."""
    text = TEXTS[page]
    if page == "CHANGELOG.md":
        text = "\n- ".join(item for item in text.split("\n- ") if not GONE.search(item))
    return text


def code(text: str) -> Iterator[str]:
    """Lines of fenced blocks, and what stands in backticks."""
    prose = []
    for i, part in enumerate(re.split(r"^```.*\n", text, flags=re.M)):
        if i % 2:
            yield from part.replace("\\\n", " ").splitlines()
        else:
            prose.append(part)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", "".join(prose)))


def parametrize(pages: list[str]) -> Any:
    return pytest.mark.parametrize("page", pages)


# -- links and files ----------------------------------------------------------------------------------------


@cache
def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: str, text: str) -> list[str]:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        there = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        inside = there.relative_to(ROOT).as_posix() if there.is_relative_to(ROOT) else None
        if not there.exists() or (anchor and anchor not in anchors(str(inside))):
            dead.append(target)
    return dead


@parametrize(PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert dead_links(page, TEXTS[page]) == []


def missing_paths(text: str) -> list[str]:
    """Paths from the root."""
    paths = re.findall(rf"(?<![\w./~-])((?:{'|'.join(FOLDERS)})/[\w./*-]*\w)", text)
    return [path for path in paths if not any(ROOT.glob(path))]


def missing_files(text: str) -> list[str]:
    """Paths from the root, and files by the last parts of their paths, as in ``shared/gate.py``."""
    missing = missing_paths(text)
    for span in code(text):
        if re.fullmatch(r"[\w/]*\w\.(py|c|html)|[a-z]+/[\w/]*\w\.(txt|md)", span) and span not in NOT_OUR_FILES:
            missing += [span] * (not any(f"/{name}".endswith(f"/{span}") for name in FILES))
    return missing


@parametrize(PRESENT)
def test_files_are_there(page: str) -> None:
    assert missing_files(stated(page)) == []


@pytest.mark.parametrize("folder", ["src", "tools", "examples"])
def test_sources_name_files_that_are_there(folder: str) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    assert {path.name: missing for path, text in sources.items() if (missing := missing_paths(text))} == {}


def test_the_tree_of_docs_readme_is_whole() -> None:
    tree = TEXTS["docs/README.md"].split("```")[-2]
    parts = {part.strip(",/") for line in re.findall(r"^  (\S.*?)   ", tree, re.M) for part in line.split()}
    source = {
        path.name.removesuffix(".py") for path in (ROOT / "src" / "twell").glob("[a-z]*") if path.suffix != ".typed"
    }
    assert parts == source
    assert {line.split("/")[0] for line in re.findall(r"^\w.*", tree, re.M)} == set(FOLDERS)


# -- Python names -------------------------------------------------------------------------------------------


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute or field of one."""
    first, *rest = name.split(".")
    at: Any = importlib.import_module(first)
    for part in rest:
        if not hasattr(at, part) and hasattr(at, "__path__") and importlib.util.find_spec(f"{at.__name__}.{part}"):
            importlib.import_module(f"{at.__name__}.{part}")
        if not hasattr(at, part):
            return dataclasses.is_dataclass(at) and part in {field.name for field in dataclasses.fields(at)}
        at = getattr(at, part)
    return True


def unknown_names(text: str) -> list[str]:
    names = re.findall(r"(?<![\w./-])twell(?:\.[A-Za-z_]\w*)+", text)
    short = re.findall(r"`((?:Plan|TwELL|Hybrid|reference)(?:\.(?!py)[a-z_]\w*)+)", text)
    return sorted({name for name in [*names, *(f"twell.{name}" for name in short)] if not resolves(name)})


def test_kernels_and_variables_are_there() -> None:
    source = "".join(path.read_text() for suffix in ("py", "c") for path in (ROOT / "src").rglob(f"*.{suffix}"))
    kernels = set(re.findall(r"`(\w+_kernel)`", TEXTS["docs/kernels.md"]))
    variables = {name for page in PRESENT for name in re.findall(r"TWELL_[A-Z_]+", TEXTS[page])}
    assert len(kernels) > 20 and {name for name in kernels if f"def {name}(" not in source} == set()
    assert variables and {name for name in variables if f'"{name}"' not in source} == set()


def unknown_in_examples(text: str) -> list[str]:
    """Names that Python examples import from ``twell``, and attributes of modules imported so. Doctests run anyway."""
    unknown = []
    for block in re.findall(r"^```python\n(?!>>>)(.*?)^```", text, re.M | re.S):
        parsed, modules = ast.parse(block), {}
        for node in ast.walk(parsed):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "twell":
                names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                modules |= names
                unknown += [name for name in names.values() if not resolves(name)]
        for node in ast.walk(parsed):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                name = f"{modules[node.value.id]}.{node.attr}"
                unknown += [name] * (not resolves(name))
    return unknown


@parametrize(PRESENT)
def test_python_names_are_there(page: str) -> None:
    assert unknown_names(stated(page)) + unknown_in_examples(TEXTS[page]) == []


# -- commands -----------------------------------------------------------------------------------------------


def tree(command: Any, name: str = "twell") -> dict[str, Any]:
    below = {k: v for sub, c in getattr(command, "commands", {}).items() for k, v in tree(c, f"{name} {sub}").items()}
    return {name: command, **below}


COMMANDS = tree(typer.main.get_command(cli.app))
OPTIONS = {
    name: {option for p in command.params for option in [*p.opts, *p.secondary_opts]} | {"--help"}
    for name, command in COMMANDS.items()
}


def wrong_in_call(call: str) -> list[str]:
    """What a call of ``twell`` names that there is not: a command, an option, a field of a recipe.

    >>> [wrong_in_call(f"twell {rest}") for rest in ("bench ffn --graph --grph -m 1", "train stepz=3", "x --json")]
    [['--grph'], ['stepz'], ['twell x']]
    """
    words = re.split(r" [#|<>&;] |; |$", call, maxsplit=1)[0].replace("[", " ").replace("]", " ").split()
    depth = 1
    while " ".join(words[: depth + 1]) in COMMANDS and depth < len(words):
        depth += 1
    name, rest = " ".join(words[:depth]), words[depth:]
    if hasattr(COMMANDS[name], "commands") and rest and re.fullmatch(r"[a-z]+", rest[0]):
        return [f"{name} {rest[0]}"]
    wrong = [word for word in rest if re.fullmatch(r"--?[a-z][\w-]*", word) and word not in OPTIONS[name]]
    if name in RECIPES:
        fields = {field.name for field in dataclasses.fields(Recipe)}
        wrong += [key for key in re.findall(r"(?<!\S)([a-z]\w*)=", " ".join(rest)) if key not in fields]
    return wrong


def wrong_commands(text: str) -> list[str]:
    known = {option for options in OPTIONS.values() for option in options} | NOT_OURS
    wrong = []
    for span in code(text):
        for call in re.findall(r"(?:^|[$;&] |-m )(twell .*?)(?=; twell|$)", span.strip()):
            wrong += wrong_in_call(call)
        if re.match(r"--[a-z]", span):
            wrong += [word for word in re.findall(r"(?<!\S)--[a-z][\w-]*", span) if word not in known]
    return wrong


@parametrize([page for page in PRESENT if not page.startswith("tools/")])
def test_commands_and_options_are_there(page: str) -> None:
    assert wrong_commands(stated(page)) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_commands_and_options_that_are_there(name: str) -> None:
    command = COMMANDS[name]
    helps = [command.help or "", *(getattr(p, "help", None) or "" for p in command.params)]
    for text in helps:
        for call in re.findall(r"\[bold\](twell .+?)\[/bold\]", text):
            assert wrong_in_call(call) == [], call
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"\[bold\].*?\[/bold\]", "", text)):
            assert any(option in options for options in OPTIONS.values()), option


# -- make, extras, the tree ---------------------------------------------------------------------------------


@parametrize(PAGES)
def test_targets_and_extras_are_there(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    spans = list(code(TEXTS[page]))
    made = {name for span in spans for name in re.findall(r"^make ([a-z-]+)", span.strip())}
    extras = {e for span in spans for named in re.findall(r"twell\[([\w,]+)\]", span) for e in named.split(",")}
    assert (made - targets, extras - set(project["optional-dependencies"])) == (set(), set())


def test_every_page_of_docs_is_in_its_table() -> None:
    listed = set(re.findall(r"^\| \[([\w.]+)\]", TEXTS["docs/README.md"], re.M))
    assert listed == {Path(page).name for page in PAGES if page.startswith("docs/")} - {"README.md"}


def test_mistakes_are_found() -> None:
    text = "`src/twell/gone.py` `gone.py` `twell.gone` `Plan.gone` `twell train --gone` [x](gone.md) [y](#gone)"
    assert missing_files(text) == ["src/twell/gone.py", "src/twell/gone.py", "gone.py"]
    assert unknown_names(text) == ["twell.Plan.gone", "twell.gone"]
    assert wrong_commands(text) == ["--gone"]
    example = "```python\nfrom twell import Gone\nfrom twell.workbench import generate\n\ngenerate.gone()\n```\n"
    assert unknown_in_examples(example) == ["twell.Gone", "twell.workbench.generate.gone"]
    assert dead_links("README.md", text) == ["gone.md", "#gone"]
