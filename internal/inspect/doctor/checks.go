package doctor

import (
	"kubevpn/internal/api"
	"kubevpn/internal/inspect/check"
)

// The sections of the findings.
const (
	sectionMachine    = "This machine"
	sectionNames      = "Names"
	sectionNetworks   = "Networks"
	sectionKubeconfig = "Kubeconfig"
	sectionAPIServer  = "API server"
	sectionCluster    = "Cluster"
	sectionTransports = "Transports"
)

// The check that makes facts.cluster.
const checkKubeconfig = "kubeconfig"

// checks returns all checks, in the order of their findings.
func checks() []check.Check[*facts] {
	add := check.New[*facts]
	return []check.Check[*facts]{
		add(sectionMachine, "kernel", "", kernel),
		add(sectionMachine, "device", "", device),
		add(sectionMachine, "nftables", "", nftables),
		add(sectionMachine, "namespaces", "", namespaces),
		add(sectionMachine, "root helper", "", rootHelper),
		add(sectionMachine, "storage", "", storage),
		add(sectionMachine, "ports", "", ports),
		add(sectionMachine, "daemon", "", daemon),

		add(sectionNames, "resolver", "", resolver),
		add(sectionNames, "nameservers", "", nameservers),

		add(sectionNetworks, "other VPNs", "", otherVPNs),
		add(sectionNetworks, "overlap", "answer", overlap),

		add(sectionKubeconfig, checkKubeconfig, "", kubeconfig),
		add(sectionKubeconfig, "credentials", checkKubeconfig, credentials),

		add(sectionAPIServer, "address", "credentials", address),
		add(sectionAPIServer, "answer", "address", answer),
		add(sectionAPIServer, "clock", "answer", clock),
		add(sectionAPIServer, "upgrades", "answer", upgrades),

		add(sectionCluster, "manager", "answer", manager),
		add(sectionCluster, "rights", "answer", rights),
		add(sectionCluster, "kube-proxy", "answer", kubeProxy),

		add(sectionTransports, "session", "manager", session),
		add(sectionTransports, "version", "session", managerVersion),
		add(sectionTransports, "its rights", "session", managerRights),
		add(sectionTransports, api.TransportPortForward, "session", transportCheck(api.TransportPortForward)),
		add(sectionTransports, api.TransportAPIProxy, "session", transportCheck(api.TransportAPIProxy)),
		add(sectionTransports, api.TransportDirect, "session", transportCheck(api.TransportDirect)),
	}
}
