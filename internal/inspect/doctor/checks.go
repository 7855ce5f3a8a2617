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

// Checks that others need, and the one that fills the table of rights.
const (
	checkRights      = "rights"
	needsKubeconfig  = "kubeconfig"
	needsCredentials = "credentials"
	needsAddress     = "address"
	needsAnswer      = "answer"
	needsManager     = "manager"
	needsSession     = "session"
)

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
		{sectionNetworks, "overlap", needsAnswer, overlap},

		{sectionKubeconfig, needsKubeconfig, "", kubeconfig},
		{sectionKubeconfig, needsCredentials, needsKubeconfig, credentials},

		{sectionAPIServer, needsAddress, needsCredentials, address},
		{sectionAPIServer, needsAnswer, needsAddress, answer},
		{sectionAPIServer, "clock", needsAnswer, clock},
		{sectionAPIServer, "upgrades", needsAnswer, upgrades},

		{sectionCluster, needsManager, needsAnswer, managerHere},
		{sectionCluster, checkRights, needsAnswer, rights},
		{sectionCluster, "kube-proxy", needsAnswer, kubeProxy},
		{sectionCluster, "pod security", needsAnswer, podSecurity},

		{sectionTransports, needsSession, needsManager, session},
		{sectionTransports, "version", needsSession, managerVersion},
		{sectionTransports, "its rights", needsSession, managerRights},
		{sectionTransports, api.TransportPortForward, needsSession, transportCheck(api.TransportPortForward)},
		{sectionTransports, api.TransportAPIProxy, needsSession, transportCheck(api.TransportAPIProxy)},
		{sectionTransports, api.TransportDirect, needsSession, transportCheck(api.TransportDirect)},
	}
}
