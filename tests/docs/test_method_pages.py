"""The pages on methods and certification say what the code does: names, defaults, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from tightrope import nets
from tightrope.certification.names import DEFAULT_STAGES
from tightrope.certification.stages import STAGES, StageSettings
from tightrope.cli.main import COMMANDS, cli
from tightrope.cli.train import parse_pairs
from tightrope.runs.journal import Record
from tightrope.runs.summary import Certification
from tightrope.training.objectives import METHODS, find_method, method_options, section
from tightrope.training.presets import load_preset, preset_names
from tightrope.training.settings import Settings, describe_settings
from tightrope.training.training import NETWORK_ARGUMENTS, _gather

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs" / "methods", ROOT / "docs" / "certification")
PAGES = {
    str(page.relative_to(ROOT / "docs")): page.read_text(encoding="utf-8")
    for folder in FOLDERS
    for page in sorted(folder.glob("*.md"))
}
SECTIONS = (
    "What it minimises",
    "Idea",
    "Options",
    "What to watch out for",
    "Where it is",
    "Presets",
    "Command",
    "Publication",
)
FAMILIES = sorted({name.partition("/")[0] for name in preset_names() if "/" in name})


def method_page(method: str) -> str:
    return PAGES[f"methods/{method}.md"]


def part(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of the tables in a text, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {i - 1 for i, row in enumerate(cells) if set("".join(row)) <= {"-"}}
    return [row for i, row in enumerate(cells) if i not in heads and i - 1 not in heads]


def prose(page: str) -> str:
    """A page without its fenced blocks, inline code and mathematics."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`]*`|\$[^$]*\$", "", text)


def inline(page: str) -> list[str]:
    """The inline code of a page."""
    without = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", without)


