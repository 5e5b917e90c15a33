# The commands of this repository; `make` lists them. CONTRIBUTING.md says when to use which.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
IMAGES := psjobs-operator:$(VERSION) psjobs-worker:$(VERSION)
CLUSTER ?= psjobs
# More arguments for `run`, `bench` and `e2e`, for example ARGS=--json.
ARGS ?=
CRD := parameterserverjobs.psjobs.dev.yaml
# Before a command that links libtorch; the script fetches it if need be, and says so.
WITH_LIBTORCH = export LIBTORCH=$$(scripts/libtorch.sh);
# The profile of `run`, `custom`, `images` and what needs them. PROFILE=dev takes the programs that the tests have
# compiled already, at a tenth of the time and with the checks of a debug build; CI does so.
export PROFILE ?= release
BUILT := $(TARGET)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
# One selection of packages for each profile: cargo unites their features, so that a dependency is
# compiled once and not once more for each package. Tests always select the whole workspace, and need more features:
# PROFILE=dev selects what they do, as otherwise everything would be compiled a second time.
TESTS := --workspace --lib --bins --tests
PROGRAMS := $(if $(filter dev,$(PROFILE)),$(TESTS),-p psjobs -p kubectl-psjob -p psjobs-bench -p psjobs-workloads -p psjobs-operator -p psjobs-web-server)

.PHONY: help
help: ## list the commands
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  make %-16s %s\n", $$1, $$2 }'

.PHONY: run
run: build mnist ## train MNIST on this machine: one server, two trainers
	$(BUILT)/psjobs run examples/mnist.yaml $(ARGS)

.PHONY: build
build: ## compile psjobs with its plugins, psjobs-worker, psjobs-operator and psjobs-web for use
	$(WITH_LIBTORCH) $(CARGO) build --locked --profile $(PROFILE) $(PROGRAMS)

.PHONY: build-tests
build-tests: ## compile every program, library and test that `make test` and `make test-python` run
	$(WITH_LIBTORCH) $(CARGO) build --locked $(TESTS)

# Tests mostly wait for processes and for time to pass: a machine of two cores runs four at once. Threads of libtorch that have
# nothing to do sleep; a worker that is started without the variable sets it, and loads libtorch a second time.
test test-python: export OMP_WAIT_POLICY ?= passive
# Tests that wait for minutes for servers and stores, while they compute for seconds: they run beside all others.
STORES := faults::no_fault kills::no_kill jobs::a_job_with_its_state
.PHONY: test
test: export RUST_TEST_THREADS ?= $(shell n=$$(nproc); echo $$((n > 4 ? n : 4)))
test: build-tests mnist fashion ## run every test that needs no cluster
	PSJOBS_OBJECT_STORES=$$(scripts/object-stores.sh); export PSJOBS_OBJECT_STORES PSJOBS_WORKER=$(abspath $(TARGET))/debug/psjobs-worker; \
	$(WITH_LIBTORCH) \
	RUST_TEST_THREADS=2 $(CARGO) test --locked --workspace --test stores -- $(STORES) >$(TARGET)/stores.log 2>&1 & stores=$$!; \
	$(CARGO) test --locked --workspace -- $(STORES:%=--skip %); \
	code=0; wait "$$stores" || code=$$?; cat $(TARGET)/stores.log; exit "$$code"
	$(MAKE) --no-print-directory test-foreign chart

.PHONY: test-foreign
test-foreign: ## drive the parameter server with a client in Python
	export PYTHONPATH=$$(scripts/python-packages.sh grpcio); $(CARGO) test --locked --workspace --test integration -- --include-ignored foreign_client

# `make test` does half of them.
.PHONY: test-stores
test-stores: ## write checkpoints to each object store through 250 seeded faults and 60 kills; needs Go and npm
	PSJOBS_OBJECT_STORES=$$(scripts/object-stores.sh); export PSJOBS_OBJECT_STORES; \
	PSJOBS_STORES_ALL=1 $(CARGO) test --locked --workspace --test stores -- --nocapture faults:: kills::

