//go:build race

package packetlink

const raceEnabled = true