def commands(page: str) -> list[list[str]]:
    """The arguments of all `tightrope` commands of a page, in blocks and in the text."""
    blocks = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    lines = [line for line in [*lines, *inline(page)] if line.startswith("tightrope ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


ALL_COMMANDS = [(name, words) for name, page in PAGES.items() for words in commands(page)]


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of a command line, checked by the command itself but not run."""
    parent = click.Context(cli)
    command = cli.get_command(parent, words[0])
    assert command is not None, f"no command {words[0]!r}"
    return command.make_context(words[0], words[1:], parent=parent).params


# --- methods --------------------------------------------------------------------------------


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    names = {Path(name).stem for name in PAGES if name.startswith("methods/")}
    assert names == {*METHODS, "index", "training", "helpers"}


def test_the_index_links_every_method() -> None:
    index = PAGES["methods/index.md"]
    for method in METHODS:
        assert f"[`{method}`]({method}.md)" in index
        assert re.search(rf"^{method}$", index, re.MULTILINE), f"{method} is not in the toctree"


@pytest.mark.parametrize("method", METHODS)
def test_a_page_has_all_its_parts(method: str) -> None:
    page = method_page(method)
    assert page.startswith(f"# {method}\n")
    assert all(part(page, title).strip() for title in SECTIONS)
    assert "$$" in part(page, "What it minimises")


@pytest.mark.parametrize("method", METHODS)
def test_a_page_names_all_options_with_their_defaults(method: str) -> None:
    table = rows(part(method_page(method), "Options"))
    options = method_options(method)
    head = section(method)
    assert [row[0] for row in table] == [f"`{head}.{name}`" for name in options]
    for row, (name, field) in zip(table, options.items(), strict=True):
        text = row[1].removeprefix("`").removesuffix("`")
        settings = Settings.parse({"method": method, f"{head}.{name}": text})
        assert settings.options[name] == field.default, f"{head}.{name} = {text}"
        assert len(row) == 3 and row[2], f"{head}.{name} has no meaning"


def test_a_method_without_options_says_so() -> None:
    without = [method for method in METHODS if not method_options(method)]
    assert without
    for method in without:
        assert "takes no options" in part(method_page(method), "Options")


@pytest.mark.parametrize("method", METHODS)
def test_a_page_names_the_file_of_its_method(method: str) -> None:
    file = find_method(method).__module__.replace(".", "/")
    assert f"`src/{file}.py`" in part(method_page(method), "Where it is")


@pytest.mark.parametrize("method", METHODS)
def test_a_page_names_exactly_the_presets_of_its_method(method: str) -> None:
    named = re.findall(r"`([^`\s]+)`", part(method_page(method), "Presets"))
    named = [name for name in named if name in preset_names()]
    expected = [name for name in preset_names() if load_preset(name)["method"] == method]
    assert sorted(named) == expected
    assert named or "None." in part(method_page(method), "Presets")


@pytest.mark.parametrize("method", METHODS)
def test_the_command_of_a_page_trains_by_its_method(method: str) -> None:
    lines = commands(part(method_page(method), "Command"))
    trains = [words for words in lines if words[0] == "train"]
    assert trains
    assert {settings_of(words).method for words in trains} == {method}


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name: str) -> None:
    files = [
        c for c in inline(PAGES[name]) if re.match(r"(src|tests|docs|examples|benchmarks)/", c)
    ]
    missing = [file for file in files if not (ROOT / file).exists()]
    assert not missing


@pytest.mark.parametrize("name", PAGES)
def test_presets_that_a_page_names_exist(name: str) -> None:
    heads = "|".join(map(re.escape, FAMILIES))
    named = [code for code in inline(PAGES[name]) if re.fullmatch(rf"({heads})/[\w.-]+", code)]
    unknown = [preset for preset in named if preset not in preset_names()]
    assert not unknown


@pytest.mark.parametrize("name", PAGES)
def test_links_between_pages_lead_somewhere(name: str) -> None:
    here = (ROOT / "docs" / name).parent
    targets = re.findall(r"\]\(([^)#]+\.md)\)", PAGES[name])
    missing = [target for target in targets if not (here / target).exists()]
    assert not missing


def test_the_families_of_presets_are_described() -> None:
    described = [row[0] for row in rows(part(PAGES["methods/index.md"], "Presets"))]
    assert sorted(described) == [f"`{family}/`" for family in FAMILIES]


def test_option_names_in_the_text_are_options() -> None:
    known = {f"{section(m)}.{option}" for m in METHODS for option in method_options(m)}
    heads = "|".join(re.escape(section(m)) for m in METHODS)
    for name, page in PAGES.items():
        for code in inline(page):
            if found := re.fullmatch(rf"(?:--set )?((?:{heads})\.\w+)(?:=\S+)?", code):
                assert found[1] in known, f"{name}: {code}"


# --- settings and results -------------------------------------------------------------------


def test_the_settings_that_are_listed_have_their_defaults() -> None:
    table = rows(part(PAGES["methods/training.md"], "Settings"))
    defaults = {name: default for name, default, _ in describe_settings()}
    assert len(table) > 15
    for name, text, _ in table:
        key = name.strip("`")
        value = getattr(Settings.parse({key: text.strip("`")}), key)
        assert value == defaults[key], f"{key} = {text}"


def test_the_fields_of_a_certification_are_explained() -> None:
    tables = part(PAGES["certification/index.md"], "Reading certification.json")
    named = [code for row in rows(tables) for code in re.findall(r"`(\w+)`", row[0])]
    fields = {*Certification.__dataclass_fields__, *Record.__dataclass_fields__}
    assert set(named) == fields


def test_the_stages_are_in_their_order() -> None:
    table = rows(part(PAGES["certification/index.md"], "The cascade"))
    assert [row[0] for row in table] == [f"`{name}`" for name in ("natural", *STAGES)]
    default = [row[0].strip("`") for row in table if "only" not in row[1]]
    assert default == ["natural", *DEFAULT_STAGES]


# --- commands -------------------------------------------------------------------------------


def settings_of(words: list[str]) -> Settings:
    """The settings that a training command asks for, resolved as the command does it."""
    values = parsed(words)
    pairs, preset = parse_pairs(values["pairs"]), values["preset"]
    others = ("pairs", "preset", "out", "resume", "force", "wait", "as_json")
    given = {k: v for k, v in values.items() if v is not None and k not in others}
    settings = Settings.parse(_gather(preset, given.pop("method", None), {**given, **pairs})[0])
    sizes = {k: getattr(settings, k) for k in NETWORK_ARGUMENTS}
    network = nets.find(settings.net).resolve({k: v for k, v in sizes.items() if v is not None})
    return settings.resolve(normalize=False, network=network)


def test_there_are_commands() -> None:
    used = {words[0] for _, words in ALL_COMMANDS}
    assert {"train", "certify", "estimate", "verify", "methods", "presets"} <= used
    assert used <= set(COMMANDS)


@pytest.mark.parametrize(("name", "words"), ALL_COMMANDS)
def test_commands_on_the_pages_are_accepted(name: str, words: list[str]) -> None:
    if len(words) == 1 or words[1:] in (["--help"], ["--resume"]):
        assert words[0] in COMMANDS  # a mention, not a command to type
    elif words[0] == "train":
        assert settings_of(words).epochs > 0
    else:
        values = parsed(words)
        if words[0] == "certify":
            assert set((values["stages"] or "ibp").split(",")) <= set(STAGES)
            assert StageSettings(values["steps"], values["restarts"], values["timeout"])


# --- prose ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_no_measured_numbers_in_the_text(name: str) -> None:
    numbers = re.findall(
        r"\d+(?:\.\d+)?\s*(?:%|seconds?\b|minutes?\b|hours?\b|points?\b)", prose(PAGES[name])
    )
    assert not numbers
