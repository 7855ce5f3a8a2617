//go:build linux

package page_test

import (
	"testing"

	"github.com/chromedp/cdproto/emulation"

	"kubevpn/test/browser"
)

// scheme chooses the dark or the light color scheme.
func (b tab) scheme(name string) {
	b.Run(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}))
}

// contrasts lists visible texts whose contrast with their background is below 4.5:1, by the formula of WCAG 2.
const contrasts = `(() => {
	const rgb = (c) => c.match(/[\d.]+/g).map(Number);
	const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
		.reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
	const behind = (e) => { for (; e; e = e.parentElement) {
		const c = rgb(getComputedStyle(e).backgroundColor);
		if (c.length < 4 || c[3] > 0) return c;
	} };
	const bad = new Set();
	for (const e of document.querySelectorAll("body *")) {
		if (!e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
		const [a, b] = [luminance(rgb(getComputedStyle(e).color)), luminance(behind(e))].sort((x, y) => y - x);
		if ((a + 0.05) / (b + 0.05) < 4.5) bad.add(e.tagName + "." + e.className + " " + e.textContent.slice(0, 20) + " " + ((a + 0.05) / (b + 0.05)).toFixed(2));
	}
	return [...bad];
})()`

func TestTextHasContrast(t *testing.T) {
	f := newFake(t)
	b := open(t, f)
	f.change(state)
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		for name, texts := range views {
			b.View(name)
			b.Shows(texts...)
			for _, bad := range browser.Eval[[]string](b.Tab, contrasts) {
				t.Errorf("%s, %s: %s", scheme, name, bad)
			}
		}
	}
}
