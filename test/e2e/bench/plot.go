//go:build linux

package main

import (
	"bytes"
	"image/color"
	"math"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

const (
	plotWidth  = 24 * vg.Centimeter
	plotHeight = 11 * vg.Centimeter
	// groupShare is the part of its space that a group of bars fills.
	groupShare = 0.85
	labelSize  = vg.Length(6.5)
	sans       = font.Variant("Sans")
)

// chart is a plot of bars: a group for each row, in it a bar for each path.
type chart struct {
	name   string
	title  string
	axis   string
	format string // of the figure over a bar
	rows   []string
	paths  []path
	lower  func(row string) string // the row of a bar's lower part; nil: bars have one part
	upper  func(row string) string // the row of a bar's whole height
	powers bool                    // the axis has powers of ten
}

func itself(row string) string { return row }

func bulkRows() []string {
	var rows []string
	for _, m := range measurements {
		if m.bulk() {
			rows = append(rows, m.row)
		}
	}
	return rows
}

var plots = []chart{
	{name: "throughput", title: "Throughput", axis: "MB/s", format: "%.0f", rows: bulkRows(), paths: paths[1:],
		upper: itself},
	{name: "latency", title: "Round trip of 1 byte, alone and beside an upload (each line is ten times the one below)",
		axis: "µs", format: "%.0f",
		rows: []string{rttRow, loadedRow}, paths: paths, upper: itself, powers: true},
	{name: "processor", title: "Processor time of the whole machine for a GB; the lower part of a bar is the laptop's",
		axis: "s", format: "%.1f",
		rows: bulkRows(), paths: paths, lower: laptopRow, upper: processorRow},
}

// pathColors groups paths by transport: gray without kubevpn, orange by port-forward, blue by api-proxy, green by
// direct.
var pathColors = map[path]color.RGBA{
	kernel:        {0x33, 0x33, 0x33, 0xff},
	portForward:   {0x88, 0x88, 0x88, 0xff},
	upgraded:      {0xbb, 0xbb, 0xbb, 0xff},
	gvisorForward: {0xd9, 0x5f, 0x0e, 0xff},
	systemForward: {0xfe, 0x99, 0x29, 0xff},
	gvisorProxy:   {0x08, 0x51, 0x9c, 0xff},
	systemProxy:   {0x6b, 0xae, 0xd6, 0xff},
	gvisorDirect:  {0x00, 0x6d, 0x2c, 0xff},
	systemDirect:  {0x74, 0xc4, 0x76, 0xff},
}

// lighter returns the color of the upper part of a bar with two parts.
func lighter(c color.RGBA) color.RGBA {
	half := func(v uint8) uint8 { return 255 - (255-v)/2 }
	return color.RGBA{half(c.R), half(c.G), half(c.B), 0xff}
}

// draw returns the SVG. The same values give the same bytes.
func (c chart) draw(r *report) ([]byte, error) {
	p, err := c.plot(r)
	if err != nil {
		return nil, err
	}
	canvas := vgsvg.New(plotWidth, plotHeight)
	p.Draw(draw.New(canvas))
	var out bytes.Buffer
	if _, err := canvas.WriteTo(&out); err != nil {
		return nil, err
	}
	// The reader's machine may lack the font that was used to measure; Arial is as wide.
	return bytes.ReplaceAll(out.Bytes(), []byte("font-family:Liberation Sans;"),
		[]byte("font-family:Liberation Sans,Arial,sans-serif;")), nil
}

func (c chart) plot(r *report) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = c.title + "\n" + r.machine.String()
	for _, style := range []*text.Style{
		&p.Title.TextStyle, &p.X.Tick.Label, &p.Y.Label.TextStyle, &p.Y.Tick.Label, &p.Legend.TextStyle,
	} {
		style.Font.Variant, style.Font.Size = sans, 9
	}
	p.Title.Padding = 4
	p.Y.Label.Text = c.axis
	p.Y.Min = 0
	p.Legend.Top, p.Legend.Padding = true, 1.5
	p.NominalX(c.rows...)
	p.X.Tick.Length = 0
	p.X.Min, p.X.Max = -0.5, float64(len(c.rows))-0.5
	if c.powers {
		p.Y.Tick.Marker = plot.TickerFunc(powerTicks)
	}
	grid := plotter.NewGrid()
	grid.Vertical.Width = 0
	p.Add(grid)
	// The space between axes and margins is unknown before drawing, so the bars are a little narrower than possible.
	width := groupShare * (plotWidth - 2.5*vg.Centimeter) / vg.Length(len(c.rows)*len(c.paths))
	for i, way := range c.paths {
		offset := (vg.Length(i) - vg.Length(len(c.paths)-1)/2) * width
		if err := c.add(p, r, way, width, offset); err != nil {
			return nil, err
		}
	}
	p.Y.Max *= 1.35 // room for the legend
	return p, nil
}

// add draws the bars of one path, one in each group.
func (c chart) add(p *plot.Plot, r *report, way path, width, offset vg.Length) error {
	whole, lower := make(plotter.Values, len(c.rows)), make(plotter.Values, len(c.rows))
	labels := plotter.XYLabels{XYs: make(plotter.XYs, len(c.rows)), Labels: make([]string, len(c.rows))}
	for i, row := range c.rows {
		whole[i] = c.height(r.median(c.upper(row), way))
		if c.lower != nil {
			lower[i] = min(c.height(r.median(c.lower(row), way)), whole[i])
		}
		labels.XYs[i] = plotter.XY{X: float64(i), Y: whole[i]}
		labels.Labels[i] = r.shown(c.format, c.upper(row), way)
	}
	bars := func(values plotter.Values, fill color.Color, on *plotter.BarChart) (*plotter.BarChart, error) {
		b, err := plotter.NewBarChart(values, width)
		if err != nil {
			return nil, err
		}
		b.Color, b.Offset, b.LineStyle.Width = fill, offset, 0
		if on != nil {
			b.StackOn(on)
		}
		p.Add(b) // Add reads the current heights of the bars
		return b, nil
	}
	parts := []plotter.Values{whole}
	if c.lower != nil {
		upper := make(plotter.Values, len(whole))
		for i := range whole {
			upper[i] = whole[i] - lower[i]
		}
		parts = []plotter.Values{lower, upper}
	}
	named, err := bars(parts[0], pathColors[way], nil)
	if err != nil {
		return err
	}
	for _, upper := range parts[1:] {
		if _, err := bars(upper, lighter(pathColors[way]), named); err != nil {
			return err
		}
	}
	p.Legend.Add(strings.Trim(string(way), "`"), named)
	figures, err := plotter.NewLabels(labels)
	if err != nil {
		return err
	}
	figures.Offset = vg.Point{X: offset, Y: 2}
	for i := range figures.TextStyle {
		figures.TextStyle[i].Font.Variant, figures.TextStyle[i].Font.Size = sans, labelSize
		figures.TextStyle[i].XAlign = text.XCenter
	}
	p.Add(figures)
	return nil
}

// height returns the height of a value's bar in units of the axis.
func (c chart) height(v float64) float64 {
	if c.powers {
		return math.Log10(max(v, 1))
	}
	return v
}

// powerTicks marks the logarithms 0, 1, 2... with 1, 10, 100...
func powerTicks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for e := math.Ceil(low); e <= high; e++ {
		ticks = append(ticks, plot.Tick{Value: e, Label: strconv.FormatFloat(math.Pow(10, e), 'f', 0, 64)})
	}
	return ticks
}
