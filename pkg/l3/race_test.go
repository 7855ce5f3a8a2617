//go:build race

package l3

const raceEnabled = true
