//go:build linux

package main

import (
	"bytes"
	"fmt"
	"html"
	"strings"
	"time"

	uv "github.com/charmbracelet/ultraviolet"
	"github.com/charmbracelet/x/vt"
)

// The picture, in pixels. In a usual monospaced font, a character is 0.6 times as wide as the size of the font.
const (
	width, height           = 840, top + rows*lineHeight + 14
	cellWidth, lineHeight   = 8.06, 18
	left, top               = 17, 40
	fontSize, baseline      = 13.4, 14
	fonts                   = `ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace`
	windowStyle, buttonFill = `rx="8" fill="#0d1117" stroke="#30363d"`, "#484f58"
)

// svgRows returns the lines of a screen as SVG.
func svgRows(screen *vt.Emulator) []string {
	lines := make([]string, screen.Height())
	for y := range lines {
		var line strings.Builder
		for x := 0; x < screen.Width(); {
			style, text, begin := styleAt(screen, x, y), "", float64(x)*cellWidth
			for ; x < screen.Width() && styleAt(screen, x, y) == style; x++ {
				text += screen.CellAt(x, y).Content
			}
			text = strings.TrimRight(text, " ")
			if text == "" {
				continue
			}
			// textLength keeps the columns, whichever font the reader's machine has.
			fmt.Fprintf(&line, `<text x="%.1f" y="%d"%s textLength="%.1f" lengthAdjust="spacingAndGlyphs">%s</text>`,
				begin, baseline, style, float64(len([]rune(text)))*cellWidth, html.EscapeString(text))
		}
		lines[y] = line.String()
	}
	return lines
}

// styleAt returns the color and weight of a cell as attributes.
func styleAt(screen *vt.Emulator, x, y int) (attributes string) {
	cell := screen.CellAt(x, y)
	if cell.Style.Fg != nil {
		r, g, b, _ := cell.Style.Fg.RGBA()
		attributes += fmt.Sprintf(` fill="#%02x%02x%02x"`, r>>8, g>>8, b>>8)
	}
	if cell.Style.Attrs&uv.AttrBold != 0 {
		attributes += ` font-weight="bold"`
	}
	return attributes
}

// film writes the frames side by side. A part that several frames show is written once.
type film struct {
	parts bytes.Buffer
	strip bytes.Buffer
	known map[string]string // the content of a part: its ID
}

// part returns the ID of a part with this content.
func (f *film) part(content string) string {
	id, ok := f.known[content]
	if !ok {
		id = fmt.Sprintf("p%d", len(f.known))
		f.known[content] = id
		fmt.Fprintf(&f.parts, "<g id=%q>%s</g>\n", id, content)
	}
	return id
}

// add adds a frame at x. Most frames differ from the one before only in the line of the cursor.
func (f *film) add(frame frame, x int) {
	var others strings.Builder
	for y, line := range frame.rows {
		if line != "" && y != frame.cursorY {
			fmt.Fprintf(&others, `<use href="#%s" y="%d"/>`, f.part(line), y*lineHeight)
		}
	}
	fmt.Fprintf(&f.strip, `<use href="#%s" x="%d"/>`, f.part(others.String()), x)
	y := frame.cursorY * lineHeight
	if line := frame.rows[frame.cursorY]; line != "" {
		fmt.Fprintf(&f.strip, `<use href="#%s" x="%d" y="%d"/>`, f.part(line), x, y)
	}
	fmt.Fprintf(&f.strip, `<use href="#cursor" x="%.1f" y="%d"/>`+"\n", float64(x)+float64(frame.cursorX)*cellWidth, y)
}

// svg returns the recording as a picture that repeats. For those who do not see it, its description has the text. It
// shows the last frame where the reader's machine prefers pictures that do not move.
func (r *recording) svg() []byte {
	f := film{known: map[string]string{}}
	var total, at time.Duration
	for i, frame := range r.frames {
		f.add(frame, i*width)
		total += frame.lasts
	}
	var moves strings.Builder
	for i, frame := range r.frames {
		fmt.Fprintf(&moves, "%.2f%%{transform:translateX(%dpx)}\n", 100*at.Seconds()/total.Seconds(), -i*width)
		at += frame.lasts
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">
<title>The first minute with kubevpn</title>
<desc>%s</desc>
<style>
text{white-space:pre}
#film{animation:film %.1fs steps(1,end) infinite}
@media (prefers-reduced-motion:reduce){#film{animation:none;transform:translateX(%dpx)}}
@keyframes film{
%s}
</style>
`, width, height, width, height, html.EscapeString(r.text), total.Seconds(), -(len(r.frames)-1)*width, &moves)
	fmt.Fprintf(&out, `<defs>
<rect id="cursor" width="%.1f" height="%d" fill="#e6edf3" fill-opacity=".5"/>
%s</defs>
<rect x=".5" y=".5" width="%d" height="%d" %s/>
`, cellWidth, lineHeight, &f.parts, width-1, height-1, windowStyle)
	for i := range 3 {
		fmt.Fprintf(&out, `<circle cx="%d" cy="18" r="5.5" fill="%s"/>`, 22+18*i, buttonFill)
	}
	fmt.Fprintf(&out, `
<svg x="%d" y="%d" width="%d" height="%d" fill="#e6edf3" font-size="%.1f" font-family="%s"><g id="film">
%s</g></svg>
</svg>
`, left, top, width-left, rows*lineHeight, fontSize, fonts, &f.strip)
	return out.Bytes()
}
