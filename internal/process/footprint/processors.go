package footprint

import (
	"os"
	"runtime"
)

// HalveProcessors limits the program to half of the machine's processors, unless $GOMAXPROCS is set. The programs that
// it serves use the other half: they have as much to do for each byte. Data that one goroutine passes to the next is
// also more often in the processor's cache.
//
// On two processors, the daemon with 1 flow, api-proxy: 306 instead of 261 MB/s down, 360 instead of 290 up, 2316
// instead of 1967 new connections a second, a round trip of 345 instead of 365 µs. The agent adds
// 159 instead of 196 µs to a request that it forwards.
func HalveProcessors() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2))
	}
}
