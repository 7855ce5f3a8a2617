package term

import (
	"cmp"
	"context"
	"strings"

	"charm.land/bubbles/v2/key"
	tea "charm.land/bubbletea/v2"
	"charm.land/huh/v2"

	"kubevpn/internal/api"
)

// CanPick reports whether the user can pick from a list: In and Errout are terminals that understand escape sequences.
func (s *Streams) CanPick() bool { return File(s.In) != nil && File(s.Errout) != nil && !s.Dumb }

const maxPicks = 12 // how many options Pick shows at a time

// Pick lets the user pick one of several options on the terminal, if CanPick. It returns the first word of the option.
// If the user cancels, the error has the code ExitInterrupted.
func (s *Streams) Pick(ctx context.Context, title string, options []string) (picked string, err error) {
	list := huh.NewSelect[string]().Title("/") // without a title, the filter has no line
	list.Description(title + "\nType to filter, ↑ and ↓ to move, Enter to pick, Esc to cancel")
	var all []huh.Option[string]
	for _, option := range options {
		shown := api.CleanLine(option)
		value, _, _ := strings.Cut(shown, " ")
		all = append(all, huh.NewOption(shown, value))
	}
	list.Options(all...).Height(min(len(all), maxPicks) + 3).Value(&picked).Filtering(true)
	on := func(name string) key.Binding { return key.NewBinding(key.WithKeys(name)) }
	keys := &huh.KeyMap{Select: huh.SelectKeyMap{Up: on("up"), Down: on("down"), Next: on("enter")}}
	handle := func(_ tea.Model, m tea.Msg) tea.Msg {
		pressed, _ := m.(tea.KeyPressMsg)
		switch pressed.String() {
		case "esc", "ctrl+c":
			err = api.Errorf(api.ExitInterrupted, "canceled")
			return huh.NextField() // the end by KeyMap.Quit would leave the list on the screen
		case "up":
			if _, some := list.Hovered(); !some {
				return nil // or else Enter would pick an option that does not match
			}
		}
		return m
	}
	view := func(v tea.View) tea.View {
		v.DisableBracketedPasteMode, v.ReportFocus = true, false // huh does not filter when a text is pasted as one
		return v
	}
	failed := huh.NewForm(huh.NewGroup(list)).WithKeyMap(keys).WithShowHelp(false).WithViewHook(view).
		WithTheme(huh.ThemeFunc(huh.ThemeBase)).
		WithProgramOptions(tea.WithInput(File(s.In)), tea.WithOutput(File(s.Errout)), tea.WithoutSignalHandler(),
			tea.WithFilter(handle)).
		RunWithContext(ctx)
	return picked, cmp.Or(ctx.Err(), err, failed)
}
