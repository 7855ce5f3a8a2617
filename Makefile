# The two uses that matter:
#   make demo   a real cluster on this machine, kubevpn on a laptop beside it, and back to nothing
#   make test   everything that shows that kubevpn works
# With a cluster of your own: make install, then kubevpn connect.

GO     ?= go
PREFIX ?= /usr/local

VERSION ?= $(shell sed -n 's/^\tversion = "\(.*\)"$$/\1/p' internal/version/version.go)
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null)$(shell git diff --quiet HEAD 2>/dev/null || echo -dirty)
# The traffic manager's image: a name to build it by, or, for a release of kubevpn, what that name became when it was pushed:
#   make push-image IMAGE=registry.example/kubevpn:1
#   make build IMAGE=registry.example/kubevpn@sha256:...
# Without the latter kubevpn has no default image, and wants --image, KUBEVPN_IMAGE or its configuration file to say one.
IMAGE   ?=

LDFLAGS := -s -w -X kubevpn/internal/version.version=$(VERSION) -X kubevpn/internal/version.commit=$(COMMIT)
BUILD    = CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)'
# What the image holds: /traffic, which runs as an ordinary user, and iptables for its gateway.
LAYOUT   = --ref $(or $(IMAGE),$(error set IMAGE: make $@ IMAGE=registry.example/kubevpn:1)) --file bin/traffic:/traffic --user 65532:65532 --iptables

.DEFAULT_GOAL := help
.PHONY: help build install image push-image lab demo demo-down check docs test e2e nightly test-ipvs bench lint clean bin/kubevpn bin/traffic bin/lab bin/image

help: ## show this
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  %-11s %s\n", $$1, $$2 }'

build: bin/kubevpn bin/traffic ## bin/kubevpn for the laptop, bin/traffic for the cluster

bin/kubevpn: LDFLAGS += $(if $(findstring @sha256:,$(IMAGE)),-X kubevpn/internal/version.image=$(IMAGE))
bin/kubevpn bin/traffic:
	$(BUILD) -o $@ ./cmd/$(notdir $@)

# What is not the product is a module of its own, in test.
bin/lab bin/image:
	cd test && $(BUILD) -o ../$@ ./cmd/$(notdir $@)

install: bin/kubevpn ## put kubevpn into PREFIX/bin (PREFIX=/usr/local)
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 0755 bin/kubevpn $(DESTDIR)$(PREFIX)/bin/kubevpn

image: bin/traffic bin/image ## bin/kubevpn-image.tar of IMAGE, which `ctr -n k8s.io images import` takes
	bin/image build $(LAYOUT) --out bin/kubevpn-image.tar

push-image: bin/traffic bin/image ## push IMAGE to its registry, with docker login's credentials
	bin/image push $(LAYOUT)

lab: bin/lab ## bin/lab, which runs real clusters on this machine

demo: IMAGE = localhost/kubevpn:demo
demo: build image lab ## a cluster, connect, a page by name, ClusterIP and pod IP, disconnect (Linux, root)
	$(GO) run -C test ./e2e/demo $(IMAGE)

demo-down: lab ## remove what demo made
	bin/lab --name demo down

check: ## formatting, vet, lint, layers, documents, and the tests of what changed, in a minute
	scripts/check

docs: ## write docs/reference anew from the commands
	$(GO) test -run TestReferenceIsGenerated ./internal/cli -args -update-reference

test: ## lint, unit tests, network namespaces, real clusters (the last two: Linux, root); without clusters: scripts/test unit
	scripts/test

e2e: ## only the suites on real clusters; SUITE=proxy runs one, TEST=TestIPTables that test's (Linux, root)
	scripts/test e2e $(SUITE)

nightly: ## what is slow and rare: fuzzing, repeated race tests, the benchmark; an hour
	scripts/nightly

test-ipvs: ## the part of test whose cluster has kube-proxy in IPVS mode (Linux, root)
	scripts/packages
	cd test && $(GO) test -v -tags lab -count=1 -timeout 15m -run 'TestLabLifecycle/ipvs' ./lab
	cd test && $(GO) test -v -tags e2e -count=1 -timeout 30m -run TestIPVS ./e2e

bench: ## measure against the kernel and kubectl port-forward; writes docs/performance.md and its plots (Linux, root)
	$(GO) run -C test ./e2e/bench

lint: ## golangci-lint, of the version in tools/go.mod; formatting and layers are tests
	scripts/lint

clean: ## remove bin
	rm -rf bin
