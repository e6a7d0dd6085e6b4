# `make demo` and `make test` set up everything they need; see README.md.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Debian packages. For the demo: only what creates a virtual environment. For the tests also the
# real things they run: FUSE's helper for unprivileged mounts, a container runtime, image tools,
# a JDK for HDFS, a KDC for that. Without root (or apt) nothing is installed and those tests are
# skipped, saying why.
DEMO_PACKAGES := python3-venv
TEST_PACKAGES := $(DEMO_PACKAGES) apache2-utils attr ceph-common ceph-mon ceph-osd chromium containerd default-jdk-headless docker-registry e2fsprogs fio fuse3 gcc iproute2 krb5-admin-server krb5-kdc krb5-user libarchive-tools libc6-dev libfuse3-dev pkg-config radosgw rsync runc skopeo umoci util-linux xfsprogs zstd

# And what a Kubernetes is built and run with, most of which is unpacked and not installed.
KUBERNETES_PACKAGES := $(TEST_PACKAGES) dpkg-dev iptables openssl

SLURM_PACKAGES := $(TEST_PACKAGES) mariadb-server munge slurm-wlm slurmdbd systemd

# Every command that a test starts would compile all its modules again.
unexport PYTHONDONTWRITEBYTECODE

# uv takes a tenth of pip's processor time, and leaves compiling to the first import. It does not
# read pip's settings: these are handed on, and where others are needed pip follows.
export UV_HTTP_TIMEOUT ?= 180
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# By a pip that the machine has: venv's own way to get one takes more processor time than all the rest.
OUTER_PIP := { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt pip uv; } 2>/dev/null
UV_INSTALL := $(BIN)/python -m uv pip install --quiet --python $(BIN)/python --constraint constraints.txt

define install_packages
@missing=; for package in $(1); do \
	dpkg-query -W -f='$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; done; \
if [ -n "$$missing" ]; then \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Debian packages:$$missing"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	else echo "not installed (needs root and apt), tests that want them are skipped:$$missing"; fi; fi
endef

.PHONY: bench-smoke demo test durations fuzz test-kubernetes test-slurm test-dockerfiles test-pythons test-containerd-2 soak lint types types-oldest types-newest wheel-test docs clean system-demo system-test

demo: system-demo $(VENV)/usable
	@$(BIN)/bootseer demo

