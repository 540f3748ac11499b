"""Links in the documentation work, and its tables say what configs do."""

import itertools
import re
import shutil
import subprocess

import pytest

from helpers import ROOT, load_config

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"})
LINK = re.compile(r"\]\(([^)\s]+)\)")
ADDRESSED = ("setup.py", "README.md", "colab/inspect_checkpoint.ipynb")
ADDRESS = re.compile(r"github(?:\.com)?/([\w.-]+/[\w.-]+)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(page):
    """The anchors that GitHub generates for a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.fast
def test_every_page_and_picture_is_linked():
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in LINK.findall(page.read_text())
    }
    for path in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/pictures/*")]:
        assert path.resolve() in linked, path


def hyperparameters(config):
    """Those of docs/fidelity.md's table, in its order. Models without a generator have eight."""
    found = [config.batch_size, config.sequence_length, config.steps, config.optimizer.learning_rate]
    found += [config.optimizer.weight_decay, config.optimizer.epsilon, config.optimizer.beta2, config.model.dropout]
    widths = config.model.time_embed_dim, config.model.sinusoidal_dim
    return found + list(widths if config.model.kind == "diffeqformer" else ())


@pytest.mark.fast
def test_the_listed_hyperparameters_are_those_of_the_configs():
    text = (ROOT / "docs" / "fidelity.md").read_text()
    rows = re.findall(r"^\| `([\w.:]+)` \| (\d+ \| .*) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    for label, row in rows:
        pattern, _, stage = label.replace("...", "*").partition(":")
        models = (stage, f"{stage}-gpt") if stage else ("diffeqformer", "llama" if label == "llama_1b" else "gpt")
        for path, model in itertools.product(ROOT.glob(f"configs/{pattern}.py"), models):
            cells = [cell.split(", GPT ")[-1 if "gpt" in model else 0] for cell in row.split(" | ")]
            found = hyperparameters(load_config(path.stem, model))
            assert found == [float(cell.replace(",", "")) for cell in cells[: len(found)]], (path.stem, model)


@pytest.mark.fast
def test_the_address_of_the_repository_is_the_same_everywhere(tmp_path):
    for name in (*ADDRESSED, "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def addresses(root):
        return [set(ADDRESS.findall((root / name).read_text(encoding="utf-8"))) for name in ADDRESSED]

    assert len(addresses(ROOT)[0]) == 1 and addresses(ROOT) == addresses(ROOT)[:1] * len(ADDRESSED)
    subprocess.run(["make", "--silent", "address", "REPOSITORY=me/its.name", "HUB=us"], cwd=tmp_path, check=True)
    assert addresses(tmp_path) == [{"me/its.name"}] * len(ADDRESSED)
    assert "\n[![Open in Colab](" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert 'MODEL = \\"us/diffeqformer-tiny' in (tmp_path / ADDRESSED[2]).read_text(encoding="utf-8")
