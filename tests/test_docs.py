"""The documentation holds: every block of code runs, its output is what stands there, and lists are complete.

A block ```` ```python ```` runs by itself, in an empty folder. Words after ``python`` are what it needs: ``gpu``, or a module. A block
```` ```text output ```` right behind it is what it prints; ``...`` stands for anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import te_attn_ops
from te_attn_ops import __main__ as command_line, environment, modules, testing
from te_attn_ops.backends import BACKEND_NAMES, get_backend
from te_attn_ops.modules.unsupported import _UNSUPPORTED

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")


class Block(NamedTuple):
    """A fenced block: the words behind the fence, the text, and the output that stands behind it."""

    page: Path
    line: int
    info: tuple[str, ...]
    text: str
    output: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = re.match(r"(`{3,}|~{3,})(.*)$", lines[at])
        at += 1
        if fence is None:
            continue
        end = next(n for n in range(at, len(lines)) if re.match(rf"{fence[1]}\s*$", lines[n]))
        info, text = tuple(fence[2].split()), "\n".join(lines[at:end]) + "\n"
        if info == ("text", "output"):
            found[-1] = found[-1]._replace(output=text)
        else:
            found.append(Block(page, at, info, text, None))
        at = end + 1
    return found


BLOCKS = [block for page in PAGES if page.is_file() for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.info[:1] == ("python",)]
SHELL = [block for block in BLOCKS if block.info[:1] in (("sh",), ("bash",), ("console",), ())]


def _cases() -> list[Any]:
    return [pytest.param(block, marks=[pytest.mark.gpu] if "gpu" in block.info else [], id=block.name) for block in PYTHON]


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("NVTE_", "TE_ATTN_OPS_"))}


@pytest.fixture
def clean_process(fresh_caches: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after a start in an empty folder, with no switch set."""
    for name in _variables():
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    assert not _variables(), "a block must leave the environment as it was"


@pytest.mark.parametrize("block", _cases())
@pytest.mark.usefixtures("clean_process")
def test_every_python_block_runs(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in block.info[1:]:
        if needed != "gpu":
            pytest.importorskip(needed)
    code = compile("\n" * block.line + block.text, str(block.page), "exec")
    module = types.ModuleType("docs_block")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks globals of inlined functions up there
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        exec(code, module.__dict__)
    # On a GPU other kernels are there to be listed, and their accuracy is another.
    if block.output is not None and not torch.cuda.is_available():
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(block.output, printed.getvalue(), flags), printed.getvalue()


def test_the_pages_have_blocks() -> None:
    """The parser finds them: else the test above would pass on nothing."""
    pages = {block.page.name for block in PYTHON}
    assert {"quickstart.md", "masks.md", "compile.md", "adding_a_backend.md", "README.md"} <= pages
    assert len(PYTHON) >= 20
    assert sum(block.output is not None for block in PYTHON) >= 3


def _commands() -> list[Any]:
    found = []
    for block in SHELL:
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:3] == ["python", "-m", "te_attn_ops"] and words[3:4] != ["bench"]:
                found.append(pytest.param(words[3:], id=f"{block.name}: {' '.join(words[3:])}"))
    return found


@pytest.mark.parametrize("arguments", _commands())
@pytest.mark.usefixtures("clean_process")
def test_every_command_of_ours_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(arguments) == 0
    assert capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- links and pictures
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_resolve(page: Path) -> None:
    if not page.is_file():
        pytest.fail(f"{page.name} is missing")
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor and linked.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}; {linked.name} has {sorted(slugs)}"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text()
    listed = {line for block in re.findall(r"```\{toctree\}(.*?)```", index, flags=re.S) for line in block.split() if line.isidentifier()}
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert pages <= listed