test: system-test $(VENV)/compiled
	$(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder

# The whole suite, noting what each test takes: the longest are begun first from then on.
durations: system-test $(VENV)/compiled
	$(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder --note-durations

# Mutations of all that is read from disks and networks, for so long; a failing input is kept in
# .fuzz, and `python -m tests.fuzz TARGET FILE` reads it again.
MINUTES ?= 10
fuzz: $(VENV)/ready
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# With the containerd of Debian's next release, 2.x: not in `test`, since it changes from day to day.
test-containerd-2: system-test $(VENV)/ready
	set -e; found=$$($(BIN)/python -c 'import pathlib, testbed.packages as p; \
		print(p.Packages(pathlib.Path("$(VENV)/packages").absolute()).unpacked("forky", "containerd"))'); \
	BOOTSEER_TEST_CONTAINERD="$$found/usr/bin" $(BIN)/python -m pytest tests/prefetch/snapshotter

# On a real Kubernetes of two nodes: its programs are built the first time, in some ten minutes, and
# kept in BOOTSEER_TEST_KUBERNETES (~/.cache/bootseer-kubernetes).
test-kubernetes: $(VENV)/ready
	$(call install_packages,$(KUBERNETES_PACKAGES))
	$(BIN)/python -m pytest --timeout 900 tests/clusters/kubernetes
	BOOTSEER_TEST_API_SERVER=1 $(BIN)/python -m pytest tests/bootseer/kubernetes tests/chart

# On a real Slurm of two nodes, or four, each in namespaces of its own.
test-slurm: $(VENV)/ready $(VENV)/formats
	$(call install_packages,$(SLURM_PACKAGES))
	$(BIN)/python -m pytest --timeout 600 tests/clusters/slurm

# The images of docker/, built by buildah on a Debian that is made anew, and started by runc.
test-dockerfiles: system-test $(VENV)/ready
	$(call install_packages,buildah mmdebstrap)
	$(BIN)/python -m pytest --timeout 600 tests/clusters/docker

# On a fresh Debian of another release, by its Python; kept in BOOTSEER_TEST_DEBIAN
# (~/.cache/bootseer-debian). TESTS="-n 2 tests/snapshots" runs some of them.
DEBIAN ?= trixie
TESTS ?=
test-pythons: $(VENV)/ready
	$(call install_packages,mmdebstrap)
	$(BIN)/python -m tests.pythons $(DEBIAN) $(TESTS)

# Jobs of several users while processes are killed and frozen, disks fill, stores vanish and HDFS loses
# servers. It goes on where an earlier one was stopped: SOAK_FOLDER keeps its state.
# Before that, random operations on two mounts of one folder, and of one folder of an HDFS, against a
# model of what they promise. Each of the three runs whatever becomes of the others.
SOAK_MINUTES ?= 60
EXERCISER_MINUTES ?= 20
SOAK_FOLDER ?= $(or $(TMPDIR),/tmp)/bootseer-soak
soak: system-test $(VENV)/ready
	failed=0; for storage in folder hdfs; do \
		$(BIN)/python -m tests.fuse.striped.exerciser --minutes $(EXERCISER_MINUTES) --storage $$storage || failed=1; done; \
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) --folder $(SOAK_FOLDER) || failed=1; exit $$failed

# Every benchmark once with the least sizes, to see that it still works; nothing is measured. Packages and
# images are kept as for a run. Tens of minutes the first time.
bench-smoke: system-test $(VENV)/ready $(VENV)/formats
	$(BIN)/python -m bench --smoke

# Folders whose docstrings are held to tools/plain_words.py.
PLAIN_WORDS := bench bootseer build_backend fuse prefetch snapshots testbed tests tools

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/plain_words.py --most 1 $(PLAIN_WORDS)

# Against the oldest and the newest Python that are supported; one process each.
types: types-oldest types-newest

types-oldest: $(VENV)/ready
	$(BIN)/mypy

types-newest: $(VENV)/ready
	$(BIN)/mypy --python-version 3.14

# Built, installed elsewhere, run outside the checkout.
wheel-test: $(VENV)/ready
	$(BIN)/python -m tests.wheel

system-demo:
	$(call install_packages,$(DEMO_PACKAGES))

system-test:
	$(call install_packages,$(TEST_PACKAGES))

# What a node needs, and nothing else: enough for the demo.
$(VENV)/usable: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Bootseer needs Python 3.11 or newer; set PYTHON=")'
	@echo "setting up $(VENV), once"
	@test -x $(BIN)/uv || $(OUTER_PIP) || { $(PYTHON) -m venv $(VENV) && $(PIP_INSTALL) uv; }
	@$(UV_INSTALL) --editable . || $(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/ready: $(VENV)/usable
	$(UV_INSTALL) --editable '.[dev,bench]' || $(PIP_INSTALL) --editable '.[dev,bench]'
	touch $@

# Torch and its like are large: only for the tests, which are skipped without them.
$(VENV)/formats: $(VENV)/ready
	$(UV_INSTALL) --editable '.[formats]' || $(PIP_INSTALL) --editable '.[formats]' \
		|| echo "not installed, tests that want them are skipped: torch, safetensors, transformers"
	touch $@

# Each of pytest's workers reads every test: without this all of them would compile every module, at once.
$(VENV)/compiled: $(VENV)/formats
	$(BIN)/python -c 'import torch.distributed.run, torch.distributed.checkpoint, torch._inductor.codecache, transformers.utils.hub; \
		from transformers import LlamaForCausalLM; import safetensors.torch' >/dev/null 2>&1 & \
	$(BIN)/python -m pytest --collect-only --quiet tests/bootseer >/dev/null & \
	$(BIN)/python -m pytest --collect-only --quiet --ignore tests/bootseer tests >/dev/null; wait
	touch $@

docs: $(VENV)/ready
	$(BIN)/python -m tests.support.cli_reference
	$(BIN)/python -m tests.support.json_reference
	$(BIN)/python -m bench --report

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
