# Everything a fresh machine needs: `make demo` shows what the project does, `make test` checks it. Both set up .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
FAST   := .fast
DEMO   := demo-out

.PHONY: demo fast test docs kernels fuzz pins pins-diff accuracy mutants check bench clean

$(BIN)/kvtwin: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[report]"
	touch $@

$(VENV)/dev: pyproject.toml $(BIN)/kvtwin
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

$(VENV)/docs: pyproject.toml $(BIN)/kvtwin
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

demo: $(BIN)/kvtwin
	$(BIN)/kvtwin compare --scenario docs/demo-azure-hour.toml --out $(DEMO)/azure-hour
	$(BIN)/kvtwin compare --scenario docs/demo-sharegpt.toml --out $(DEMO)/sharegpt
	$(BIN)/kvtwin report $(DEMO)/azure-hour $(DEMO)/sharegpt --out $(DEMO)/report.html
	@echo "Look at $(DEMO)/report.html; $(DEMO)/*/ have the files behind it."

# A compiled copy of this, `.fast/bin/kvtwin` (docs/speed.md); it stays as it is until the next `make fast`.
fast:
	$(PYTHON) -m venv $(FAST)
	KVTWIN_MYPYC=1 $(FAST)/bin/python -m pip install --quiet --disable-pip-version-check ".[report]"
	@$(FAST)/bin/kvtwin --version | grep compiled || \
		{ echo "Nothing was compiled: KVTWIN_MYPYC=1 pip install -v . says why"; exit 1; }

# More threads than cores make small fits slower; what tests of a file share, one process makes once.
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Triton's kernels for GPUs that are not here, every case of `pytest -m gpu`: minutes. `test` compiles all as well, unless
# the kernels are those that this has recorded. For a change of a kernel, or of Triton.
kernels: $(VENV)/dev
	$(BIN)/python tests/gpu_runtime/model/triton_compiles.py

# The documentation as a site, site/index.html; a link that leads nowhere is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/docs
	$(BIN)/mkdocs build --quiet
	@echo "Look at site/index.html."

# Examples anew each time, where `test` has the same ones.
fuzz: $(VENV)/dev
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=random

# What kvtwin decides, predicts and tells now and did not at a commit: `make pins-diff REV=main K='vllm-swap crowd'`.
REV ?= HEAD
K   ?=
pins-diff: $(VENV)/dev
	@$(BIN)/python tests/pins/pinned.py diff $(REV) -k "$(K)"

# After a change of that which is meant, once the difference is read.
pins: $(VENV)/dev
	$(BIN)/python tests/pins/pinned.py renew -k "$(K)"

# Measured rows simulated anew, after a change of prices; `DATA` as validation/accuracy_rows.py says.
DATA ?= data
accuracy: $(VENV)/dev
	$(BIN)/python validation/accuracy_rows.py $(DATA)
	$(BIN)/python validation/accuracy_coverage.py

# Hours; goes on where it was interrupted. Other faults with another seed: `make mutants SEED=2`.
SEED ?= 1
mutants: $(VENV)/dev
	$(BIN)/python benchmarks/mutants.py --seed $(SEED) --out mutants-$(SEED).jsonl

check: $(VENV)/dev $(VENV)/docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	@# What mypyc would not compile, before a build.
	$(BIN)/python -m mypy --config-file=pyproject.toml $$($(BIN)/python -c "import setup; print(*setup.hot_modules())")

bench: $(VENV)/dev
	$(BIN)/python benchmarks/replay_speed.py

clean:
	rm -rf $(VENV) $(FAST) $(DEMO) site build .mypy_cache *.egg-info