# The module of the debug build, which has the workspace's dependencies already, beside the package's sources. Types are checked
# meanwhile, on one core.
.PHONY: test-python
test-python: build-tests mnist text ## test the Python package, with types checked; fetches torch if need be
	scripts/python-package.sh $(TARGET)/debug/lib_native.so $(TARGET)/python
	export PYTHONPATH=$(abspath $(TARGET))/python PSJOBS_WORKER=$(abspath $(TARGET))/debug/psjobs-worker PSJOBS=$(abspath $(TARGET))/debug/psjobs; \
	python=$$(scripts/python.sh); PSJOBS_MLFLOW=$$(scripts/python-packages.sh mlflow "$$python"); PSJOBS_WANDB=$$(scripts/python-packages.sh wandb "$$python"); export PSJOBS_MLFLOW PSJOBS_WANDB; cd python; \
	"$$python" -m mypy --cache-dir $(abspath $(TARGET))/mypy >$(abspath $(TARGET))/mypy.log 2>&1 & types=$$!; \
	"$$python" -P -m pytest -q -n 2 --dist worksteal -p no:cacheprovider; \
	wait "$$types" || { cat $(abspath $(TARGET))/mypy.log; exit 1; }

.PHONY: test-page
test-page: build-tests ## test the web page of a job in Chromium; needs node 20 and Chromium, and says so without them
	PSJOBS_WORKER=$(abspath $(TARGET))/debug/psjobs-worker PSJOBS=$(abspath $(TARGET))/debug/psjobs scripts/page-test.sh

.PHONY: wheel
wheel: ## build the Python package's wheel, and check that it installs; ARGS=release makes that of PyPI
	scripts/wheel.sh $(abspath $(TARGET))/wheel $(ARGS)

# For example ARGS=amd64.
.PHONY: plugin
plugin: ## make the archives of kubectl psjob for releases, for glibc 2.28 and later, and krew's manifest of them
	scripts/plugin.sh $(abspath $(TARGET))/plugin $(ARGS)

# For example SEEDS=100000 FROM=2000; FROM=1234 SEEDS=1 TRACE=1 shows what happens in one.
.PHONY: simulate
simulate: ## run simulated jobs: SEEDS of them, from seed FROM on
	PSJOBS_SIMULATE_SEEDS=$(SEEDS) PSJOBS_SIMULATE_FROM=$(FROM) PSJOBS_SIMULATE_TRACE=$(TRACE) $(CARGO) test --locked --workspace --test simulation -- --nocapture no_job

.PHONY: fuzz
fuzz: ## run the fuzz targets, or TARGETS of them, for SECONDS each, on stable Rust
	scripts/fuzz.sh $(or $(SECONDS),20) $(TARGETS)

.PHONY: chart
chart: ## check the Helm chart, where helm is installed
	if command -v helm >/dev/null; then charts/psjobs/tests/check.sh; else echo "chart: not checked, helm is not installed"; fi

.PHONY: lint
lint: lint-files clippy ## check all that `lint-files` and `clippy` check

