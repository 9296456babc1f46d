# Every target below works in a fresh clone: the first one makes the virtual environment.
#   PYTHON=python3.12 make test     another interpreter (3.11 or newer)
#   VENV=/tmp/venv make test        another place for the virtual environment

VENV   ?= .venv
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install check test reliability soak fuzz test-clients test-ray test-gpu bench bench-gpu \
	demo report run quality sizes clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## Make the virtual environment and install into it

# Byte code is made of what is imported, when it is: of all of it half a minute.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found" >&2; \
		echo "hint: name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[dev]'
	@touch $@

check: $(STAMP)  ## Lint, format, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/repo

# The tests try the same examples every time: make test HYPOTHESIS_PROFILE=random tries new ones.
HYPOTHESIS_PROFILE ?= ci
export HYPOTHESIS_PROFILE

WORKERS ?= auto
RERUN   ?= --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks -rfER
test: $(STAMP)  ## All tests that need no GPU, a process for each core: make test WORKERS=1
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--durations 25 $(RERUN)

reliability: $(STAMP)  ## The counts of docs/reliability.md: minutes each
	$(BIN)/python -m pytest -q -m figures --timeout 3600

MINUTES ?= 20
soak: $(STAMP)  ## 64 users with disconnects and nonsense, overload, resets: make soak MINUTES=20
	mkdir -p artifacts
	PYTHONPATH=tests $(BIN)/python -m tests.soak --minutes $(strip $(MINUTES)) --output artifacts/soak.json

RUNS ?= 100000
URL  ?=  # of a server that schemathesis may try, too
fuzz: pyproject.toml constraints.txt  ## Coverage-guided on files; with URL=, schemathesis on a server
	test -x $(VENV)-fuzz/bin/python || $(PYTHON) -m venv $(VENV)-fuzz
	$(VENV)-fuzz/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[fuzz]'
	for kind in header index manifest; do PYTHONPATH=.:tests $(VENV)-fuzz/bin/python \
		tests/fuzz/coverage_guided.py $$kind artifacts/fuzz/$$kind -runs=$(RUNS) || exit 1; done
	$(if $(strip $(URL)),$(VENV)-fuzz/bin/schemathesis run $(strip $(URL))/openapi.json \
		--checks not_a_server_error --continue-on-failure --max-examples 900)

test-gpu: $(STAMP)  ## The tests that need a GPU
	$(BIN)/python -m pytest -q -m gpu

AIPERF ?= 0.13.0
test-clients: pyproject.toml constraints.txt  ## Other people's clients against the server
	test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dev,clients]'
	test -x $(VENV)-aiperf/bin/python || $(PYTHON) -m venv $(VENV)-aiperf
	$(VENV)-aiperf/bin/python -m pip install --quiet --disable-pip-version-check aiperf==$(AIPERF)
	PATH="$(abspath $(VENV)-aiperf/bin):$$PATH" $(VENV)-clients/bin/python -m pytest -q -m clients \
		tests/clients

test-ray: pyproject.toml constraints.txt  ## Replicas on a local Ray cluster, some of them killed
	test -x $(VENV)-ray/bin/python || $(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dev,ray]'
	$(VENV)-ray/bin/python -m pytest -q -m ray tests/serving/replicas

bench: $(STAMP)  ## Speed: calibration, planner, tokens/s beside transformers
	$(BIN)/pw bench tiny

# Not GROUPS: that is bash's own, and what is given there is lost.
ONLY ?=
bench-gpu: $(STAMP)  ## The records of docs/gpu.md on this GPU, 15 minutes: ONLY="models serve" for some
	PATH="$(abspath $(BIN)):$$PATH" TRITON_INTERPRET=0 bash benchmarks/gpu.sh $(ONLY)

demo: $(STAMP)  ## The main job: calibrate, serve under a tight budget, watch the pages move
	$(BIN)/python -m pw.evaluation.demo

TRACE ?=  # a --precision-trace of the same artifact, such as artifacts/demo/trace.jsonl
report: $(STAMP)  ## Quality of the bundled model at equal bytes: artifacts/report/report.html
	$(BIN)/pw eval tiny --policies dense,static:2..6,adaptive \
		--memory-budgets static:3,static:4,static:5 --seqlen 512 --max-chunks 48 \
		--tasks tracking,sequence,comparison --limit 50 \
		--output artifacts/report $(if $(strip $(TRACE)),--trace $(TRACE))

RECIPE ?= tiny
run: $(STAMP)  ## Make and score an artifact: make run RECIPE=mixtral-8x7b [MODEL=folder] [DOWNLOAD=1]; or a file
	$(BIN)/pw run $(or $(wildcard $(RECIPE)),pipelines/recipes/$(RECIPE).toml) $(if $(MODEL),--model $(MODEL)) $(if $(DOWNLOAD),--download)

