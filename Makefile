# make train      watch a small Neural ODE Transformer learn real text (about five minutes on two cores)
# make test       the test suite
# make test-slow  what takes half a minute each: several processes, full disks, a kill in the middle of a save
# make test-kill  ten minutes of kills at random moments, each survived
# make test-tpu   large train steps through the TPU compiler, which needs no TPU (ten minutes)
# Each creates .venv and installs what it needs the first time. PYTHON chooses the interpreter (3.11 to 3.13).

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test test-slow test-kill test-tpu

train: .venv/installed
	$(BIN)/python -m diffeqformer.main --config=configs/tiny.py

test: .venv/installed-test
	$(BIN)/python -m pytest --numprocesses=2 --dist=worksteal -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test-slow: .venv/installed-test
	$(BIN)/python -m pytest -m slow

test-kill: .venv/installed-test
	$(BIN)/python -m pytest -m kill

test-tpu: .venv/installed-tpu
	$(BIN)/python -m pytest -m tpu -s tests/test_tpu.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "diffeqformer needs Python 3.11, 3.12 or 3.13, but '$(PYTHON)' is not: name another one with 'make PYTHON=python3.12 $(MAKECMDGOALS)'"; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu it needs 'apt install python3-venv'"; exit 1; }

.venv/installed: setup.py constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --constraint constraints.txt
	@touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' --constraint constraints.txt
	@touch $@

.venv/installed-tpu: .venv/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,tpu]' --constraint constraints.txt
	@touch $@
