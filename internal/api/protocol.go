package api

// Protocol is the newest version of the protocol that this kubevpn speaks: session frames, stream headers and control
// messages between laptop and traffic manager, and between laptop and agent.
const Protocol = 3

// OldestProtocol is the oldest version that this kubevpn speaks. A release that raises Protocol keeps the version
// before, so that laptops one minor version ahead or behind work.
const OldestProtocol = 3

// CommonProtocol returns the version that a session uses: the newest that both ends speak. newest and oldest are those
// of the other end. It may leave out oldest, if it speaks newest alone.
func CommonProtocol(newest, oldest int) (version int, ok bool) {
	if oldest == 0 {
		oldest = newest
	}
	version = min(newest, Protocol)
	return version, version >= max(oldest, OldestProtocol)
}
