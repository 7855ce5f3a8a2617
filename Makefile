# The two uses that matter:
#   make demo   a real cluster on this machine, kubevpn on a laptop beside it, and back to nothing
#   make test   all tests
# With your own cluster: make install, then kubevpn connect.

GO     ?= go
PREFIX ?= /usr/local

VERSION ?= $(shell sed -n 's/^\tversion = "\(.*\)"$$/\1/p' internal/process/version/version.go)
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null)$(shell git diff --quiet HEAD 2>/dev/null || echo -dirty)
# The traffic manager's image: its name for a build, or its name and digest for a release:
#   make push-image IMAGE=registry.example/kubevpn:1
#   make build IMAGE=registry.example/kubevpn@sha256:...
# A kubevpn that is built without a digest has no default image: users set --image, KUBEVPN_IMAGE or image in the
# configuration file.
IMAGE   ?=

LDFLAGS := -s -w -X kubevpn/internal/process/version.version=$(VERSION) -X kubevpn/internal/process/version.commit=$(COMMIT)
BUILD    = CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'
# The architectures of the nodes: make image builds for one of them, and make push-image builds one image for all of
# them.
ARCH    ?= $(shell $(GO) env GOARCH)
ARCHS   ?= amd64 arm64
# The image contains /traffic, which runs as an ordinary user, and iptables for its gateway, from Debian's packages.
LAYOUT   = --ref $(or $(IMAGE),$(error set IMAGE: make $@ IMAGE=registry.example/kubevpn:1)) --user 65532:65532 --iptables \
	--label org.opencontainers.image.version=$(VERSION) --label org.opencontainers.image.revision=$(COMMIT)
# The cosign key that signs the image of push-image and the checksums of a release. COSIGN_PASSWORD in the environment
# is its password. Without a key, a workflow on GitHub that may write id-tokens signs with its own certificate.
COSIGN_KEY ?=
COSIGN_FLAGS ?= --yes --recursive --use-signing-config=false --tlog-upload=false
COSIGN   = $(GO) tool -modfile=tools/cosign/go.mod cosign

.DEFAULT_GOAL := help
.PHONY: help build install image push-image image-lock release-check release-snapshot release release-provenance krew-validate vulncheck toolchain unit ci lab demo demo-down picture check elsewhere contracts docs test e2e nightly test-ipvs bench bench-far lint clean bin/kubevpn bin/traffic bin/lab bin/image always

help: ## show this
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  %-16s %s\n", $$1, $$2 }'

build: bin/kubevpn bin/traffic ## bin/kubevpn for the laptop, bin/traffic for the cluster

bin/kubevpn: LDFLAGS += $(if $(findstring @sha256:,$(IMAGE)),-X kubevpn/internal/process/version.image=$(IMAGE))
bin/kubevpn bin/traffic:
	$(BUILD) -o $@ ./cmd/$(notdir $@)

# Programs that are not part of the product are in the module test.
bin/lab bin/image:
	cd test && $(BUILD) -o ../$@ ./cmd/$(notdir $@)

install: bin/kubevpn ## put kubevpn into PREFIX/bin (PREFIX=/usr/local)
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 0755 bin/kubevpn $(DESTDIR)$(PREFIX)/bin/kubevpn

bin/linux-%/traffic: always
	GOOS=linux GOARCH=$* $(BUILD) -o $@ ./cmd/traffic

image: bin/linux-$(ARCH)/traffic bin/image ## bin/kubevpn-image.tar of IMAGE, which `ctr -n k8s.io images import` takes, for ARCH
	bin/image build $(LAYOUT) --file bin/linux-$(ARCH)/traffic:/traffic --out bin/kubevpn-image.tar

push-image: $(ARCHS:%=bin/linux-%/traffic) bin/image ## push IMAGE for amd64 and arm64, signed if COSIGN_KEY is set, with docker login's credentials
	@ref=$$(bin/image push $(LAYOUT) $(ARCHS:%=--file bin/linux-%/traffic:/traffic)) && \
	if [ -n "$(COSIGN_KEY)" ]; then $(COSIGN) sign $(COSIGN_FLAGS) --key "$(COSIGN_KEY)" "$$ref" >&2; \
	elif [ -n "$$ACTIONS_ID_TOKEN_REQUEST_URL" ]; then $(COSIGN) sign --yes --recursive "$$ref" >&2; fi && echo "$$ref"

image-lock: bin/image ## lock the current versions of Debian's packages in the image
	bin/image lock --out test/image/debian.lock.json

