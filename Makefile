# The two commands: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test lint format docs bench clean

demo: .venv/ready
	$(BIN)/givens demo

# Some workers of one thread each; worksteal keeps most of a file's tests, and its fixtures, together.
test: .venv/ready lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not cuda" -n logical --maxprocesses 4 --dist worksteal

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/ready
	$(BIN)/sphinx-build -W --keep-going -q -d build/doctrees docs build/docs
	@echo "Written: build/docs/index.html"

bench: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/step.py --device cpu --json results/step-cpu.json

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
