//go:build !race

package packetlink

const raceEnabled = false
