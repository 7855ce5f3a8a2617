// Package managertest plays the neighbors of the traffic manager for the tests of its packages.
//
//	laptop: Connect, Hello ─▶ the manager under test ─▶ pod: TCPPod, UDPPod, ServeAt
//	                             ▲
//	                          FakeAPI: Objects, PodAt, ServiceOf and so on
package managertest
