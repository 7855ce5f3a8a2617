package build

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"kubevpn/internal/api"
)

// Previous does what Kubevpn and Image do, with the source of the previous release or, before the first release, of the
// previous commit. The programs report version. If the current source does not speak the protocol version of that
// source, Previous uses the current source. It returns a description of the source that it used.
func Previous(ctx context.Context, dir, ref, version string) (used string, err error) {
	root, err := moduleRoot(ctx, productModule)
	if err != nil {
		return "", err
	}
	revision, err := previousRevision(ctx, root)
	if err != nil {
		return "", err
	}
	old := filepath.Join(dir, "source")
	if err := export(ctx, root, revision, old); err != nil {
		return "", err
	}
	protocol, err := protocolOf(old)
	if err != nil {
		return "", err
	}
	used = revision
	if protocol < api.OldestProtocol || protocol > api.Protocol {
		used = fmt.Sprintf("the current source, because %s has protocol version %d and not %d to %d", revision,
			protocol, api.OldestProtocol, api.Protocol)
		old = root
	}
	s := source{old, version}
	if err := s.program(ctx, dir, "kubevpn"); err != nil {
		return "", fmt.Errorf("%s: %w", used, err)
	}
	if err := s.image(ctx, dir, ref); err != nil {
		return "", fmt.Errorf("%s: %w", used, err)
	}
	return used, nil
}

// previousRevision returns the newest tag of a release that the commit before HEAD contains, or else that commit.
func previousRevision(ctx context.Context, root string) (string, error) {
	commit, err := git(ctx, root, "rev-parse", "--verify", "HEAD^")
	if err != nil {
		return "", fmt.Errorf("finding the commit before HEAD (`git fetch --unshallow --tags` completes a shallow "+
			"clone): %w", err)
	}
	tags, err := git(ctx, root, "tag", "--list", "v[0-9]*", "--merged", "HEAD^", "--sort=-creatordate")
	if err != nil {
		return "", fmt.Errorf("finding the previous release: %w", err)
	}
	if newest, _, _ := strings.Cut(string(tags), "\n"); newest != "" {
		return newest, nil
	}
	return strings.TrimSpace(string(commit)), nil
}

// export writes the files of a revision into a new directory.
func export(ctx context.Context, root, revision, dir string) error {
	archive, err := git(ctx, root, "archive", "--format=tar", revision)
	if err != nil {
		return fmt.Errorf("reading the source of %s: %w", revision, err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	tar := exec.CommandContext(ctx, "tar", "-xf", "-")
	tar.Dir, tar.Stdin = dir, bytes.NewReader(archive)
	if out, err := tar.CombinedOutput(); err != nil {
		return fmt.Errorf("unpacking the source of %s: %w\n%s", revision, err, out)
	}
	return nil
}

func git(ctx context.Context, root string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "git", append([]string{"-C", root}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("git %s: %w: %s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

var protocolConstant = regexp.MustCompile(`(?m)^const Protocol = (\d+)$`)

// protocolOf returns the version of the protocol that the source in root has, api.Protocol, or 0 if it has none.
func protocolOf(root string) (int, error) {
	files, err := filepath.Glob(filepath.Join(root, "internal", "api", "*.go"))
	if err != nil {
		return 0, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return 0, err
		}
		if found := protocolConstant.FindSubmatch(text); found != nil {
			return strconv.Atoi(string(found[1]))
		}
	}
	return 0, nil
}