def _load(name: str) -> Any:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_pictures_show_the_documented_rule(tmp_path: Path) -> None:
    """Held against the second statement of the rule in te_attn_ops.testing."""
    pytest.importorskip("matplotlib")
    drawing = _load("draw_masks")
    for mask in (*drawing.TYPES, *drawing.WINDOWS, *drawing.BATCH_POLICIES):
        stated = testing.Mask(mask.attn_mask_type, mask.window_size, mask.bottom_right_diagonal)
        for len_q, len_kv in drawing.LENGTHS:
            expected = testing.visible(stated, len_q, len_kv).numpy()
            np.testing.assert_array_equal(drawing.visibility(mask.band, len_q, len_kv).astype(bool), expected, err_msg=mask.title)
    picture, starts = drawing.batch_picture()
    inside = picture[picture != 255]
    assert inside.size == sum(length for length, _, _ in drawing.BATCH) ** 2
    for n, (length, _, policy) in enumerate(drawing.BATCH):
        rows = slice(starts[n], starts[n] + length)
        assert set(np.unique(picture[rows])) <= {0, 1 + policy, 255}  # a sequence sees itself alone, under its own policy
    for path in drawing.draw_all(tmp_path):
        assert (drawing.IMAGES / path.name).is_file(), f"run python docs/draw_masks.py: {path.name} is missing"


# -------------------------------------------------------------------------------------------------------------- complete lists
def test_every_public_name_is_in_the_api() -> None:
    api = (DOCS / "api.md").read_text()
    names = [f"te_attn_ops.{name}" for name in te_attn_ops.__all__] + [f"te_attn_ops.modules.{name}" for name in modules.__all__]
    assert [name for name in names if not re.search(rf":: {re.escape(name)}(\(\))?$", api, flags=re.M)] == []


def test_members_that_the_docs_speak_of_are_in_the_api() -> None:
    api = (DOCS / "api.md").read_text()
    members = {
        name: {member.strip() for member in listed.split(",")}
        for name, listed in re.findall(r":: te_attn_ops\.([\w.]+)(?:\(\))?\n   :members: (.+)$", api, flags=re.M)
    }
    for name, listed in members.items():
        subject: Any = te_attn_ops
        for part in name.split("."):
            subject = getattr(subject, part)
        known = {*dir(subject), *getattr(subject, "__annotations__", ())}
        assert listed <= known, f"api.md lists members that {name} lacks: {listed - known}"
    own = {name for name in vars(te_attn_ops.PreparedPolicies) if not name.startswith("_")} - {"kind"}
    fields = {field.name for field in dataclasses.fields(te_attn_ops.PreparedPolicies)}
    assert own - fields <= members["PreparedPolicies"]
    assert [name for name in ("policy_index", "policies", "plans") if f"`{name}`" not in api] == []
    for name in modules.__all__:
        made = getattr(modules, name)
        if isinstance(made, type) and "reset_parameters" in vars(made) and name != "LayerNormMLP":
            assert "reset_parameters" in members[f"modules.{name}"], name


