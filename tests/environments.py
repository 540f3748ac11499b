"""Environments that have exactly the packages a requirement asks for, lent by this one, so nothing is downloaded."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flags import FAST_COMPILATION
from helpers import ROOT

BUILT_FROM = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "requirements-light.txt")
LIGHT = [line for line in (ROOT / "requirements-light.txt").read_text().splitlines() if not line.startswith("#")]


def build_wheel(folder: pathlib.Path) -> pathlib.Path:
    """The wheel of this repository, built from a copy."""
    copy = folder / "source"
    for name in ("diffeqformer", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", f"--wheel-dir={folder}", copy],
        check=True,
    )
    [wheel] = folder.glob("*.whl")
    return wheel


def requirements_of(wheel: pathlib.Path) -> list[str]:
    """What a wheel asks for, without its extras."""
    [found] = importlib.metadata.distributions(path=[str(wheel)])
    return [text for text in found.requires if "extra ==" not in text]


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of all packages that the requirements need, directly or not."""
    todo, seen = [(Requirement(text), "") for text in requirements], set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for extra in ("", *requirement.extras):
            node = canonicalize_name(requirement.name), extra
            if node not in seen:
                seen.add(node)
                todo += [(Requirement(text), extra) for text in importlib.metadata.requires(requirement.name) or []]
    return {name for name, _ in seen}


def make_environment(folder: pathlib.Path, requirements: Iterable[str], wheel: pathlib.Path | None) -> pathlib.Path:
    """A virtual environment with these packages, as links to this one's, and the wheel. Returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for name in closure(requirements):
        package = importlib.metadata.distribution(name)
        for part in {path.parts[0] for path in package.files} - {"..", "__pycache__"}:
            if not (site / part).exists() and not part.endswith(".pth"):
                (site / part).symlink_to(package.locate_file(part))
    python = folder / "bin" / "python"
    if wheel:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", f"--python={python}"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    return python


def environment_variables() -> dict[str, str]:
    """Those of this process, without what would show the repository to another."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**ours, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILATION, "PIP_NO_INDEX": "1"}


def run(python: pathlib.Path, folder: pathlib.Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    """Run the installed `diffeqformer` in a folder."""
    done = subprocess.run(
        [python.with_name("diffeqformer"), *map(str, arguments)],
        cwd=folder,
        env=environment_variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, (arguments, done.stdout, done.stderr)
    return done
