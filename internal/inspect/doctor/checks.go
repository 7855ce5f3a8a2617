package doctor

import "kubevpn/internal/api"

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

// Checks whose results the Diagnosis uses.
const checkKubeconfig, checkRights = "kubeconfig", "rights"

// checks returns all checks, in the order of their findings.
func checks() []check {
	return []check{
		{sectionMachine, "kernel", "", kernel},
		{sectionMachine, "device", "", device},
		{sectionMachine, "nftables", "", nftables},
		{sectionMachine, "namespaces", "", namespaces},
		{sectionMachine, "root helper", "", rootHelper},
		{sectionMachine, "storage", "", storage},
		{sectionMachine, "ports", "", ports},
		{sectionMachine, "daemon", "", daemon},

		{sectionNames, "resolver", "", resolver},
		{sectionNames, "nameservers", "", nameservers},

		{sectionNetworks, "other VPNs", "", otherVPNs},
		{sectionNetworks, "overlap", "answer", overlap},

		{sectionKubeconfig, checkKubeconfig, "", kubeconfig},
		{sectionKubeconfig, "credentials", checkKubeconfig, credentials},

		{sectionAPIServer, "address", "credentials", address},
		{sectionAPIServer, "answer", "address", answer},
		{sectionAPIServer, "clock", "answer", clock},
		{sectionAPIServer, "upgrades", "answer", upgrades},

		{sectionCluster, "manager", "answer", manager},
		{sectionCluster, checkRights, "answer", rights},
		{sectionCluster, "kube-proxy", "answer", kubeProxy},

		{sectionTransports, "session", "manager", session},
		{sectionTransports, "version", "session", managerVersion},
		{sectionTransports, "its rights", "session", managerRights},
		{sectionTransports, api.TransportPortForward, "session", transportCheck(api.TransportPortForward)},
		{sectionTransports, api.TransportAPIProxy, "session", transportCheck(api.TransportAPIProxy)},
		{sectionTransports, api.TransportDirect, "session", transportCheck(api.TransportDirect)},
	}
}