# scripts/release names the variables.
release-check release-snapshot release release-provenance: export VERSION := $(VERSION)
release-check release-snapshot release: export COMMIT := $(COMMIT)
release-check release-snapshot: export IMAGE := $(IMAGE)
release-snapshot release: export COSIGN_KEY := $(COSIGN_KEY)

release-check: ## check .goreleaser.yaml, and build the program of a release for this machine
	scripts/release check

release-snapshot: bin/kubevpn bin/image ## archives, packages, checksums, SBOMs and manifests for all systems, into bin/dist
	scripts/release snapshot

release: bin/kubevpn bin/image ## draft a release of the tag on GitHub: VERSION=1.2.0 REPOSITORY=OWNER/NAME PUSH=REGISTRY/NAME:1.2.0
	image=$$($(MAKE) -s push-image IMAGE=$(or $(PUSH),$(error set PUSH: the name of the image))) && \
	IMAGE=$$image scripts/release publish

release-provenance: ## add the provenance that GitHub signed to the draft: BUNDLE=FILE VERSION=1.2.0 REPOSITORY=OWNER/NAME
	scripts/release provenance "$(or $(BUNDLE),$(error set BUNDLE: the file with the provenance))"

krew-validate: ## run krew's validator on the manifest of a published release: TAG=v1.2.0 REPOSITORY=OWNER/NAME
	curl -fsSL -o bin/kubevpn.yaml --create-dirs https://github.com/$(REPOSITORY)/releases/download/$(TAG)/kubevpn.yaml
	$(GO) run sigs.k8s.io/krew/cmd/validate-krew-manifest@v0.4.4 -manifest bin/kubevpn.yaml

vulncheck: ## look for known vulnerabilities in the dependencies of the programs (network)
	$(GO) run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...

lab: bin/lab ## bin/lab, which runs real clusters on this machine

demo: IMAGE = localhost/kubevpn:demo
demo: build image lab ## a cluster, connect, a page by name, ClusterIP and pod IP, disconnect (Linux, root)
	$(GO) run -C test ./e2e/demo $(IMAGE)

demo-down: lab ## remove what demo made
	bin/lab --name demo down

picture: IMAGE = localhost/kubevpn:demo
picture: build image lab ## record docs/first-minute.svg, the picture of the README, on the cluster of demo (Linux, root)
	$(GO) run -C test ./e2e/demo -picture ../docs/first-minute.svg $(IMAGE)

check: ## formatting, vet, lint, layers, documents, and the tests of what changed, in a minute
	scripts/check

contracts: ## on any system, as root: the tests of what kubevpn changes on a machine
	scripts/contracts

elsewhere: ## go vet for macOS and Windows, and the tests compiled for both
	scripts/elsewhere

docs: ## write docs/reference from the commands and types; from the chart, its README and the objects of install
	$(GO) test -run TestReferenceIsGenerated ./internal/laptop/cli -args -update-reference
	$(GO) test -C test -run IsGenerated ./schema -args -update
	$(GO) test -C test -run IsGenerated ./chart -args -update

test: ## lint, unit tests, network namespaces, real clusters (the last two: Linux, root); without clusters: scripts/test unit
	scripts/test

toolchain: ## check that go.mod names the newest patch release of Go (network); scripts/toolchain update raises it
	scripts/toolchain

unit: ## the part of test that needs no clusters
	scripts/test unit

ci: ## what CI runs on a fresh Debian, as root: installs what the tests need, then make test
	.ci/run

e2e: ## only the suites on real clusters; SUITE=proxy runs one, TEST=TestIPTables that test's (Linux, root)
	scripts/test e2e $(SUITE)

nightly: ## slow tests that run rarely: fuzzing, repeated race tests, big copies, the benchmark
	scripts/nightly

test-ipvs: ## the part of test whose cluster has kube-proxy in IPVS mode (Linux, root)
	scripts/packages
	cd test && $(GO) test -v -tags lab -count=1 -timeout 15m -run 'TestLabLifecycle/ipvs' ./lab
	cd test && $(GO) test -v -tags e2e -count=1 -timeout 30m -run TestIPVS ./e2e

bench: ## measure against the kernel and kubectl port-forward; writes docs/performance.md and its plots (Linux, root)
	$(GO) run -C test ./e2e/bench

bench-far: ## measure over lines that are slow, far or lossy; writes into docs/performance.md (Linux, root)
	$(GO) run -C test ./e2e/bench -only far -rounds 1 -seconds 4

lint: ## golangci-lint, of the version in tools/go.mod; formatting and layers are tests
	scripts/lint

clean: ## remove bin
	rm -rf bin
