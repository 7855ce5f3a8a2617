package term

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"kubevpn/internal/api"
)

// Table aligns the cells of rows in columns. It has columns that only wide output shows.
type Table struct {
	w    *tabwriter.Writer
	wide bool
}

// NewTable returns a table that Flush writes to w.
func NewTable(w io.Writer, wide bool) Table {
	return Table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0), wide}
}

// Row adds a row with the cells of narrow and, in a wide table, of wide.
func (t Table) Row(narrow, wide []string) {
	if t.wide {
		narrow = append(narrow, wide...)
	}
	fmt.Fprintln(t.w, strings.Join(narrow, "\t"))
}

// Flush writes the rows.
func (t Table) Flush() error { return t.w.Flush() }

// PrintDetails writes a title, the name of a row of the table above, and lines about it.
func PrintDetails(w io.Writer, title string, lines []string) {
	if len(lines) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%s\n", title)
	for _, line := range lines {
		fmt.Fprintf(w, "  %s\n", line)
	}
}

// PrintEach writes a labelled line for each text.
func PrintEach(w io.Writer, label string, texts ...string) {
	for _, text := range texts {
		fmt.Fprintf(w, "  %-9s %s\n", label, text)
	}
}

// MaxShown limits the entries of one list for people. A cluster may state thousands.
const MaxShown = 20

// Dash returns the text of a cell, which is not empty.
func Dash(s string) string { return cmp.Or(s, "-") }

// OneLines makes text of the cluster fit the cells of a table.
func OneLines(cells []string) []string {
	return api.Texts(cells, func(cell string) string { return Dash(api.CleanLine(cell)) })
}

// Printable returns text of the cluster as one line, without escape sequences.
func Printable(s string) string {
	return strings.NewReplacer("\n", " ", "\t", " ").Replace(api.Clean(s))
}

// Age returns the time since then, or a dash for the zero Time.
func Age(since, now time.Time) string {
	if since.IsZero() {
		return "-"
	}
	return duration.HumanDuration(now.Sub(since))
}

// Took returns a duration with three digits.
func Took(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	unit := time.Microsecond
	for d >= 1000*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}