def test_every_name_in_the_docs_resolves_after_a_plain_import() -> None:
    """``import te_attn_ops`` and nothing else, as a reader tries it."""
    text = "\n".join(page.read_text() for page in PAGES)
    names = sorted(set(re.findall(r"(?<!ops\.)\bte_attn_ops(?:\.[A-Za-z_]\w*)+", text)))
    assert {"te_attn_ops.modules.save_attention", "te_attn_ops.measure.forget_measurements"} <= set(names)
    code = (
        "import functools, sys, te_attn_ops\n"
        "def resolves(name):\n"
        "    try:\n"
        "        functools.reduce(getattr, name.split('.')[1:], te_attn_ops)\n"
        "    except AttributeError:\n"
        "        return False\n"
        "    return True\n"
        "print(*[name for name in sys.argv[1:] if not resolves(name)], sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, env=_importable(), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import te_attn_ops\n"
        "loaded = set(sys.modules) - before\n"
        "assert not {'te_attn_ops.modules', 'te_attn_ops.testing'} & loaded, loaded\n"
        "assert not hasattr(te_attn_ops, 'no_such_thing')\n"
        "import te_attn_ops.modules\n"
        "assert te_attn_ops.modules is sys.modules['te_attn_ops.modules']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_importable(), check=False)
    assert done.returncode == 0, done.stderr


def _importable() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_every_environment_variable_is_documented() -> None:
    """Whatever the package's sources name."""
    pattern = re.compile(r"\b(?:NVTE|TE_ATTN_OPS|XDG|FLASH_ATTENTION|FLEX_ATTENTION)_[A-Z0-9_]*[A-Z0-9]\b")
    sources = "\n".join(path.read_text() for path in (ROOT / "te_attn_ops").rglob("*.py"))
    documented = (DOCS / "environment.md").read_text()
    assert [name for name in sorted(set(pattern.findall(sources))) if f"`{name}`" not in documented] == []


def test_switches_are_those_of_the_backends() -> None:
    rows = re.findall(r"^\| `(NVTE_\w+)` \| ([\w, ]+) \|$", (DOCS / "environment.md").read_text(), flags=re.M)
    documented = {name: set(backends.split(", ")) for name, backends in rows}
    found = {switch: {name for name in BACKEND_NAMES if switch in get_backend(name).switches} for switch in environment.SWITCHES}
    assert documented == found


def test_every_backend_is_documented() -> None:
    page = (DOCS / "backends.md").read_text().split("## What was seen")[0]
    assert [name for name in BACKEND_NAMES if f"| `{name}` |" not in page] == []


# -------------------------------------------------------------------------------------------------------------------- tables
@pytest.fixture(scope="module")
def tables() -> Any:
    return _load("make_tables")


def test_the_pages_show_the_results_and_the_limits(tables: Any) -> None:
    """Also to those who read them in the repository. On a GPU machine benchmarks/prove.sh writes two results beside these tests."""
    being_written = ("demo", "gpu_tests") if torch.cuda.is_available() else ()
    for name, (page, make) in tables.BLOCKS.items():
        block, text = make(), page.read_text()
        assert block.strip(), name
        if name not in being_written:
            assert tables.with_block(text, name, block) == text, f"{page.name}, {name}: run python docs/make_tables.py"


def test_every_block_of_a_page_is_made(tables: Any) -> None:
    found = {(page, name) for page in PAGES for name in re.findall(r"^<!-- (\w+): begin", page.read_text(), flags=re.M)}
    assert found == {(page, name) for name, (page, _) in tables.BLOCKS.items()}


def test_nothing_is_hidden_from_a_reader_of_the_repository() -> None:
    """It shows an include directive as a line of code. The changelog's page has nothing else, and names its file."""
    hiding = [block.name for block in BLOCKS if block.info[:1] == ("{include}",) and block.page.name != "changelog.md"]
    assert hiding == []


def test_limits_do_not_depend_on_what_is_installed(tables: Any) -> None:
    """And what was patched in to find them is gone afterwards."""
    before = [get_backend(name).version() for name in BACKEND_NAMES]
    widths = tables.widths_page()
    assert "not installed" not in tables.reasons_page() and "found none" not in tables.reasons_page()
    assert re.search(r"^\| 192/128 \| trains \| - \| - \| trains \| trains \| trains \| trains \|$", widths, flags=re.M)
    assert [get_backend(name).version() for name in BACKEND_NAMES] == before


def test_refused_arguments_are_listed(tables: Any) -> None:
    page = tables.refused_page()
    assert [name for name in _UNSUPPORTED if f"| `{name}` |" not in page] == []


def _mixed_row(dispatch: str, backward: bool, ms: float, **fields: Any) -> dict[str, Any]:
    base = {"work": "w", "tokens": 4096, "sequences": 8, "policies": 2, "backend": "flash4", "selection": None, "graphed": True}
    return {**base, "dispatch": dispatch, "backward": backward, "ms": ms, **fields}


def test_mixed_tables_compare_like_with_like(tables: Any) -> None:
    rows = [_mixed_row("ideal", True, 2.0), _mixed_row("padded", True, 2.1), _mixed_row("grouped", True, 4.2)]
    rows += [
        _mixed_row("single_launch", True, 1.5, backend="cudnn_flex"),
        _mixed_row("padded", True, 0.1, graphed=False),  # another kind of figure
        _mixed_row("padded", True, 0.2, new_geometry=True, layers=1, plan_ms=0.1),
        _mixed_row("padded", False, None, error="no"),
        _mixed_row("auto", True, 1.8, selection="static"),
    ]
    mixed = tables.Mixed({"rows": rows})
    assert "| w | 4,096 | 8 | 2 | forward + backward | 2.000 | 2.100 | 1.500 | 4.200 | 0.75x |" in tables.mixed_times(mixed)
    assert "| w | flash4 | 2.100 | 2.000 | 4.200 | 1.05x | 2.00x |" in tables.mixed_backends(mixed)
    assert "| w | single_launch (cudnn_flex) | 1.500 | 1.20x |" in tables.mixed_auto(mixed)
    assert "| w | padded | flash4 | 1 | 0.100 | 0.200 |" in tables.mixed_geometry(mixed)


def test_padding_tables_compare_like_with_like(tables: Any) -> None:
    widths = {"head_dim_qk": 192, "head_dim_v": 128}
    rows = [
        {**widths, "training": training, "backend": backend, "padded": padded, "ms": ms}
        for training, backend, padded, ms in ((True, "flash4", False, 2.0), (True, "flash4", True, 3.0), (False, "flash4", False, 1.0))
    ]
    choices = [{**widths, "training": True, "selection": "static", "backend": "flash4", "padded": True}]
    data = {"rows": rows, "choices": choices, "pad_cost": [{**widths, "backend": "flash4", "compiled": True, "ms": 5.0, "ms_extra": 0.25}]}
    assert "| 192/128 | training | 2.000 | 3.000 |" in tables.padding_times(data)
    assert "| 192/128 | inference | 1.000 |" in tables.padding_times(data)
    assert "| 192/128 | training | static | flash4 padded | 3.000 | 1.50x |" in tables.padding_choices(data)
    assert "| 192/128 | flash4 | compiled | 5.000 | 0.250 |" in tables.padding_cost(data)


def test_layers_table_has_ratios_and_steps(tables: Any) -> None:
    result = {"mixed_over_mean_uniform": 1.0042, "mixed_over_mean_uniform_spread": [0.998, 1.01], "grouped_over_mean_uniform": None}
    data = {"variants": {"mha": {**result, "step_ms": {"causal": 50.0}, "chosen": {"causal": "flash4"}}}}
    assert "| mha | 1.004 (0.998 to 1.010) |" in tables.layers_ratios(data)
    assert "| mha | causal | flash4 | 50.0 |" in tables.layers_steps(data)


def test_a_block_needs_its_markers(tables: Any) -> None:
    begin, end = "<!-- x: begin (python docs/make_tables.py) -->", "<!-- x: end -->"
    assert tables.with_block(f"a\n{begin}\nold\n{end}\nb\n", "x", "new\n") == f"a\n{begin}\nnew\n{end}\nb\n"
    for text in ("nothing", f"{begin}\n", f"{begin}{end}" * 2):
        with pytest.raises(ValueError, match="once each"):
            tables.with_block(text, "x", "new")


def test_pages_out_of_date_are_found_and_mended(tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name}: begin (python docs/make_tables.py) -->\n<!-- {name}: end -->\n" for name in "xy"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "BLOCKS", {"x": (page, lambda: "one\n"), "y": (page, lambda: "two\n")})
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--check"])
    assert tables.main() == 1 and "one" not in page.read_text()
    monkeypatch.setattr(sys, "argv", ["make_tables.py"])
    assert tables.main() == 0
    assert re.findall(r"^\w+$", page.read_text(), flags=re.M) == ["one", "two"]
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--check"])
    assert tables.main() == 0