# Q: where the artifacts of `quality` and its scores are kept; what is there is not made again, so
# remove it after a change of code. Its `settings` are those of the first run: others are refused.
# DATA: a folder with calibration.jsonl and heldout.jsonl (lines with `source` and `text`), lm/ and
# skills/. DEVICE: cpu or cuda. JOBS: artifacts and studies made side by side, each in a process.
Q        ?= artifacts/quality
DEVICE   ?= cpu
JOBS     ?= 1
# A short run: make quality ... SAMPLES="--nsamples 40 --seqlen 256" WINDOWS=2 OTHER_WINDOWS=1 Q=artifacts/short
SAMPLES  ?= --nsamples 128 --seqlen 1024
PROSE    ?= --nsamples 96 --seqlen 512
WINDOWS  ?= 32
OTHER_WINDOWS ?= 12
# Of moe-small: 28 % of the unquantized bytes.
TARGET_BITS ?= 3.588
STEPS    ?= 240
SETTINGS  = MODEL DATA SAMPLES PROSE WINDOWS OTHER_WINDOWS TARGET_BITS STEPS
TEXT      = --dataset $(DATA)/calibration.jsonl $(SAMPLES) --device $(DEVICE)
# Longest first.
STUDIES  ?= engine-memory equal-bytes codebooks transitions ablation shift memory pages bf16-equal one-bit held-tables parts
LAB       = $(BIN)/python -m pw.evaluation.lab run --checkpoint $(MODEL) --device $(DEVICE) --jobs $(JOBS) \
	--calibration $(DATA)/calibration.jsonl --heldout $(DATA)/heldout.jsonl --without 0 --windows $(WINDOWS)
quality: $(STAMP)  ## Tables of docs/quality.md: make quality MODEL=folder DATA=folder [DEVICE=cuda JOBS=12]
	@test -n "$(MODEL)" -a -n "$(DATA)" || { echo "usage: make quality MODEL=... DATA=..." >&2; exit 2; }
	@mkdir -p $(Q)
	@printf '%s\n' $(foreach name,$(SETTINGS),'$(name) = $($(name))') >$(Q)/settings.now
	@test -e $(Q)/settings || test -z "$(wildcard $(Q)/*.done)" || echo unknown >$(Q)/settings
	@test -e $(Q)/settings || mv $(Q)/settings.now $(Q)/settings
	@test ! -e $(Q)/settings.now || cmp -s $(Q)/settings $(Q)/settings.now || { \
		echo "error: \`$(Q)\` holds a run of other settings: $$(diff $(Q)/settings $(Q)/settings.now \
			| sed -n 's/^> //p' | paste -sd ,); give Q=another-folder or remove it" >&2; exit 2; }
	@rm -f $(Q)/settings.now
	@$(MAKE) --no-print-directory -j $(JOBS) $(Q)/results.done $(Q)/results-tuned.done \
		$(Q)/results-distilled.done

$(Q)/prose.jsonl:
	grep -E '"source": *"(gut|classic|novels100|speeches)"' $(DATA)/calibration.jsonl >$@
$(Q)/own.done:
	$(BIN)/pw calibrate $(MODEL) -o $(Q)/own.pw $(TEXT)
	$(BIN)/pw fit-residuals $(Q)/own.pw
	@touch $@
$(Q)/apl.done:
	$(BIN)/pw calibrate $(MODEL) -o $(Q)/apl.pw $(TEXT) --codebook kmeans
	@touch $@
$(Q)/prose.done: $(Q)/prose.jsonl
	$(BIN)/pw calibrate $(MODEL) -o $(Q)/prose.pw --dataset $< $(PROSE) --device $(DEVICE)
	$(BIN)/pw fit-residuals $(Q)/prose.pw
	@touch $@
$(Q)/tuned.done: $(Q)/own.done
	$(BIN)/pw tune $(Q)/own.pw -o $(Q)/tuned.pw --bits 3.6 --device $(DEVICE)
	@touch $@
$(Q)/distilled.done: $(Q)/own.done
	$(BIN)/pw tune $(Q)/own.pw -o $(Q)/distilled.pw --bits $(TARGET_BITS) --distill $(STEPS) --device $(DEVICE)
	@touch $@
$(Q)/results.done: $(Q)/own.done $(Q)/apl.done $(Q)/prose.done
	$(LAB) $(STUDIES) --artifact $(Q)/own.pw --apl $(Q)/apl.pw --narrow $(Q)/prose.pw \
		--other $(DATA)/lm/wikitext2_raw_test.txt --other-windows $(OTHER_WINDOWS) \
		--tasks $(DATA)/skills --memory $(Q)/memory --out $(Q)/results
	@touch $@
$(Q)/results-tuned.done: $(Q)/tuned.done
	$(LAB) bf16-equal parts --artifact $(Q)/tuned.pw --out $(Q)/results-tuned
	@touch $@
$(Q)/results-distilled.done: $(Q)/distilled.done
	$(LAB) bf16-equal parts --artifact $(Q)/distilled.pw --out $(Q)/results-distilled
	@touch $@

sizes: $(STAMP)  ## Lines per file, largest first, with the median
	@git ls-files '*.py' | xargs wc -l | grep -v ' total$$' | sort -rn | awk \
		'{n[NR] = $$1; sum += $$1; if (NR <= 25) print} \
		END {printf "%d files, %d lines, median %d\n", NR, sum, n[int((NR + 1) / 2)]}'

clean:  ## Remove caches and build output (not the virtual environment, not artifacts)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find pw kernels pipelines tests -name __pycache__ -type d -prune -exec rm -rf {} +
