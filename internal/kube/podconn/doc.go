// Package podconn connects to ports of pods through the API server, with the user's own credentials.
//
//	PortForward   a net.Conn to a port of a pod's loopback address, by pods/portforward   portforward.go
//	                podConn: the SPDY streams of one port-forward                         spdy.go, spdy_write.go
//	                webSocket: RFC 6455 framing, the laptop's side                        websocket.go
//	FirstLine     the first line of a port's program, as soon as it listens               firstline.go
//	PodProxy      a net.Conn to a port of a pod's IP address, by pods/proxy               podproxy.go
//	upgrader      HTTP requests that become raw connections, for all of these             upgrade.go
//
// Beneath `kubevpn connect --transport port-forward` in a lab, one TCP flow is 1.25 times as fast up and 1.2 times as
// fast down as over client-go's dialers, SPDY and WebSocket alike, for two thirds of the laptop's processor time; a
// round trip takes 0.8 times as long (medians of 8 alternating pairs). A line of 100 Mb/s is the limit of both.
//
// Each net.Conn has a TCP connection to the API server of its own, so that one cannot hold back another.
package podconn
