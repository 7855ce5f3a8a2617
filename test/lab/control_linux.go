package lab

import (
	"net/netip"
	"path/filepath"
	"strconv"
)

// startEtcd and the functions after it start the control plane.

func (l *Lab) startEtcd() error {
	return l.start(Process{Name: "etcd", Place: l.config.control(), Args: []string{
		l.programs.Etcd,
		"--name=lab",
		"--data-dir=" + filepath.Join(l.dir(), "etcd"),
		"--listen-client-urls=http://127.0.0.1:2379",
		"--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380",
		"--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=lab=http://127.0.0.1:2380",
		"--unsafe-no-fsync",
		"--log-level=warn",
	}}, nil)
}

func (l *Lab) startAPIServer() error {
	c := l.config
	return l.start(Process{Name: "kube-apiserver", Place: l.config.control(), Args: []string{
		l.programs.Kube, "kube-apiserver",
		"--etcd-servers=http://127.0.0.1:2379",
		"--advertise-address=" + c.APIServer(c.Families()[0]).String(),
		"--secure-port=6443",
		"--service-cluster-ip-range=" + joined(c.Families(), func(f Family) netip.Prefix { return f.Services }),
		"--tls-cert-file=" + l.pki("apiserver.crt"),
		"--tls-private-key-file=" + l.pki("apiserver.key"),
		"--client-ca-file=" + l.pki("ca.crt"),
		"--kubelet-certificate-authority=" + l.pki("ca.crt"),
		"--kubelet-client-certificate=" + l.pki("kubelet-client.crt"),
		"--kubelet-client-key=" + l.pki("kubelet-client.key"),
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc." + ClusterDomain,
		"--service-account-key-file=" + l.pki("sa.pub"),
		"--service-account-signing-key-file=" + l.pki("sa.key"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--requestheader-client-ca-file=" + l.pki("ca.crt"),
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-username-headers=X-Remote-User",
		"--proxy-client-cert-file=" + l.pki("front-proxy.crt"),
		"--proxy-client-key-file=" + l.pki("front-proxy.key"),
		"--profiling=false",
		// Connect to pods if no kube-proxy runs beside the API server, and otherwise to ClusterIPs.
		"--enable-aggregator-routing=" + strconv.FormatBool(c.guests),
	}}, nil)
}

func (l *Lab) startControllers() error {
	kubeconfig := l.pki("kube-controller-manager.kubeconfig")
	return l.start(Process{Name: "kube-controller-manager", Place: l.config.control(), Args: []string{
		l.programs.Kube, "kube-controller-manager",
		"--kubeconfig=" + kubeconfig,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		"--service-account-private-key-file=" + l.pki("sa.key"),
		"--root-ca-file=" + l.pki("ca.crt"),
		"--cluster-signing-cert-file=" + l.pki("ca.crt"),
		"--cluster-signing-key-file=" + l.pki("ca.key"),
		"--use-service-account-credentials=true",
		"--controllers=*,-node-ipam-controller", // createNodes assigns the pod ranges
		"--kube-api-qps=500",                    // with the default of 20, its controllers need 5 s to start
		"--kube-api-burst=1000",
		"--leader-elect=false",
		"--profiling=false",
	}}, nil)
}

func (l *Lab) startScheduler() error {
	kubeconfig := l.pki("kube-scheduler.kubeconfig")
	return l.start(Process{Name: "kube-scheduler", Place: l.config.control(), Args: []string{
		l.programs.Kube, "kube-scheduler",
		"--kubeconfig=" + kubeconfig,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		"--leader-elect=false",
		"--profiling=false",
	}}, nil)
}

// startRouter starts the router's DNS and web servers.
func (l *Lab) startRouter() error {
	listen, addresses := "", ""
	for _, f := range l.config.Families() {
		for _, a := range []netip.Addr{f.Gateway, f.Router} {
			if listen != "" {
				listen += ","
			}
			listen += netip.AddrPortFrom(a, 53).String()
		}
	}
	addresses = joined(l.config.Families(), func(f Family) netip.Addr { return f.Outside })
	return l.start(Process{Name: "outside", Place: "router", Args: []string{
		l.programs.Outside, "-dns", listen, "-address", addresses, "-zone", OutsideZone, "-log", l.queryLog(),
	}}, nil)
}

// OutsideZone is the DNS zone that the router serves. Package outside defines its records.
const OutsideZone = "outside.test"

// controlPlane lists the kinds of processes that run in node 1's network but outside of its mount namespace.
func controlPlane(kind string) bool {
	switch kind {
	case "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler":
		return true
	}
	return false
}
