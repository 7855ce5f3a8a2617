// Package report writes an archive for an issue: logs, states and versions, without secrets. It works when kubevpn does
// not: the archive says what is missing, and why. Each part has a limit for its size and its time.
package report

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/redact"
	"kubevpn/pkg/wakeup"
)

const (
	// partMost limits a part, in bytes. Of a longer one, the end remains.
	partMost = 512 << 10
	// sourceTimeout limits the time that a source takes.
	sourceTimeout = 20 * time.Second
	// index is the name of the part that lists the others.
	index = "README.txt"
)

// Part is one file of the archive.
type Part struct {
	Name  string // "daemon.log"
	About string // what it contains
	Text  string
	Err   error // why the part, or something of it, is missing
}

// Collect runs the sources at the same time and returns their parts in order. A source stops when ctx ends, and returns
// what it has.
func Collect(ctx context.Context, sources ...func(context.Context) []Part) []Part {
	ctx, cancel := context.WithTimeoutCause(ctx, sourceTimeout, fmt.Errorf("no answer within %v", sourceTimeout))
	defer cancel()
	found := wakeup.All(sources, func(source func(context.Context) []Part) []Part { return source(ctx) })
	return slices.Concat(found...)
}

// Write writes the archive: the parts without the secrets that r finds, and an index. It returns the list of the parts.
func Write(w io.Writer, parts []Part, r *redact.Redactor) ([]api.ReportPart, error) {
	zip := gzip.NewWriter(w)
	archive := tar.NewWriter(zip)
	now := time.Now()
	add := func(name, text string) error {
		name = path.Join("kubevpn-report", path.Join("/", name)) // no name leaves the directory
		header := &tar.Header{Name: name, Mode: 0o600, Size: int64(len(text)), ModTime: now}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		_, err := io.WriteString(archive, text)
		return err
	}
	var list []api.ReportPart
	for _, p := range parts {
		// Clean first: what it removes may be within a secret.
		clean := func(text string) string { return r.Text(api.Clean(text)) }
		text := clean(end(p.Text))
		item := api.ReportPart{Name: clean(p.Name), About: clean(p.About), Bytes: len(text)}
		if p.Err != nil {
			item.Missing = api.OneLine(strings.ReplaceAll(clean(p.Err.Error()), "\n", "; "))
		}
		list = append(list, item)
		if text == "" {
			continue
		}
		if err := add(item.Name, text); err != nil {
			return nil, err
		}
	}
	var about strings.Builder
	fmt.Fprint(&about, "A report of `kubevpn report`, for an issue about kubevpn.\n\n", Notice, "\n\n")
	Print(&about, list)
	if err := add(index, about.String()); err != nil {
		return nil, err
	}
	if err := archive.Close(); err != nil {
		return nil, err
	}
	return list, zip.Close()
}

// end returns the last lines of a text, at most partMost bytes.
func end(text string) string {
	if len(text) <= partMost {
		return text
	}
	text = text[len(text)-partMost:]
	_, text, _ = strings.Cut(text, "\n")
	return "[the beginning is left out]\n" + text
}

// Notice is what the user should know before sending an archive.
const Notice = "kubevpn has replaced the secrets that it knows or recognizes by " + redact.Mark + ". The files\n" +
	"still name hosts, namespaces, workloads, addresses and users. Look at them before you send the archive."

// Print writes what the archive contains, and what it does not.
func Print(w io.Writer, list []api.ReportPart) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, p := range list {
		if p.Bytes > 0 {
			fmt.Fprintf(t, "%s\t%d bytes\t%s\n", p.Name, p.Bytes, p.About)
		}
	}
	t.Flush()
	title := "\nNot collected:\n"
	for _, p := range list {
		if p.Missing != "" {
			fmt.Fprintf(w, "%s%s: %s\n", title, p.About, p.Missing)
			title = ""
		}
	}
}