.PHONY: clippy
clippy: ## check that clippy has no warning
	$(WITH_LIBTORCH) $(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked --workspace --test e2e --test soak -- -D warnings

.PHONY: lint-files
lint-files: ## check format, documents, the Python reference, circles of files, commits and, where cargo-deny and cargo-machete are installed, dependencies
	scripts/check-docs.py
	scripts/check-circles.py
	scripts/check-pins.py
	scripts/check-members.py
	scripts/python-reference.py | cmp -s - docs/python-reference.md || { echo "docs/python-reference.md is out of date; run make generate and commit it" >&2; exit 1; }
	scripts/check-commits.sh
	$(CARGO) fmt --all --check
	if command -v cargo-deny >/dev/null; then $(CARGO) deny --locked check licenses bans sources; else echo "lint: licences not checked, cargo-deny is not installed"; fi
	scripts/advisories.sh
	if command -v cargo-machete >/dev/null; then $(CARGO) machete --skip-target-dir; else echo "lint: unused dependencies not checked, cargo-machete is not installed"; fi

# Compiled alone, with fewer dependencies than the workspace's; after `make build-tests` it is there already:
# CRDGEN=target/debug/crdgen.
CRDGEN ?= $(CARGO) run --locked --quiet -p psjobs-api --features crd --bin crdgen --

# Copies a file unless it is the same already: what is compiled from it would be compiled again.
put = cmp -s $(1) $(2) || cp $(1) $(2)

.PHONY: generate
generate: ## write crds/, the chart's copy and the references in docs/ from the sources
	$(CRDGEN) > $(TARGET)/$(CRD)
	$(call put,$(TARGET)/$(CRD),crds/$(CRD))
	$(call put,$(TARGET)/$(CRD),charts/psjobs/files/$(CRD))
	$(CRDGEN) --reference > $(TARGET)/reference.md
	$(call put,$(TARGET)/reference.md,docs/reference.md)
	scripts/python-reference.py > $(TARGET)/python-reference.md
	$(call put,$(TARGET)/python-reference.md,docs/python-reference.md)

.PHONY: check-generated
check-generated: generate ## fail if `make generate` changes a file
	git diff --exit-code --stat -- crds charts docs/reference.md docs/python-reference.md || { echo "generated files were out of date; commit what make generate wrote" >&2; exit 1; }

.PHONY: libtorch
libtorch: ## print the folder of libtorch 2.11, fetched if need be
	@scripts/libtorch.sh

.PHONY: mnist
mnist: ## fetch MNIST into the cache, if it is not there
	@scripts/mnist.sh

.PHONY: fashion
fashion: ## fetch Fashion-MNIST into the cache, if it is not there
	@scripts/mnist.sh fashion

.PHONY: text
text: ## fetch a text for the language model into the cache, if it is not there
	@scripts/text.sh

.PHONY: custom
custom: PROGRAMS += -p clothes
custom: build fashion ## build the user's own workload in examples/custom, and train it
	PATH=$(abspath $(BUILT)):$$PATH $(BUILT)/psjobs run examples/custom.yaml $(ARGS)

.PHONY: workloads
workloads: custom mnist text ## train every workload from its manifest to the metric that it must reach; half an hour
	PSJOBS=$(abspath $(BUILT))/psjobs PSJOBS_WORKER=$(abspath $(BUILT))/psjobs-worker $(CARGO) test --locked --workspace --test goals -- --ignored --test-threads 1 --nocapture $(ARGS)

.PHONY: images
images: ## build both images, and print their sizes
	scripts/images.sh

# With the module, the torch and the Python of the package's tests, so that nothing is compiled or fetched that is here
# already.
.PHONY: image-torch
image-torch: build-tests ## build the image of trainers that are PyTorch scripts, psjobs-torch
	scripts/python-package.sh $(TARGET)/debug/lib_native.so $(TARGET)/python
	scripts/torch-image.sh $(TARGET)/debug/lib_native.so

.PHONY: e2e
e2e: images image-torch ## run the tests on a real cluster: KUBECONFIG's, or a new one of kind
	PATH=$(abspath $(BUILT)):$$PATH $(CARGO) test --locked --workspace --test e2e -- $(ARGS)

# For example MINUTES=5 SEED=7; ARGS=--json.
.PHONY: soak
soak: images ## run jobs of every kind for MINUTES while a schedule of faults, by SEED, disturbs them; needs kind
	$(CARGO) test --locked --workspace --test soak -- --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: release-check
release-check: images ## make a release into a registry on this machine, verify it, and check that changed ones are refused
	$(MAKE) --no-print-directory wheel ARGS=release
	scripts/torch-image.sh $(TARGET)/wheel/psjobs-*.whl
	$(MAKE) --no-print-directory plugin ARGS="$(ARGS)"
	scripts/release-check.sh

.PHONY: kind-up
kind-up: ## make a cluster with kind, if it is not there
	kind get clusters 2>/dev/null | grep -qx $(CLUSTER) || kind create cluster --name $(CLUSTER)

.PHONY: deploy
deploy: images kind-up ## install the operator in kind's cluster
	kind load docker-image $(IMAGES) --name $(CLUSTER)
	helm upgrade --install psjobs charts/psjobs --kube-context kind-$(CLUSTER) --namespace psjobs-system --create-namespace --wait

.PHONY: bench
bench: build mnist ## measure, against a limit taken in the same run
	$(BUILT)/psjobs bench mnist $(ARGS)

.PHONY: gpu
gpu: ## test and measure what uses this machine's GPU; without one it says so
	@scripts/gpu.sh --ready || exit $$(($$? - 1)); \
	$(MAKE) --no-print-directory build mnist text && $(CARGO) build --locked --profile $(PROFILE) -p psjobs-python && \
	scripts/gpu.sh $(BUILT) $(ARGS)

.PHONY: bench-operator
bench-operator: ## measure the operator and psjobs-web against an API server: its own, or PSJOBS_TEST_KUBECONFIG's
	$(CARGO) build --locked --release -p psjobs-web-server
	$(CARGO) bench --locked -p psjobs-operator --bench operator -- $(ARGS)

.PHONY: bench-kubectl
bench-kubectl: ## measure `kubectl psjob logs` of 100 pods, and how fast the program starts; ARGS=CASE one case's scenario
	$(CARGO) bench --locked -p kubectl-psjob --bench kubectl -- $(ARGS)

.PHONY: clean
clean: ## delete what was built; the cache of libtorch and MNIST stays
	$(CARGO) clean
