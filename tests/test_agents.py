"""AGENTS.md names only what exists; CITATION.cff is valid.    pytest tests/test_agents.py"""

import datetime
import re
import shlex
import tomllib

import yaml
from conftest import REPO
from test_layers import is_left_out

PAGE = (REPO / "AGENTS.md").read_text()
COMMANDS = re.search(r"```console\n(.*?)```", PAGE, re.DOTALL)[1]
PREFIXES = "runtime|config|data|model|checkpoint|tracking|scripts|tests|recipes|ds_configs|docs"


def anchors(text):
    """Those that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def wrong_in(page, commands):
    """What a page or its commands name that does not exist."""
    wrong = []
    for path, _, anchor in re.findall(r"\]\(([^)#]+)(#([^)]+))?\)", page):
        file = REPO / path
        if is_left_out(path):
            continue
        if not (file.is_dir() or file.is_file()) or (
            anchor and anchor not in anchors(file.read_text())
        ):
            wrong.append(f"{path}#{anchor}")
    named = re.findall(rf"`((?:(?:{PREFIXES})/[\w./]+)|\w+\.(?:py|md))`", page)
    wrong += [path for path in named if not (REPO / path).exists() and path != "__init__.py"]
    for line in commands.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        files = [word for word in words if re.fullmatch(r"(\./)?[\w/-]+\.(py|sh|yaml)", word)]
        files = [file for file in files if file != "recipes/mine.yaml"]  # as in the README
        wrong += [file for file in files if not (REPO / file).is_file()]
        scripts = [file for file in files if file.endswith(".py") and "/" in file]
        source = "".join((REPO / f).read_text() for f in scripts if (REPO / f).is_file())
        own = [word for word in words if word.startswith("--") and "." not in word]
        known = ("--num_gpus", "--config", "--output_dir")  # of the launcher and of every config
        wrong += [flag for flag in own if flag not in known and f'"{flag}"' not in source]
    return wrong


def test_the_page_names_what_exists():
    assert wrong_in(PAGE, COMMANDS) == []
    assert len(PAGE.splitlines()) <= 80, "one page"
    assert len(COMMANDS.splitlines()) >= 8
    for function in ("run_on_all_ranks", "UserError"):
        assert f"`{function}`" in PAGE and any(
            re.search(rf"^(def|class) {function}\b", file.read_text(), re.MULTILINE)
            for file in (REPO / "runtime").glob("*.py")
        )
    # and what does not is noticed
    for old, new in (
        ("#layers", "#stories"), ("data/README.md", "data/READYOU.md"), ("--show", "--shew"),
        ("runtime/files.py", "runtime/flies.py"), ("scripts/setup.sh", "scripts/set.sh"),
    ):  # fmt: skip
        assert wrong_in(PAGE.replace(old, new), COMMANDS.replace(old, new)), old


def test_the_example_of_one_test_selects_one():
    [selected] = re.findall(r"pytest .* (tests/\w+\.py) -k (\w+)", COMMANDS)
    assert re.search(rf"^def test_\w*{selected[1]}", (REPO / selected[0]).read_text(), re.MULTILINE)


def test_the_citation_is_one():
    """The fields that CFF 1.2.0 requires, of the types that it requires, and none that it lacks."""
    cited = yaml.safe_load((REPO / "CITATION.cff").read_text())
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited.keys() <= {
        "cff-version", "message", "title", "authors", "type", "abstract", "version", "license",
        "keywords", "repository-code", "url", "date-released", "doi",
    }  # fmt: skip
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["version"] == project["version"] and cited["license"] == project["license"]
    for author in cited["authors"]:
        assert author.keys() <= {"name"} or {"given-names", "family-names"} <= author.keys()
    assert isinstance(cited.get("date-released", datetime.date.today()), datetime.date)
